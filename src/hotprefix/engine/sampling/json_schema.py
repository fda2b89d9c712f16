"""JSON schemas that clients send, as the grammar library takes them. Owns: `adapted`, and the options that
every schema is compiled with.

Rules:
1. A keyword that JSON Schema calls an annotation refuses nothing, so it is left out: a `format` that the
   library does not know, `contentEncoding` and the like.
2. `uniqueItems` is left out: a grammar cannot remember what an array holds, and a client that reads a set
   accepts repeated items.
3. A `propertyNames` that lists its names becomes properties.
4. A branch of `anyOf` whose pattern contains a look-around is left out if another branch remains; whatever
   the others allow is valid. Example: pydantic writes a Decimal as a number, or a text with such a pattern.
5. Everything else stays. If the library does not support a keyword, it refuses the schema and names the
   keyword.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Blanks between two JSON tokens are bounded, because a small model may generate blanks for ever.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\t]{0,20}"}
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_LEFT_OUT = frozenset({"uniqueItems", "contentEncoding", "contentMediaType", "contentSchema"})
_SCHEMA = frozenset(
    {"items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"}
    | {"propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LOOKS_AROUND = re.compile(r"(?:^|[^\\])(?:\\\\)*\(\?<?[=!]")


def adapted(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the schema, changed by the module's rules. Apart from them the same values are valid."""
    kept: dict[str, Any] = _walked(schema, schema)
    return kept


def _walked(schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    kept = {}
    for key, value in _with_names(schema, root).items():
        if key in _LEFT_OUT or (key == "format" and _is_annotation(value)):
            continue
        if key in _LISTS and isinstance(value, list):
            value = [_walked(one, root) for one in value]
            value = _without_look_around(value) if key == "anyOf" else value
        elif key in _SCHEMA:
            value = _walked(value, root)
        elif key in _MAPS and isinstance(value, Mapping):
            value = {name: _walked(one, root) for name, one in value.items()}
        kept[key] = value
    return kept


def _is_annotation(value: Any) -> bool:
    return isinstance(value, str) and value not in FORMATS


def _without_look_around(branches: list[Any]) -> list[Any]:
    kept = [one for one in branches if not (isinstance(one, dict) and _looks_around(one.get("pattern")))]
    return kept or branches


def _looks_around(pattern: Any) -> bool:
    return isinstance(pattern, str) and _LOOKS_AROUND.search(pattern) is not None


def _with_names(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with the names that `propertyNames` lists (`dict[Literal["a", "b"], int]`) as properties,
    each of which may be absent."""
    names = _listed(schema.get("propertyNames"), root)
    if names is None or schema.keys() & {"properties", "patternProperties"}:
        return schema
    kept = {key: value for key, value in schema.items() if key != "propertyNames"}
    value = kept.get("additionalProperties", True)
    return kept | {"properties": dict.fromkeys(names, value), "additionalProperties": False}


def _listed(names: Any, root: Mapping[str, Any]) -> list[str] | None:
    """The strings that `propertyNames` allows, if it lists them itself or in the definition that it refers
    to; None if it does not."""
    if isinstance(names, Mapping) and isinstance(ref := names.get("$ref"), str):
        _, _, name = ref.rpartition("/")
        groups = {f"#/{group}/{name}": root.get(group) for group in ("$defs", "definitions")}
        group = groups.get(ref)
        names = group.get(name) if isinstance(group, Mapping) else None
    if not isinstance(names, Mapping):
        return None
    listed = [names["const"]] if "const" in names else names.get("enum")
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        return None
    return listed

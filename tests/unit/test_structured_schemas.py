"""Schemas as pydantic writes them: outputs follow them, and pydantic itself reads the outputs."""

from __future__ import annotations

import datetime
import decimal
import enum
import functools
import json
import pathlib
import uuid
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, Field, TypeAdapter
from text_models import CHATML, toy

from hotprefix.engine.params import StructuredOutput
from hotprefix.engine.sampling.json_schema import adapted
from hotprefix.engine.sampling.structured import Compiler, Vocabulary
from hotprefix.engine.text.tool_choice import forced_calls
from hotprefix.engine.text.tools import ToolFormat
from hotprefix.errors import InputError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    price: decimal.Decimal


class Dog(BaseModel):
    kind: Literal["dog"]
    names: set[str]


@functools.cache
def compiler() -> Compiler:
    return Compiler(Vocabulary.of(toy(CHATML), 300))


def takes(schema: Any, text: str) -> bool:
    """Whether the grammar of the schema allows the whole text and an end after it."""
    constraint = compiler().compile(StructuredOutput("json_schema", json.dumps(schema)))
    for byte in text.encode():
        if not constraint.allowed()[byte]:
            return False
        constraint.advance(byte)
    return bool(constraint.allowed()[258])


@pytest.mark.parametrize(
    ("kind", "text", "wrong"),
    [
        (decimal.Decimal, "12.50", "{}"),
        (Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2, gt=0)], "1.5", "[]"),
        (decimal.Decimal | None, "null", '[""]'),
        (set[int], "[1, 2]", '["a"]'),
        (frozenset[str], '["a"]', "[1]"),
        (datetime.datetime, '"2024-05-06T07:08:09Z"', '"yesterday"'),
        (datetime.date, '"2024-05-06"', '"2024"'),
        (datetime.timedelta, '"P1D"', '"one day"'),
        (uuid.UUID, '"12345678-1234-5678-1234-567812345678"', '"1"'),
        (pathlib.Path, '"a/b"', "1"),
        (bytes, '"abc"', "1"),
        (dict[Literal["a", "b"], int], '{"a": 1}', '{"c": 1}'),
        (dict[Colour, int], '{"red": 1, "blue": 2}', '{"green": 1}'),
        (dict[str, decimal.Decimal], '{"x": 1.5}', '{"x": []}'),
        (Annotated[Cat | Dog, Field(discriminator="kind")], '{"kind": "dog", "names": []}', '{"kind": 1}'),
    ],
)
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_what_pydantic_asks_for_is_followed(kind: Any, text: str, wrong: str, mode: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    schema = adapter.json_schema(mode=mode)
    if mode == "serialization" and "decimal" in str(kind).lower() and text != "null":
        text = f'"{text}"' if not text.startswith("{") else '{"x": "1.5"}'  # a Decimal is written as a text
    adapter.validate_json(text)
    assert takes(schema, text)
    assert not takes(schema, wrong)


def test_a_format_that_is_not_known_is_an_annotation() -> None:
    """JSON Schema 2020-12, Validation, 7.1: an unknown format refuses nothing."""
    assert takes({"type": "string", "format": "colour"}, '"anything"')
    assert takes({"type": "string", "format": "uuid4"}, '"1"')
    assert not takes({"type": "string", "format": "colour"}, "1")
    assert not takes({"type": "string", "format": "date"}, '"anything"')
    assert takes({"type": "integer", "format": "int32"}, "7")
    assert takes({"items": [{"format": "a"}], "prefixItems": [{"format": "b", "type": "string"}]}, '["x"]')
    with pytest.raises(InputError, match="format"):
        takes({"type": "string", "format": 5}, '"x"')


def test_names_and_values_are_no_keywords() -> None:
    """A property called `format`, and a constant that looks like a schema, stay what they are."""
    schema = {
        "type": "object",
        "properties": {"format": {"type": "string", "format": "x"}, "uniqueItems": {"type": "integer"}},
        "required": ["format", "uniqueItems"],
        "const": {"format": "x", "uniqueItems": 1},
    }
    kept = adapted(schema)
    assert kept["properties"] == {"format": {"type": "string"}, "uniqueItems": {"type": "integer"}}
    assert kept["const"] == schema["const"]
    assert schema["properties"]["format"] == {"type": "string", "format": "x"}  # type: ignore[index]


def test_a_pattern_that_looks_around_leaves_the_other_branches() -> None:
    """Earlier versions of pydantic write a Decimal in this way."""
    text = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
    assert takes({"anyOf": [{"type": "number"}, text]}, "12.5")
    assert not takes({"anyOf": [{"type": "number"}, text]}, '"x"')
    assert takes({"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^\(\?=$"}]}, '"(?="')
    for alone in (text, {"anyOf": [text]}):
        with pytest.raises(InputError, match="look-around"):
            takes(alone, "12.5")


def test_what_cannot_be_enforced_is_refused_by_its_name() -> None:
    for keyword, value in (
        ("not", {"type": "string"}),
        ("contains", {"type": "integer"}),
        ("dependentRequired", {"a": ["b"]}),
        ("propertyNames", {"format": "uuid"}),
        ("unevaluatedProperties", False),
    ):
        with pytest.raises(InputError, match=keyword):
            takes({keyword: value}, "{}")


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("json_schema", '{"maximum": Infinity}'),
        ("json_schema", '{"enum": [1e400]}'),
        ("json_schema", '{"type": "integer", "maximum": ' + "9" * 400 + "}"),
        ("json_schema", '{"enum": ["\\ud800"]}'),
        ("json_schema", '{"a":' * 50_000),
        ("regex", "\ud800"),
        ("lark", 'start: "\ud800"'),
        ("choice", '["\\ud800"]'),
    ],
)
def test_what_is_no_number_and_no_text_is_refused_as_an_input(kind: str, spec: str) -> None:
    with pytest.raises(InputError, match=kind):
        compiler().compile(StructuredOutput(kind, spec))


def test_a_forced_calls_arguments_follow_the_same_rules() -> None:
    def tool(parameters: Any) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]

    schema = TypeAdapter(Dog).json_schema()
    tokenizer = toy(CHATML)
    structured = forced_calls(ToolFormat.LLAMA3, tool(schema), "required", tokenizer)
    assert structured is not None
    constraint = compiler().compile(structured)
    for byte in b'{"name": "f", "parameters": {':
        assert constraint.allowed()[byte]
        constraint.advance(byte)
    for _ in range(20):
        assert constraint.allowed()[ord("\n")]
        constraint.advance(ord("\n"))
    assert np.flatnonzero(constraint.allowed()).tolist() == [ord('"')], "blanks are bounded here too"
    with pytest.raises(InputError) as refused:
        forced_calls(ToolFormat.LLAMA3, tool({"maximum": float("inf")}), "required", tokenizer)
    assert refused.value.param == "tools"

"""From a file and a command line to an `Experiment`. Owns: finding, reading, changing and checking it.

Rules:
1. Whatever is wrong ends in one `InputError` that names file, field, value and what to do.
2. What the command line changes is applied before the checks, and is part of the experiment's identity. That
   includes settings that are left out because a trace from the command line has no use for them (`_suit`);
   these are told.
3. Paths in a file are relative to the file, paths on the command line to the working directory.
"""

from __future__ import annotations

import os.path
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hotprefix.errors import InputError
from hotprefix.lab.experiment.explain import explain, nearest
from hotprefix.lab.experiment.settings import Settings
from hotprefix.lab.experiment.spec import Experiment
from hotprefix.lab.experiment.variants import check, put
from hotprefix.lab.trace.open_trace import open_trace

SETTINGS = frozenset(Settings.model_fields)
OF_SESSIONS = ("concurrency", "session_rate")  # of [load]: both say when sessions begin


@dataclass(frozen=True, slots=True)
class Changes:
    """What the command line changes.

    trace: replaces the whole trace section.
    limit: only the first requests of the trace, that many.
    seeds: how many seeds.
    until_decided: go on, up to that many seeds, while a claim is undecided.
    sets: "key=value" with a value as in TOML, or a bare word; "key=" leaves out what the file sets.
    """

    trace: str | None = None
    limit: int | None = None
    seeds: int | None = None
    until_decided: int | None = None
    sets: tuple[str, ...] = ()


def shipped() -> dict[str, Path]:
    """Experiments that come with the package, by name."""
    folder = Path(str(resources.files("hotprefix.lab"))) / "experiments"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(
    target: str, changes: Changes = Changes(), told: Callable[[str], None] = lambda line: None
) -> Experiment:
    """The experiment of a shipped name or a .toml path, changed and checked. told: called with each sentence
    about a setting of the file that does not suit the given trace. Raises InputError."""
    path = find(target)
    raw = _read(path)
    _anchor(raw, path.parent)
    _apply(raw, changes)
    _suit(raw, changes, told)
    experiment = _validate(raw, path)
    try:
        check(experiment)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", param=error.param) from None
    return experiment


def find(target: str) -> Path:
    """The file of a shipped name or a path. Raises InputError."""
    known = shipped()
    if target in known:
        return known[target]
    path = Path(target)
    if path.suffix == ".toml" or os.path.isfile(path):
        return path
    raise InputError(
        f"experiment {target!r}: give a .toml file or a shipped one; {nearest(target, known)}",
        param="experiment",
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path}: cannot read the experiment: {error.strerror}", param="experiment"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not TOML: {error}", param="experiment") from error


def _anchor(raw: dict[str, Any], folder: Path) -> None:
    """Make the paths of a file independent of the working directory."""
    places: list[tuple[Any, str]] = [(raw.get("trace"), "source"), (raw, "cost")]
    for variant in [*_tables(raw, "conditions"), *_tables(raw, "arms")]:
        places += [(variant.get("set"), "trace.source"), (variant.get("set"), "cost")]
    for table, key in places:
        value = table.get(key) if isinstance(table, dict) else None
        if isinstance(value, str) and os.path.isfile(folder / value):
            table[key] = str(folder / value)


def _tables(raw: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = raw.get(key)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _apply(raw: dict[str, Any], changes: Changes) -> None:
    for text in changes.sets:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise InputError(f"--set {text!r}: give key=value, for example kernel.order=lpm", param="set")
        _refuse_varied(raw, key.strip())
        if value.strip():
            put(raw, key.strip(), _value(value.strip()))
        else:
            _leave_out(raw, key.strip())
    if changes.trace is not None:
        _refuse_varied(raw, "trace")
        raw["trace"] = {"source": changes.trace}
    if changes.limit is not None:
        put(raw, "trace.limit", changes.limit)
    if changes.seeds is not None:
        raw["seeds"] = changes.seeds
    if changes.until_decided is not None:
        raw["until_decided"] = changes.until_decided


def _suit(raw: dict[str, Any], changes: Changes, told: Callable[[str], None]) -> None:
    """Leave out what a file says about sessions if the command line's trace has none, because the file was
    written for its own trace. What the command line itself says stays and is refused later, as is a trace
    that cannot be read."""
    load = raw.get("load")
    if changes.trace is None or not isinstance(load, dict) or load.get("loop", "auto") != "auto":
        return
    said = {text.partition("=")[0].strip() for text in changes.sets}
    keys = [key for key in OF_SESSIONS if key in load and f"load.{key}" not in said]
    try:
        if not keys or open_trace(changes.trace).has_sessions:
            return
    except InputError:
        return
    for key in keys:
        told(
            f"load.{key}={load.pop(key)} is left out: {changes.trace} records no sessions, so its requests "
            "arrive as recorded (load.speed makes them come faster)"
        )


def _leave_out(raw: dict[str, Any], key: str) -> None:
    table: Any = raw
    *way, last = key.split(".")
    for part in way:
        table = table.get(part) if isinstance(table, dict) else None
    if not isinstance(table, dict) or last not in table:
        raise InputError(
            f"--set '{key}=': the experiment does not set {key}, so there is nothing to leave out",
            param="set",
        )
    del table[last]


def _refuse_varied(raw: dict[str, Any], key: str) -> None:
    """Raises InputError if a key that arms or conditions set is to be set for all of them as well."""
    varied = [(f"{kind[:-1]} {entry.get('name')!r}", entry.get("set")) for kind in ("arms", "conditions")
              for entry in _tables(raw, kind)]  # fmt: skip
    varied.append(("factors", raw.get("factors")))
    for place, keys in varied:
        for other in keys if isinstance(keys, dict) else ():
            if other == key or other.startswith(f"{key}.") or key.startswith(f"{other}."):
                raise InputError(
                    f"{key}: {place} sets {other}; change it in the experiment's file", param="set"
                )


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _validate(raw: dict[str, Any], path: Path) -> Experiment:
    body = {key: value for key, value in raw.items() if key not in SETTINGS}
    if "settings" in body:
        raise InputError(f"{path}: settings: no such key; give its parts ({', '.join(sorted(SETTINGS))})")
    body["settings"] = {key: value for key, value in raw.items() if key in SETTINGS}
    try:
        return Experiment.model_validate(body)
    except ValidationError as error:
        raise InputError(
            f"{path}: {explain(error, Experiment, hidden='settings')}", param="experiment"
        ) from error

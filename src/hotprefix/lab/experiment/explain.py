"""Say what is wrong with a file in one line. Owns: the wording of validation messages.

Rules:
1. A message names the field, the value and what is allowed. A misspelt key gets the nearest right one.
2. The first fault is told; of further ones only the number.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hotprefix.errors import shortened


def explain(error: ValidationError, model: type[BaseModel], *, hidden: str = "") -> str:
    """The message for a validation error of `model`. hidden: a section that the file does not show; its keys
    stand one level up there."""
    faults = error.errors()
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    first = faults[0]
    field = ".".join(str(part) for part in first["loc"] if part != hidden) or "the file"
    if first["type"] == "extra_forbidden":
        known = _siblings(model, first["loc"], hidden)
        return f"{field}: no such key; {nearest(str(first['loc'][-1]), known)}{more}"
    if first["type"] == "missing":
        return f"{field}: missing; give it{more}"
    if first["type"] == "value_error":  # of a whole section, in words of ours
        return f"{field}: {first['ctx']['error']}{more}"
    reason = first["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    give = "give " if reason != first["msg"] else ""
    return f"{field}={shortened(first['input'])}: {give}{reason}{more}"


def nearest(word: str, known: Iterable[str]) -> str:
    """In words: the known key that was probably meant, and all that exist."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    return (f"did you mean {close[0]}? " if close else "") + f"known: {', '.join(names)}"


def _siblings(model: type[BaseModel], loc: tuple[int | str, ...], hidden: str) -> set[str]:
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        inner = _model_in(model.model_fields[part].annotation)
        if inner is None:
            return set()
        model = inner
    names = set(model.model_fields)
    if hidden in names:
        names |= set(_model_in(model.model_fields[hidden].annotation).model_fields)  # type: ignore[union-attr]
    return names - {hidden}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of an annotation like `Model`, `Model | None` or `tuple[Model, ...]`."""
    for found in (annotation, *get_args(annotation)):
        if isinstance(found, type) and issubclass(found, BaseModel):
            return found
    return None

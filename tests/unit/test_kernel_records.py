"""What goes in and comes out of the kernel cannot be changed by those who get it."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import hotprefix.kernel
from hotprefix.kernel.counters import Counters

RECORDS = ("plan", "events", "request", "config", "kernel")
COUNT = {Counters}  # grows while the kernel works


def dataclasses_of(module: str) -> Iterator[type]:
    for one in vars(importlib.import_module(module)).values():
        if isinstance(one, type) and dataclasses.is_dataclass(one) and one.__module__ == module:
            yield one


@pytest.mark.parametrize("name", RECORDS)
def test_records_of_the_kernel_s_edge_are_frozen_and_have_slots(name: str) -> None:
    found = list(dataclasses_of(f"hotprefix.kernel.{name}"))
    assert found
    for record in found:
        assert record.__dataclass_params__.frozen, record  # type: ignore[attr-defined]
        assert "__slots__" in vars(record), record


def test_every_dataclass_of_the_kernel_has_slots() -> None:
    """There are as many as requests, nodes and steps."""
    names = [each.name for each in pkgutil.walk_packages(hotprefix.kernel.__path__, "hotprefix.kernel.")]
    every = {one for name in names for one in dataclasses_of(name)}
    assert every > COUNT
    assert [one.__name__ for one in every if "__slots__" not in vars(one)] == []

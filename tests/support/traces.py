"""Small trace files for tests, and where published ones are: in the folder that HOTPREFIX_TRACES names, which
docs/traces.md says how to fill (or beside this checkout)."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotprefix.commands.trace import FOLDER_VARIABLE
from hotprefix.lab.trace.ideal import EndlessCache, Ideal
from hotprefix.lab.trace.kvtester import COLUMNS
from hotprefix.lab.trace.published import find
from hotprefix.lab.trace.trace_request import Trace

BESIDE = Path(__file__).parents[2].parent / "shared" / "data" / "traces"


def ideal(trace: Trace) -> Iterator[Ideal]:
    """For each request, what an endless cache would have reused, and how hot its first block was."""
    cache = EndlessCache(trace.block_size)
    return (cache.add(request) for request in trace)


def shared(name: str) -> Path:
    """A published trace, compressed or not; skips the test where there is none."""
    folder = Path(os.environ.get(FOLDER_VARIABLE) or BESIDE)
    path = find(name.removesuffix(".gz"), folder)
    if path is None:
        pytest.skip(f"{name} is not in the folder of {FOLDER_VARIABLE} (hotprefix trace published)")
    return path


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """One JSON value a line; strings go as they are. Compressed by the name's end."""
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def mooncake(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]} | changes


def session(rows: list[list[Any]], **changes: Any) -> dict[str, Any]:
    """A coding-agent session of 64-token blocks; 128 tokens of tools and system prompt."""
    head = {"id": "s", "models": ["m", "n"], "block_size": 64, "tool_tokens": 100, "system_tokens": 28}
    return head | {"cols": list(COLUMNS), "rows": rows} | changes


def row(
    t: float = 0.0, agent: int = 0, tokens: int = 256, parent: int = -1, keep: int = 0,
    *, new: int | None = None, out: int = 10, api: float | None = 2.0, inp: str = "u", model: int | str = 0,
) -> list[Any]:  # fmt: skip
    fresh = tokens // 64 - keep if new is None else new
    return [t, agent, tokens, out, parent, keep, fresh, 0.0, api, None, inp, "tool_use", model]

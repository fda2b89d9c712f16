"""Generators by name. Owns: `generate_trace` and the list of what it can make.

Rules: parameters are checked once, here, with the offending value in the message. The trace's provenance
states the generator, the seed and all parameters, so it can be made again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from hotprefix.errors import ConfigError
from hotprefix.lab.trace.generate import agents, streams
from hotprefix.lab.trace.problems import Report
from hotprefix.lab.trace.streamed import StreamedTrace
from hotprefix.lab.trace.trace_request import Provenance, TraceRequest


@dataclass(frozen=True, slots=True)
class Generator:
    """One generator. params: the class of its parameters. make: returns the requests for parameters and a
    seed."""

    params: type[Any]
    make: Callable[[Any, int], Iterator[TraceRequest]]
    has_sessions: bool = False


GENERATORS: Final[dict[str, Generator]] = {
    "agents": Generator(agents.AgentParams, agents.generate, has_sessions=True),
    "bursts": Generator(streams.BurstParams, streams.bursts),
    "documents": Generator(streams.DocumentParams, streams.documents),
    "skew": Generator(streams.SkewParams, streams.skew),
    "churn": Generator(streams.ChurnParams, streams.churn),
    "stranger": Generator(streams.StrangerParams, streams.stranger),
}


def generate_trace(
    name: str, params: Mapping[str, Any] | None = None, *, seed: int = 0, limit: int | None = None
) -> StreamedTrace:
    """A trace by its generator's name. Parameters that `params` does not set have their defaults. limit: only
    so many requests, from the first on. Raises ConfigError for an unknown name or parameter, or a value out
    of range."""
    if name not in GENERATORS:
        raise ConfigError(f"generator {name!r}: there are {', '.join(GENERATORS)}", param="generate")
    if seed < 0 or (limit is not None and limit < 1):
        raise ConfigError(f"seed={seed}, limit={limit}: give a seed >= 0 and a limit >= 1", param="seed")
    generator = GENERATORS[name]
    adapter: TypeAdapter[Any] = TypeAdapter(generator.params)
    try:
        checked = adapter.validate_json(json.dumps(dict(params or {})))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{name}.{where}={first['input']!r}: {first['msg']}", param=where) from None

    def read(report: Report) -> Iterator[TraceRequest]:
        return generator.make(checked, seed)

    values = adapter.dump_json(checked).decode()
    notes = (
        f"generated: {name}, seed {seed}, {values}",
        "answers have blocks, and the next prompt of a session contains them"
        if generator.has_sessions
        else "answers are never asked for again, so they have no blocks",
    )
    provenance = Provenance(f"generate {name} --seed {seed}", "generated", notes)
    return StreamedTrace(name, checked.block_size, True, generator.has_sessions, provenance, read, limit)

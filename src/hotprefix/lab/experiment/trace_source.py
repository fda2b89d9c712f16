"""The requests of a run. Owns: opening what a `TraceSpec` names, its identity, and what a replay has to know
of it beforehand.

Rules:
1. A file's identity is its content and how it is read, never where it lies. A generated trace's identity is
   its generator, its parameters and the seed.
2. A trace without prefixes is refused, because any reuse of it would be invented.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotprefix.errors import InputError
from hotprefix.lab.experiment.settings import LoadSpec, TraceSpec
from hotprefix.lab.trace.cc_sessions import Assumed, SessionStarts
from hotprefix.lab.trace.info import TraceInfo, info
from hotprefix.lab.trace.open_trace import SAMPLES, open_trace
from hotprefix.lab.trace.problems import require_prefixes, require_sessions
from hotprefix.lab.trace.trace_request import Trace, TraceRequest


def open_workload(spec: TraceSpec, load: LoadSpec, seed: int) -> Trace:
    """The trace. seed: of generators and of session starts. Raises InputError."""
    if spec.generate is not None:
        if load.session_rate is not None:
            raise InputError(
                f"load.session_rate={load.session_rate:g}: generator {spec.generate!r} says when sessions "
                "begin: leave it out, or set its own (trace.params.session_rate)",
                param="load.session_rate",
            )
        from hotprefix.lab.trace.generate.registry import generate_trace  # a recorded trace needs none

        trace: Trace = generate_trace(spec.generate, spec.params, seed=seed, limit=spec.limit)
    else:
        trace = open_trace(
            spec.source or "",
            block_size=spec.block_size,
            limit=spec.limit,
            sessions=SessionStarts(rate=load.session_rate, seed=seed),
            assumed=Assumed(shared_prefix=spec.shared_prefix, answers=spec.answers),
        )
    require_prefixes(trace, "a replay of cache policies")
    if load.loop == "closed":
        require_sessions(trace, "load.loop=closed")
    return trace


def identity(spec: TraceSpec) -> dict[str, Any]:
    """The trace's identity without the seed. Raises InputError if the file cannot be read."""
    if spec.generate is not None:
        return spec.model_dump(include={"generate", "params", "limit"})
    source = spec.source or ""
    if source in SAMPLES:
        return spec.model_dump(exclude={"generate", "params"})  # a part of the package, like its code
    path = Path(source)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"trace {path}: {error.strerror}; give a file", param="trace") from error
    return {"sha256": digest, **spec.model_dump(exclude={"source", "generate", "params"})}


@dataclass(frozen=True, slots=True)
class Survey:
    """What one pass over a trace tells.

    info: its counts.
    session_tokens: the longest context (prompt and answer) of a session, as the mean over sessions; a request
    without a session counts as one.
    longest_tokens: the longest context of any request.
    """

    info: TraceInfo
    session_tokens: float
    longest_tokens: int


def survey(trace: Trace) -> Survey:
    """Survey a trace in one pass. Raises InputError if it is empty, and what reading raises."""
    longest: dict[tuple[str, str], int] = {}

    def seen(request: TraceRequest) -> None:
        key = ("request", request.id) if request.session is None else ("session", request.session)
        longest[key] = max(longest.get(key, 0), request.input_length + request.output_length)

    found = info(trace, seen)
    if not longest:
        raise InputError(f"trace {trace.name}: it has no requests; give another", param="trace")
    return Survey(found, sum(longest.values()) / len(longest), max(longest.values()))

"""Everything that is wrong with a trace. Owns: `check`.

Rules: one pass, which does not stop at the first fault. Each kind of fault is counted, and its first case is
shown. Besides what a reader refuses, the check follows block ids through the whole trace: an id stands for
everything before it, so it must have one predecessor and one namespace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hotprefix.errors import InputError
from hotprefix.lab.trace.canonical import context
from hotprefix.lab.trace.streamed import StreamedTrace
from hotprefix.lab.trace.trace_request import Blocks, TraceRequest

_UNSEEN: Final = -2
_Held = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Problem:
    """A kind of fault. count: how often it occurs. first: its first case."""

    what: str
    count: int
    first: str


@dataclass(slots=True)
class Checked:
    """The result of a check.

    requests: how many requests are good.
    skipped: how many lines are bad.
    problems: the kinds of faults.
    notes: facts that are no faults but worth knowing, each with how often it occurs.
    """

    requests: int = 0
    skipped: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)


def check(trace: StreamedTrace) -> Checked:
    """Read the whole trace, past bad lines, and follow its ids. An error that ends the reading is a problem
    too."""
    trace.skip_bad = True
    found, follow, equal, last = Checked(), _Follow(trace.block_size), 0, None
    fatal: list[Problem] = []
    try:
        for request in trace:
            found.requests += 1
            follow.add(request)
            equal += request.arrival_s is not None and request.arrival_s == last
            last = request.arrival_s
    except InputError as error:
        fatal.append(Problem("reading ends", 1, str(error)))
    report = trace.report
    found.skipped = report.skipped
    found.problems += [Problem(kind, count, first) for kind, (count, first) in report.kinds.items()]
    found.problems += follow.problems() + fatal
    found.notes = {"arrivals out of order": report.reordered, "arrivals equal to the one before": equal}
    return found


class _Follow:
    """What earlier requests say about block ids, and the contradictions found."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._before: _Held = np.full(1024, _UNSEEN, dtype=np.int64)
        self._space: _Held = np.full(1024, _UNSEEN, dtype=np.int64)
        self._spaces: dict[str, int] = {}
        self._sessions: dict[str, str | None] = {}
        self._found: dict[str, tuple[int, str]] = {}

    def add(self, request: TraceRequest) -> None:
        if request.id in self._sessions:
            self._note("a request id stands twice", 1, request.id)
        if request.parent is not None and self._sessions.get(request.parent) != request.session:
            self._note("a parent is no earlier request of its session", 1, f"{request.id}: {request.parent}")
        self._sessions[request.id] = request.session
        whole = context(request, self._block_size)
        for blocks in (request.blocks,) if whole is request.blocks else (request.blocks, whole):
            self._chain(request, blocks)

    def problems(self) -> list[Problem]:
        return [Problem(what, count, first) for what, (count, first) in self._found.items()]

    def _chain(self, request: TraceRequest, blocks: Blocks) -> None:
        if not len(blocks):
            return
        self._grow(int(blocks.max()) + 1)
        before = np.concatenate(([-1], blocks[:-1].astype(np.int64)))
        self._compare(self._before, blocks, before, "a block id follows different blocks", request.id)
        space = np.full(len(blocks), self._spaces.setdefault(request.namespace, len(self._spaces)))
        self._compare(self._space, blocks, space, "a block id stands in different namespaces", request.id)

    def _compare(self, held: _Held, blocks: Blocks, now: _Held, what: str, where: str) -> None:
        """Note each block for which `now` differs from what earlier requests said (`held`), and remember what
        is said about new blocks."""
        known = held[blocks]
        differs = (known != _UNSEEN) & (known != now)
        if differs.any():
            self._note(what, int(differs.sum()), f"request {where}, block {blocks[differs.argmax()]}")
        held[blocks[known == _UNSEEN]] = now[known == _UNSEEN]

    def _grow(self, need: int) -> None:
        more = max(need, 2 * len(self._before)) - len(self._before)
        if need > len(self._before):
            self._before = np.pad(self._before, (0, more), constant_values=_UNSEEN)
            self._space = np.pad(self._space, (0, more), constant_values=_UNSEEN)

    def _note(self, what: str, count: int, first: str) -> None:
        total, earliest = self._found.get(what, (0, first))
        self._found[what] = (total + count, earliest)

"""How requests do against the operator's objectives. Owns: `Goodput`, the counts since the engine's start.

Rules: there are counts only if objectives are given. Each request counts once, when it ends or is refused, by
its heat on arrival and by its outcome. `definitions` says which requests meet the objectives and which are
hot. Times are by the loop's clock, from the moment at which the client's request reached the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hotprefix.definitions import GROUPS, KnownPrefixes, Slo, is_hot
from hotprefix.engine.live_request import LiveRequest
from hotprefix.engine.messages import Fared, Outcomes
from hotprefix.kernel.plan import Finish
from hotprefix.kernel.request import Request, RequestId
from hotprefix.kernel.tokens import TOKEN_BYTES


@dataclass(slots=True)
class _Asked:
    """A request that has not ended. last: the name of the prompt up to its last complete page
    (`Goodput._chain`)."""

    request: Request
    arrived: float
    group: str
    last: int


@dataclass(slots=True)
class Goodput:
    """page_size: tokens."""

    slo: Slo
    page_size: int
    known: KnownPrefixes = field(default_factory=KnownPrefixes)
    _asked: dict[RequestId, _Asked] = field(default_factory=dict)
    _groups: dict[str, Outcomes] = field(init=False)

    def __post_init__(self) -> None:
        timeouts = None if self.slo.timeout_s is None else 0
        self._groups = {name: Outcomes(timeouts=timeouts) for name in GROUPS}

    def asked(self, request: Request, arrived: float) -> None:
        """A request is about to be given to the kernel."""
        chain, last = self._chain(hash(request.namespace), request.key)
        hot = is_hot(self.known.ask(chain).pages * self.page_size, request.prompt_len)
        self._asked[request.id] = _Asked(request, arrived, "hot" if hot else "cold", last)

    def refused(self, request: RequestId) -> None:
        """The kernel has refused the request."""
        self._groups[self._asked.pop(request).group].refused += 1

    def ended(self, live: LiveRequest, finish: Finish, said: bytes, now: float) -> None:
        """The request has ended. said: its outputs."""
        asked = self._asked.pop(live.message.id)
        self._answered(asked, said)
        group = self._groups[asked.group]
        well = finish in (Finish.STOP, Finish.LENGTH)
        first = now if live.first is None else live.first
        if group.timeouts is not None:
            group.timeouts += bool(self.slo.timed_out(first - asked.arrived))
        if well:
            tpot = live.timing().decode or 0.0
            met = self.slo.met(first - asked.arrived, tpot / max(1, live.outputs - 1), now - asked.arrived)
            group.good += bool(met)
            group.missed += not met
        else:
            group.failed += finish is Finish.ERROR
            group.aborted += finish is Finish.ABORT

    def fared(self) -> Fared:
        """A snapshot of the counts."""
        return Fared(self.slo, {name: replace(found) for name, found in self._groups.items()})

    def _answered(self, asked: _Asked, said: bytes) -> None:
        """From now on the pages that the answer completed are known. The first of them is the one in which
        the prompt ends."""
        page = self.page_size
        begun = asked.request.prompt_len // page * page * TOKEN_BYTES
        self.known.answered(self._chain(asked.last, asked.request.key[begun:] + said)[0])

    def _chain(self, last: int, tokens: bytes) -> tuple[list[int], int]:
        """The names of the complete pages of `tokens`, and the last of these names. last: the name of all
        that comes before `tokens`. Names never leave this process, and Python keys the hash of bytes, so no
        client can look for tokens whose names collide."""
        width = self.page_size * TOKEN_BYTES
        found = []
        for at in range(0, len(tokens) - width + 1, width):
            last = hash((last, tokens[at : at + width]))
            found.append(last)
        return found, last

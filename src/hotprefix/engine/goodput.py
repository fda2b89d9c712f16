"""How requests fare against the operator's objectives. Owns: `Goodput`, its counts since the engine's start.

Rules: kept only where objectives are given. Each request counts once, when it ends or is refused, by its
heat on arrival and by its outcome; what meets the objectives and what is hot is `definitions`'. Times are
the loop's clock, from when the client's request reached the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hotprefix.definitions import GROUPS, KnownPrefixes, Slo, is_hot
from hotprefix.engine.live import Live
from hotprefix.engine.messages import Fared, Outcomes
from hotprefix.kernel.plan import Finish
from hotprefix.kernel.request import Request, RequestId
from hotprefix.kernel.tokens import TOKEN_BYTES


@dataclass(slots=True)
class _Asked:
    """A request that has not ended. last: names the prompt up to its last complete page."""

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
        """A request comes to the kernel."""
        chain, last = self._chain(hash(request.namespace), request.key)
        hot = is_hot(self.known.ask(chain).pages * self.page_size, request.prompt_len)
        self._asked[request.id] = _Asked(request, arrived, "hot" if hot else "cold", last)

    def refused(self, request: RequestId) -> None:
        """The kernel would not take it."""
        self._groups[self._asked.pop(request).group].refused += 1

    def ended(self, live: Live, finish: Finish, said: bytes, now: float) -> None:
        """A request's last progress, with its outputs."""
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
        """A snapshot."""
        return Fared(self.slo, {name: replace(found) for name, found in self._groups.items()})

    def _answered(self, asked: _Asked, said: bytes) -> None:
        """The pages that the answer completed are known from now on; the one in which the prompt ends is
        first."""
        page = self.page_size
        begun = asked.request.prompt_len // page * page * TOKEN_BYTES
        self.known.answered(self._chain(asked.last, asked.request.key[begun:] + said)[0])

    def _chain(self, last: int, tokens: bytes) -> tuple[list[int], int]:
        """Names of the complete pages of `tokens` behind what `last` names, and the last of them. They stay
        in this process: no client can look for tokens whose names collide, as Python keys the hash of
        bytes."""
        width = self.page_size * TOKEN_BYTES
        found = []
        for at in range(0, len(tokens) - width + 1, width):
            last = hash((last, tokens[at : at + width]))
            found.append(last)
        return found, last

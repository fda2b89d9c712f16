"""Which grammar is checked next. Owns: `Turns`, the queue before the one process that checks grammars.

Rules:
1. A verdict that is known needs no turn.
2. Turns are shared by what checks cost, not by how many there are. Owners are API keys, or peers if there are
   no keys. Of the owners that wait, the one whose checks have cost least comes next, so an owner with costly
   schemas delays its own checks and not those of other owners.
3. An owner may have only so many checks waiting.
4. A check that several requests want is made once.
5. If a request goes away, its wish goes with it. A check that has begun is finished and charged, and its
   verdict is kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from hotprefix.engine.params import StructuredOutput
from hotprefix.engine.sampling.checker import Verdict
from hotprefix.errors import QueueFull

MAX_WAITING = 16


@dataclass(slots=True)
class _Wish:
    """One owner's wish for one check, and the requests that wait for it."""

    answer: asyncio.Future[Verdict]
    requests: int = 0


@dataclass(slots=True)
class _Owner:
    """spent: seconds of processor time charged, counted from the same zero for all owners that wait."""

    spent: float
    wishes: OrderedDict[StructuredOutput, _Wish] = field(default_factory=OrderedDict)


class Turns:
    """The queue of one event loop.

    known: gives a verdict that needs no check, at once.
    judge: makes a check. It runs in a thread, one at a time.
    """

    def __init__(
        self,
        known: Callable[[StructuredOutput], Verdict | None],
        judge: Callable[[StructuredOutput], Verdict],
    ) -> None:
        self._known, self._judge = known, judge
        self._owners: OrderedDict[str, _Owner] = OrderedDict()
        self._worker: asyncio.Task[None] | None = None
        self._least = 0.0  # what an owner that comes now is taken to have spent

    @property
    def waiting(self) -> int:
        """Checks that have not begun."""
        return sum(len(owner.wishes) for owner in self._owners.values())

    async def verdict(self, owner: str, structured: StructuredOutput) -> Verdict:
        """The verdict on a grammar. Raises QueueFull if the owner has as many other checks waiting as it may
        have."""
        verdict = self._known(structured)
        if verdict is not None:
            return verdict
        wish = self._wish(owner, structured)
        wish.requests += 1
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work())
        try:
            return await asyncio.shield(wish.answer)
        finally:
            wish.requests -= 1
            if not wish.requests and not wish.answer.done():
                self._withdraw(owner, structured, wish)

    def _wish(self, name: str, structured: StructuredOutput) -> _Wish:
        owner = self._owners.setdefault(name, _Owner(self._least))
        wish = owner.wishes.get(structured)
        if wish is None:
            if len(owner.wishes) >= MAX_WAITING:
                raise QueueFull(
                    f"{MAX_WAITING} grammars of this client wait to be checked, which is the limit: try "
                    "again later, or send grammars that were checked before"
                )
            wish = owner.wishes[structured] = _Wish(asyncio.get_running_loop().create_future())
        return wish

    def _withdraw(self, name: str, structured: StructuredOutput, wish: _Wish) -> None:
        owner = self._owners.get(name)
        if owner is not None and owner.wishes.get(structured) is wish:
            del owner.wishes[structured]

    async def _work(self) -> None:
        try:
            while (name := self._next()) is not None:
                owner = self._owners[name]
                structured, wish = owner.wishes.popitem(last=False)
                self._least = owner.spent
                try:
                    verdict = await asyncio.to_thread(self._judge, structured)
                except Exception as error:
                    self._settle(structured, wish, error)
                    continue
                owner.spent += verdict.cost_s
                self._settle(structured, wish, verdict)
        finally:
            self._worker = None
            self._owners.clear()

    def _next(self) -> str | None:
        """The owner whose turn it is; None if none waits. Owners that wait for nothing, and have been charged
        no more than a newcomer would be, are forgotten."""
        for name in [n for n, o in self._owners.items() if not o.wishes and o.spent <= self._least]:
            del self._owners[name]
        waiting = {name: owner.spent for name, owner in self._owners.items() if owner.wishes}
        return min(waiting, key=waiting.__getitem__, default=None)

    def _settle(self, structured: StructuredOutput, wish: _Wish, outcome: Verdict | Exception) -> None:
        """Answer every request that wants this check, whichever owner it belongs to."""
        others = (owner.wishes.pop(structured, None) for owner in self._owners.values())
        for one in (wish, *others):
            if one is None or one.answer.done():
                continue
            if isinstance(outcome, Exception):
                one.answer.set_exception(outcome)
                one.answer.exception()  # mark it as seen: there may be no request that waits
            else:
                one.answer.set_result(outcome)

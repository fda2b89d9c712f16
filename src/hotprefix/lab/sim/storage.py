"""The tiers below L1 on the virtual clock. Owns: `Store`, a shared L3, and `HostSide`, one instance's links.

Rules: pages have names and sizes here, never contents. A store is bounded and forgets the page used longest
ago. A fetch moves the leading pages that are there when it begins; it is delivered between steps, as the
engine does it. Saves and puts go on in the background and take their wire's time, restores are waited for
by their step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import StepPlan
from hotprefix.lab.sim.links import Wires


class Store:
    """An external store of at most `pages` pages, shared by instances; least recently used first out."""

    def __init__(self, pages: int) -> None:
        self._limit = pages
        self._pages: OrderedDict[bytes, None] = OrderedDict()

    def put(self, key: bytes) -> None:
        self._pages[key] = None
        self._pages.move_to_end(key)
        if len(self._pages) > self._limit:
            self._pages.popitem(last=False)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark a chain as just used, its root most recently."""
        for key in reversed(tuple(keys)):
            if key in self._pages:
                self._pages.move_to_end(key)

    def leading(self, keys: tuple[bytes, ...]) -> int:
        """How many of these pages, from the first, are there."""
        found = 0
        for key in keys:
            if key not in self._pages:
                break
            found += 1
        return found


@dataclass(slots=True)
class _Pending:
    id: int
    pages: int
    begun: float
    arrives: float


class HostSide:
    """What one instance's plans ask of L2's and L3's links. page_bytes: of one page. disturb_at(when):
    have the instance look again then."""

    def __init__(
        self, wires: Wires, page_bytes: int, store: Store | None, disturb_at: Callable[[float], None]
    ) -> None:
        self.wires = wires
        self._bytes, self._store, self._disturb_at = page_bytes, store, disturb_at
        self._pending: dict[int, _Pending] = {}

    @property
    def busy(self) -> bool:
        """True while pages are on their way from L3."""
        return bool(self._pending)

    def begin(self, plan: StepPlan, now: float) -> None:
        """Start what a plan asks of the background."""
        if self.wires.fetch is not None:
            for fetch in plan.fetches:
                pages = self._store.leading(fetch.keys) if self._store is not None else 0
                arrives = self.wires.fetch.send(pages * self._bytes, now)
                self._pending[fetch.id] = _Pending(fetch.id, pages, now, arrives)
                self._disturb_at(arrives)
        for cancelled in plan.cancels:
            if self._pending.pop(cancelled, None) is not None and self.wires.fetch is not None:
                self.wires.fetch.cancels += 1
        if self.wires.save is not None and plan.saves:
            self.wires.save.send(len(plan.saves) * self._bytes, now)
        if self._store is not None and self.wires.put is not None:
            if plan.stores:
                self.wires.put.send(len(plan.stores) * self._bytes, now)
            for store in plan.stores:
                self._store.put(store.key)
            for chain in plan.touches:
                self._store.touch(chain)

    def restore_s(self, plan: StepPlan, now: float) -> float:
        """Seconds that a plan's restores take, waiting for the wire included."""
        if self.wires.restore is None or not plan.restores:
            return 0.0
        return self.wires.restore.send(len(plan.restores) * self._bytes, now) - now

    def land(self, kernel: Kernel, now: float) -> None:
        """Hand over what has arrived."""
        for pending in [p for p in self._pending.values() if p.arrives <= now]:
            del self._pending[pending.id]
            kernel.transfer_done(pending.id, pending.pages, pending.arrives - pending.begun, now)

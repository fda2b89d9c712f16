"""How long moving or computing pages takes. Owns: the running estimates, and restore-or-recompute.

Rules: the choice is by predicted time, not by presence. Estimates start from the
configured figures and follow what drivers report (an exponential mean), so both drivers learn from
outcomes alone. Where a figure is unknown the transfer is tried once, to learn it; each refusal makes a
little light of the figure that led to it, so that one bad moment does not rule a tier out for ever.
Units: seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.2
RELAX = 0.005


@dataclass(slots=True)
class Rate:
    """Seconds per unit; None = not known yet."""

    seconds: float | None = None

    def learn(self, seconds: float, units: int) -> None:
        if units <= 0 or seconds < 0:
            return
        seen = seconds / units
        self.seconds = seen if self.seconds is None else (1 - WEIGHT) * self.seconds + WEIGHT * seen

    def relax(self) -> None:
        if self.seconds is not None:
            self.seconds *= 1 - RELAX

    def predict(self, units: int) -> float | None:
        return None if self.seconds is None else self.seconds * units


class Estimates:
    """compute: per prefill token; restore: per page L2 -> L1; fetch: per page L3 -> L2."""

    def __init__(self, compute: float | None, restore: float | None, fetch: float | None) -> None:
        self.compute = Rate(compute)
        self.restore = Rate(restore)
        self.fetch = Rate(fetch)

    def choose_restore(self, pages: int, page_size: int) -> bool:
        """Whether copying pages from L2 beats computing them."""
        if _beats(self.restore.predict(pages), self.compute.predict(pages * page_size)):
            return True
        self.restore.relax()
        return False

    def choose_fetch(self, pages: int, gain: int, page_size: int) -> bool:
        """Whether getting `pages` pages from L3 and copying `gain` of them to L1 beats computing those."""
        fetch, restore = self.fetch.predict(pages), self.restore.predict(gain)
        total = None if fetch is None else fetch + (restore or 0.0)
        if _beats(total, self.compute.predict(gain * page_size)):
            return True
        self.fetch.relax()
        self.restore.relax()
        return False


def _beats(transfer: float | None, compute: float | None) -> bool:
    return transfer is None or compute is None or transfer < compute

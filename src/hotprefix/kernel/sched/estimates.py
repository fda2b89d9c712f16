"""How long moving or computing pages takes. Owns: the running estimates, and restore-or-recompute.

Rules (kernel.md, *Tiers*): the choice is by predicted time, not by presence. Estimates start from the
configured figures and follow what drivers report (an exponential mean), so both drivers learn from
outcomes alone. Where a figure is unknown the transfer is tried once, to learn it. Units: seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.2


@dataclass(slots=True)
class Rate:
    """Seconds per unit; None = not known yet."""

    seconds: float | None = None

    def learn(self, seconds: float, units: int) -> None:
        if units <= 0 or seconds < 0:
            return
        seen = seconds / units
        self.seconds = seen if self.seconds is None else (1 - WEIGHT) * self.seconds + WEIGHT * seen

    def predict(self, units: int) -> float | None:
        return None if self.seconds is None else self.seconds * units


class Estimates:
    """compute: per prefill token; restore: per page L2 -> L1; fetch: per page L3 -> L2."""

    def __init__(self, compute: float | None, restore: float | None, fetch: float | None) -> None:
        self.compute = Rate(compute)
        self.restore = Rate(restore)
        self.fetch = Rate(fetch)

    def worth_restoring(self, pages: int, page_size: int) -> bool:
        """Whether copying pages from L2 beats computing them."""
        return _beats(self.restore.predict(pages), self.compute.predict(pages * page_size))

    def worth_fetching(self, pages: int, page_size: int) -> bool:
        """Whether getting pages from L3 and copying them to L1 beats computing them."""
        fetch, restore = self.fetch.predict(pages), self.restore.predict(pages)
        total = None if fetch is None else fetch + (restore or 0.0)
        return _beats(total, self.compute.predict(pages * page_size))


def _beats(transfer: float | None, compute: float | None) -> bool:
    return transfer is None or compute is None or transfer < compute

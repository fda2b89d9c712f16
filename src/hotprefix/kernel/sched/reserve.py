"""How much of the outputs to come is kept free. Owns: the over-commit's current share.

Rule: a retraction says that too little was kept, so the share goes to 1; it decays from planning pass to
planning pass, down to what was configured.
"""

from __future__ import annotations

DECAY = 0.98
GONE = 0.01


class Reserve:
    """share: of running requests' remaining outputs, 0 to 1, that admissions leave room for. floor: the
    configured share."""

    def __init__(self, floor: float) -> None:
        self._shares = shares_to(floor)
        self._last = len(self._shares) - 1
        self._at = self._last
        self.share = floor

    def relax(self, passes: int = 1) -> None:
        """So many planning passes have gone by."""
        if self._at < self._last:
            self._at = min(self._at + passes, self._last)
            self.share = self._shares[self._at]

    def fill(self) -> None:
        """There was too little room: keep all outputs' share free for a while."""
        self._at, self.share = 0, 1.0

    @property
    def coming(self) -> tuple[float, ...]:
        """The shares in the passes to come, until it stays as it is."""
        return self._shares[self._at + 1 :]


def shares_to(floor: float) -> tuple[float, ...]:
    """The share after a retraction, pass by pass: it decays, and is gone at a hundredth."""
    shares = [1.0]
    while shares[-1] > floor:
        decayed = shares[-1] * DECAY
        shares.append(decayed if decayed > max(floor, GONE) else floor)
    return tuple(shares)

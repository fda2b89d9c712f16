"""How much room is kept free for outputs to come. Owns: the current share of the reserve.

Rule: a retraction shows that too little was kept free, so the share goes to 1. Then it decays from planning
pass to planning pass, by DECAY, down to what was configured. Example: configured 0.25; after a retraction the
shares are 1, 0.98, 0.9604, ..., and 0.25 again after 69 passes.
"""

from __future__ import annotations

DECAY = 0.98
GONE = 0.01


class Reserve:
    """The reserve of one kernel.

    share: the share of the running requests' remaining outputs for which an admission leaves room, 0 to 1.
    floor: the configured share.
    """

    def __init__(self, floor: float) -> None:
        self._shares = shares_to(floor)
        self._last = len(self._shares) - 1
        self._at = self._last
        self.share = floor

    def relax(self, passes: int = 1) -> None:
        """Let the share decay by that many planning passes."""
        if self._at < self._last:
            self._at = min(self._at + passes, self._last)
            self.share = self._shares[self._at]

    def fill(self) -> None:
        """Keep room for all outputs for a while, because there was too little."""
        self._at, self.share = 0, 1.0

    @property
    def coming(self) -> tuple[float, ...]:
        """The shares of the passes to come, up to the configured one; empty if that is reached."""
        return self._shares[self._at + 1 :]


def shares_to(floor: float) -> tuple[float, ...]:
    """The share after a retraction, pass by pass, from 1 to the floor. A share of at most GONE becomes the
    floor at once."""
    shares = [1.0]
    while shares[-1] > floor:
        decayed = shares[-1] * DECAY
        shares.append(decayed if decayed > max(floor, GONE) else floor)
    return tuple(shares)

"""How long moving or computing pages takes. Owns: the running estimates, and restore-or-recompute.

Rules:
1. The choice is by predicted time, not by presence (rule 39).
2. Estimates start from the configured figures and follow what drivers report (an exponential mean), so both
   drivers learn from outcomes alone.
3. If a figure is not known, the transfer is done, to learn it.
4. Each refusal lowers the figure that led to it a little, so that one bad moment does not rule a tier out for
   ever. Example: with RELAX = 0.005 a restore that looked twice as slow as computing is tried again after 139
   refusals.

Units: seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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


@dataclass(slots=True)
class Prediction:
    """What was predicted beside what happened, over the times for which both are known.

    times: how many these are.
    predicted_s, observed_s: the sums of both; their difference is the bias.
    error_s: the sum of the absolute differences.
    """

    times: int = 0
    predicted_s: float = 0.0
    observed_s: float = 0.0
    error_s: float = 0.0

    def add(self, predicted: float | None, observed: float) -> None:
        if predicted is None:
            return
        self.times += 1
        self.predicted_s += predicted
        self.observed_s += observed
        self.error_s += abs(predicted - observed)


@dataclass(slots=True)
class Predictions:
    """Restore or recompute, predicted and seen. A restore, prefill or fetch that was not measured is in none
    of these.

    restore: the copies L2 -> L1 of a step.
    prefill: steps that are nearly all prefill.
    fetch: fetches L3 -> L2.
    restored: how many restores were chosen, among those for which the prefill's time was predicted.
    restored_s: the seconds of prefill that these are predicted to have avoided. That cannot be observed.
    refused: how many restores were not chosen, because computing was predicted to be quicker.
    """

    restore: Prediction = field(default_factory=Prediction)
    prefill: Prediction = field(default_factory=Prediction)
    fetch: Prediction = field(default_factory=Prediction)
    restored: int = 0
    restored_s: float = 0.0
    refused: int = 0

    def copy(self) -> Predictions:
        return replace(
            self, restore=replace(self.restore), prefill=replace(self.prefill), fetch=replace(self.fetch)
        )


class Estimates:
    """The running estimates.

    compute: seconds per prefill token.
    restore: seconds per page L2 -> L1.
    fetch: seconds per page L3 -> L2.
    seen: how predictions compare with what happened; nothing is decided by it.
    """

    def __init__(self, compute: float | None, restore: float | None, fetch: float | None) -> None:
        self.compute = Rate(compute)
        self.restore = Rate(restore)
        self.fetch = Rate(fetch)
        self.seen = Predictions()

    def restored(self, seconds: float, pages: int) -> None:
        """Learn from a step whose restores, of `pages` pages, took `seconds`."""
        if seconds > 0:  # 0: it was not measured
            self.seen.restore.add(self.restore.predict(pages), seconds)
        self.restore.learn(seconds, pages)

    def computed(self, seconds: float, tokens: int) -> None:
        """Learn from a step that was nearly all prefill, of `tokens` tokens, and took `seconds`."""
        if seconds >= 0:
            self.seen.prefill.add(self.compute.predict(tokens), seconds)
        self.compute.learn(seconds, tokens)

    def fetched(self, seconds: float, pages: int) -> None:
        """Learn from a fetch that brought `pages` pages in `seconds`."""
        if pages > 0 and seconds >= 0:
            self.seen.fetch.add(self.fetch.predict(pages), seconds)
        self.fetch.learn(seconds, pages)

    def choose_restore(self, pages: int, page_size: int) -> bool:
        """Whether copying pages from L2 beats computing them."""
        if _beats(self.restore.predict(pages), self.compute.predict(pages * page_size)):
            return True
        self.seen.refused += 1
        self.restore.relax()
        return False

    def begun(self, pages: int, page_size: int) -> None:
        """Count a restore that was chosen and has begun."""
        avoided = self.compute.predict(pages * page_size)
        if avoided is not None:
            self.seen.restored += 1
            self.seen.restored_s += avoided

    def choose_fetch(self, pages: int, gain: int, page_size: int) -> bool:
        """Whether fetching `pages` pages from L3 and copying `gain` of them to L1 beats computing the tokens
        of these `gain` pages."""
        fetch, restore = self.fetch.predict(pages), self.restore.predict(gain)
        total = None if fetch is None else fetch + (restore or 0.0)
        if _beats(total, self.compute.predict(gain * page_size)):
            return True
        self.fetch.relax()
        self.restore.relax()
        return False


def _beats(transfer: float | None, compute: float | None) -> bool:
    return transfer is None or compute is None or transfer < compute

"""What a step costs. Owns: `Prices`, the arithmetic of the cost model.

Rules: plain float arithmetic over prices that never change, because the simulator calls it a million times.
model.py says what the prices mean and where they come from; features.py says what is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

Curve = tuple[tuple[int, float], ...]
"""What each of a number of things costs: (how many come before this price applies, seconds each), the first
from 0 on. ((0, 2.0), (8, 1.0)): the first eight cost 2 s each, all further ones 1 s each."""


def total(curve: Curve, count: int) -> float:
    """Seconds of `count` positions or decodes."""
    seconds, price, since = 0.0, 0.0, 0
    for after, each in curve:
        if count <= after:
            break
        seconds += price * (after - since)
        price, since = each, after
    return seconds + price * (count - since)


@dataclass(slots=True)
class Prices:
    """The prices of `CostModel`, seconds, under the same names.

    prefill_tokens, decodes: how the price of each changes with their number in one step.
    """

    base_s: float
    prefill_tokens: Curve
    prefill_context_s: float
    decodes: Curve
    decode_context_s: float
    scheduler_base_s: float
    scheduler_running_s: float
    scheduler_waiting_s: float
    refresh_touch_s: float = 0.0

    def step_s(self, prefill_tokens: int, prefill_context: int, decodes: int, decode_context: int) -> float:
        """Seconds of one forward pass (`Features`)."""
        return (
            self.base_s
            + total(self.prefill_tokens, prefill_tokens)
            + self.prefill_context_s * prefill_context
            + total(self.decodes, decodes)
            + self.decode_context_s * decode_context
        )

    def scheduler_s(self, running: int, waiting: int, touched: float = 0) -> float:
        """Seconds that a step takes outside its forward pass, with so many running and waiting requests.
        touched: prefixes that refresh touches in it."""
        return (
            self.scheduler_base_s
            + self.scheduler_running_s * running
            + self.scheduler_waiting_s * waiting
            + self.refresh_touch_s * touched
        )

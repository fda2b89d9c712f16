"""What a step costs. Owns: `Prices`, the arithmetic of the cost model.

Rules: plain float arithmetic over prices that never change: the simulator asks for it a million times.
What they mean and where they come from is `model.py`'s; what is counted is `features.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Prices:
    """Seconds, named as in `CostModel`."""

    base_s: float
    prefill_token_s: float
    prefill_context_s: float
    decode_s: float
    decode_context_s: float
    scheduler_base_s: float
    scheduler_running_s: float
    scheduler_waiting_s: float

    def step_s(self, prefill_tokens: int, prefill_context: int, decodes: int, decode_context: int) -> float:
        """Seconds of one forward pass (`Features`)."""
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.prefill_context_s * prefill_context
            + self.decode_s * decodes
            + self.decode_context_s * decode_context
        )

    def scheduler_s(self, running: int, waiting: int) -> float:
        """Seconds that a step takes beside its forward pass, with so many requests."""
        return self.scheduler_base_s + self.scheduler_running_s * running + self.scheduler_waiting_s * waiting

"""Where hits go. Owns: `Hits`, tokens of all requests against one denominator.

Rules: of each prompt's tokens, at the moment of the choice: `available`, what some worker of the fleet had or
was computing; `captured`, what the chosen worker had, was computing or was to pull; and by its first token:
`delivered`, what that worker did not compute. Workload, routing and a stale index can be told apart so:
little available is the workload, little captured of it the routing, little delivered of that the index or the
worker.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Hits:
    """Sums over requests that had a first token and told what they reused. unknown: requests that did not
    tell; nothing of them is counted."""

    requests: int = 0
    prompt: int = 0
    available: int = 0
    captured: int = 0
    delivered: int = 0
    unknown: int = 0

    def add(self, prompt: int, available: int, captured: int, delivered: int | None) -> None:
        """One request had its first token."""
        if delivered is None:
            self.unknown += 1
            return
        self.requests += 1
        self.prompt += prompt
        self.available += available
        self.captured += captured
        self.delivered += delivered

"""What a log says of one request. Owns: `RequestRow`, which is a row of `inspect --rows`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestRow:
    """One request. Counts are tokens, times seconds. None means not measured.

    run: the engine process.
    request: its id.
    arrival: when it arrived, by the run's clock.
    prompt_tokens: its prompt's length.
    matched_at_enqueue: tokens that L1 held of its prompt then.
    outcome: why it ended; "open" if the log does not hold its end.
    hot, heat: see `definitions.is_hot` and `Known`; None if the log lost what was asked for.
    queue_depth: how many requests waited for their first admission when it came.
    prefix: the fingerprint of its first page.
    queue_s: from its arrival to its first admission.
    requeue_s: its waits after retractions, summed.
    ttft_s: from its arrival to its first token.
    total_s: from its arrival to its end.
    matched_at_admission: tokens that L1 held of its prompt at its first admission.
    hit_loss: net L1 hit loss; may be negative.
    retained, regained, restored_host, restored_storage, recomputed: what became of the tokens matched at
    enqueue; they add up to these once the prompt is done.
    device, host, storage: tokens reused, by final source.
    computed: prompt positions computed.
    again_prompt: the part of `computed` that it had had before a retraction.
    positions, recomputed_positions: the same two for prompt and outputs together.
    outputs: sampled tokens.
    retractions: how often it was retracted.
    first_use: when its first chunk of prefill ran, by the run's clock.
    """

    run: str
    request: str
    arrival: float
    prompt_tokens: int
    matched_at_enqueue: int
    outcome: str = "open"
    hot: bool | None = None
    heat: int | None = None
    queue_depth: int | None = None
    prefix: str | None = None
    queue_s: float | None = None
    requeue_s: float | None = None
    ttft_s: float | None = None
    total_s: float | None = None
    matched_at_admission: int | None = None
    hit_loss: int | None = None
    retained: int | None = None
    regained: int | None = None
    restored_host: int | None = None
    restored_storage: int | None = None
    recomputed: int | None = None
    device: int | None = None
    host: int | None = None
    storage: int | None = None
    computed: int | None = None
    again_prompt: int | None = None
    positions: int | None = None
    recomputed_positions: int | None = None
    outputs: int | None = None
    retractions: int = 0
    first_use: float | None = None

    @property
    def ran_tokens(self) -> int | None:
        """The prompt's tokens if the request ran at all, else None."""
        return None if self.first_use is None else self.prompt_tokens

    @property
    def cached(self) -> int | None:
        """Reused tokens."""
        if self.device is None or self.host is None or self.storage is None:
            return None
        return self.device + self.host + self.storage

    @property
    def reached(self) -> int | None:
        """Prompt tokens that the request has reused or computed, each once."""
        if self.cached is None or self.computed is None or self.again_prompt is None:
            return None
        return self.cached + self.computed - self.again_prompt

    @property
    def lost(self) -> int | None:
        """The tokens matched at enqueue that L1 did not keep until they were used."""
        parts = (self.regained, self.restored_host, self.restored_storage, self.recomputed)
        return None if self.regained is None else sum(part or 0 for part in parts)

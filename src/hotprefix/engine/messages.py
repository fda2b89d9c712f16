"""What crosses between an engine and its client. Owns: the frozen messages, picklable.

Rules: one `Generate` leads to any number of `Delta`s. The last of them has `finish`; it comes exactly once,
whatever happens. Token ids and text go to the client that asked, never to logs or events. What comes with
every request or token is a NamedTuple, which pickles several times faster than a dataclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hotprefix.definitions import Slo
from hotprefix.engine.executor import TokenLogprob
from hotprefix.engine.link_totals import Copied
from hotprefix.engine.paced.pace import PaceTotals
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.rates import Throughput
from hotprefix.engine.stores.store_counters import StoreStats
from hotprefix.kernel.cache.frames import FrameCount
from hotprefix.kernel.cache.host import HostCounters
from hotprefix.kernel.cache.tier import Occupancy
from hotprefix.kernel.counters import Counters
from hotprefix.kernel.plan import Finish, Queue
from hotprefix.kernel.request import RequestId
from hotprefix.kernel.state.estimates import Predictions
from hotprefix.kernel.state.prefetch import PrefetchCounters


class Generate(NamedTuple):
    """Ask for one generation.

    salt: isolates the cache of a tenant.
    deadline: seconds from now after which the request is aborted; None = never.
    session, hold_s: if the request ends well, its pages stay protected for `hold_s` seconds, or until the
    session's next request takes them over. `EngineConfig.session_tokens` bounds all such pages together.
    trace: the client's `traceparent` header, for spans.
    arrived: when the client's request reached the server, by `time.monotonic`; None = now.
    outputs: tokens of the answer that were sampled before, for example by another engine. The answer goes on
    behind them as if this engine had sampled them. Before anything new there comes one delta for each, with
    the text that belongs to it. Log-probabilities are not computed again: those deltas have placeholders.
    """

    id: RequestId
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    salt: str | None = None
    deadline: float | None = None
    session: str | None = None
    hold_s: float = 0.0
    trace: str | None = None
    arrived: float | None = None
    outputs: tuple[int, ...] = ()


class Usage(NamedTuple):
    """Token counts of one request. cached: prompt tokens reused, by final source; of a request with given
    outputs, those are counted too."""

    prompt_tokens: int
    completion_tokens: int
    cached_device: int = 0
    cached_host: int = 0
    cached_storage: int = 0

    @property
    def cached_tokens(self) -> int:
        return self.cached_device + self.cached_host + self.cached_storage


class Timing(NamedTuple):
    """Intervals of one request by the engine's monotonic clock, in seconds; None = it never happened. See the
    timeline in docs/terms.md.

    queue: from submission to first admission (enqueue to admit).
    prefill: from first admission to first output token.
    decode: from first to last output token.
    """

    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None


class Delta(NamedTuple):
    """New output of one request.

    text: what may be shown now. Text that may be the beginning of a stop string, and characters that are not
    complete, come later; all texts joined are the text of the answer without streaming.
    tokens: ids since the last delta.
    finish, timing: set on the last delta only.
    stop_reason: the stop string or token id that ended the request; None if none did.
    error: for people to read, if finish is ERROR.
    """

    id: RequestId
    text: str
    tokens: tuple[int, ...]
    usage: Usage
    finish: Finish | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None
    timing: Timing | None = None


class KVSource(NamedTuple):
    """Where an engine publishes its KV events (records/kvevents.py): the addresses as they were bound, a port
    that the system chose included.

    replay: None = events are not sent again.
    topic: the first frame of every message.
    """

    endpoint: str
    replay: str | None
    topic: str


class KVSnapshot(NamedTuple):
    """All pages of L1 of which KV events have told, and no others.

    incarnation: as in `EngineLoad`.
    number: of the last batch of events that it covers; -1 = none was published yet.
    hashes: each page's block hash, unsigned 64-bit numbers in this machine's byte order.
    """

    incarnation: int
    number: int
    hashes: bytes


class EngineLoad(NamedTuple):
    """What a router has to know of an engine at one moment. It costs the engine next to nothing.

    incarnation: Unix time at which this engine was built, in nanoseconds; grows with each life.
    waiting: requests that have no row.
    prefill_tokens: positions that are still to be computed before every request decodes.
    decodes: requests that decode.
    free, evictable, owned, protected: L1's pages by state.
    kv: None = no KV events are published, or observation was switched off.
    """

    incarnation: int
    waiting: int
    prefill_tokens: int
    decodes: int
    free: int
    evictable: int
    owned: int
    protected: int
    kv: KVSource | None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a client must know about a loaded engine.

    model: the name that requests give.
    max_model_len: most tokens of one request, prompt plus outputs; the context and the page pool both allow
    them.
    kv_tokens: capacity of the L1 pool.
    details: settings worth showing (dtype, policies), as JSON can hold them.
    max_requests: how many may run and wait at a time; None = any number.
    cost: what its steps cost, as the file of a cost model has it (cost/model.py); None = not known.
    """

    model: str
    max_model_len: int
    vocab_size: int
    page_size: int
    kv_tokens: int
    details: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    max_requests: int | None = None
    cost: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What a flush of the prefix cache did.

    freed: tokens dropped from the cache.
    kept: tokens whose pages running requests hold until they end. No later request finds them.
    running: how many requests hold them.
    storage: whether there is an L3. A flush leaves it alone, so what it holds can still be found.
    """

    freed: int
    kept: int
    running: int
    storage: bool = False

    @property
    def complete(self) -> bool:
        """Whether all memory that the flush concerned is free."""
        return self.kept == 0


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A run of pages that recent requests share.

    name: keyed fingerprint of the prefix up to the run's end.
    parent: index, in the list that this one is part of, of the run that it continues; -1 = it starts the
    prompt.
    start, stop: in tokens from the prompt's start.
    requests: how many requests of the last 300 s begin with it.
    """

    name: str
    parent: int
    start: int
    stop: int
    requests: int


@dataclass(frozen=True, slots=True)
class Observed:
    """What observation itself did since the engine's start.

    written_records, dropped_records: of the event log.
    kv_batches, kv_dropped_batches, kv_stored_pages, kv_removed_pages: of the KV event publisher; pages are
    L1's.
    failed: why observation was switched off; None if it was not.
    sink_failed: why the kernel's part of it was switched off; None if it was not.
    """

    written_records: int = 0
    dropped_records: int = 0
    kv_batches: int = 0
    kv_dropped_batches: int = 0
    kv_stored_pages: int = 0
    kv_removed_pages: int = 0
    failed: str | None = None
    sink_failed: str | None = None


@dataclass(slots=True)
class Outcomes:
    """Counts of requests.

    good: ended well and met every objective.
    missed: ended well and did not meet every objective.
    failed: ended with an error.
    aborted: by the client, or at their deadline.
    refused: by the queue.
    timeouts: of those that were not refused, how many had no first token within the objective's time-out,
    however they ended; None if there is no such objective.
    """

    good: int = 0
    missed: int = 0
    failed: int = 0
    aborted: int = 0
    refused: int = 0
    timeouts: int | None = None


@dataclass(frozen=True, slots=True)
class Fared:
    """A snapshot of the counts by group (definitions.GROUPS), and the objectives they are for."""

    slo: Slo
    groups: Mapping[str, Outcomes]


@dataclass(frozen=True, slots=True)
class Insight:
    """What lies behind `EngineStats`.

    parked: waiting requests that wait for a flight's leader.
    l2, store, links, predictions: None without that tier (L2; L3; L2; L2).
    groups: frames of each layer group.
    kernel, host, prefetch: the kernel's own counters.
    plan_s, execute_s, commit_s: seconds spent since the start.
    refresh_s: the part of plan_s spent in refreshing waiting prefixes.
    prefill_busy_s: the part of execute_s spent in steps with prefill tokens, without their copies from L2.
    queue: what waits now.
    fared: None if there are no objectives.
    hottest: empty if no observer watches requests.
    pace: None unless the engine is paced.
    """

    parked: int
    tree_nodes: int
    namespaces: int
    fetches: int
    l2: Occupancy | None
    groups: tuple[FrameCount, ...]
    throughput: tuple[Throughput, ...]
    kernel: Counters
    host: HostCounters
    prefetch: PrefetchCounters
    store: StoreStats | None
    links: Copied | None
    plan_s: float
    execute_s: float
    commit_s: float
    refresh_s: float
    prefill_busy_s: float
    queue: Queue
    predictions: Predictions | None
    fared: Fared | None
    observed: Observed
    hottest: tuple[HotPrefix, ...]
    pace: PaceTotals | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges as of now, and counters since the engine's start.

    running, waiting: gauges, requests.
    total_pages, free_pages, owned_pages, evictable_pages, protected_pages: gauges, L1 pages by state: free +
    owned + evictable + protected = total.
    prompt_tokens, queried_tokens, cached_*: counters. Each request counts once, at its first use in prefill
    (effective reuse). prompt_tokens counts all prompts, queried_tokens those of requests that looked the
    cache up.
    computed_tokens: counter, prompt positions computed, those computed again included.
    generated_tokens: counter, outputs.
    steps, retractions, evicted_pages: counters of events.
    insight: everything else; None if the engine has none.
    """

    running: int
    waiting: int
    total_pages: int
    free_pages: int
    owned_pages: int
    evictable_pages: int
    protected_pages: int
    page_size: int
    queried_tokens: int
    cached_device: int
    cached_host: int
    cached_storage: int
    computed_tokens: int
    generated_tokens: int
    steps: int
    retractions: int
    evicted_pages: int
    prompt_tokens: int = 0
    insight: Insight | None = None

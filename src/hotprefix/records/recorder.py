"""What watches an engine. Owns: `Recorder`, the engine's observer: event log, KV events, spans, hot prefixes.

Rules: on the loop's thread it only takes references; fingerprints are computed on the log's thread (for
the heat of prefixes at once, of a bounded number of pages). It reads what the kernel decided and calls
nothing of the kernel but `watch_pages`.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hotprefix import __version__
from hotprefix.engine.messages import EngineInfo, HotPrefix, Observed
from hotprefix.kernel.events import Event
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import Progress, StepPlan
from hotprefix.kernel.request import Request
from hotprefix.records.fingerprint import Fingerprinter
from hotprefix.records.heat import MAX_PAGES, Heat
from hotprefix.records.kvevents import KVPublisher, PageEvents
from hotprefix.records.log import EventLog
from hotprefix.records.schema import Header, Record, RequestInfo, Sources, Start

if TYPE_CHECKING:
    from hotprefix.records.spans import Spans


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What to record. key: of fingerprints, and of what names salts in KV events. events: path of the log,
    None = no log. make_publisher: of KV events, None = none; kv_tokens: whether they carry token ids.
    spans: of requests, None = none."""

    key: bytes
    events: Path | None = None
    make_publisher: Callable[[], KVPublisher] | None = None
    kv_tokens: bool = False
    spans: Spans | None = None


class Recorder:
    """An `engine.observe.Observer`. wall: Unix time, seconds."""

    def __init__(self, options: RecordOptions, wall: Callable[[], float] = time.time) -> None:
        self._options, self._wall = options, wall
        self._log: EventLog | None = None
        self._spans = options.spans
        self._kv: KVPublisher | None = None
        self._pages: PageEvents | None = None

    def opened(self, kernel: Kernel, info: EngineInfo, fingerprint: str, now: float) -> None:
        """Raises ConfigError where the log or the publisher's address cannot be had."""
        self._prints = Fingerprinter(self._options.key, info.page_size)
        self._heat = Heat(info.page_size)
        self._page_size = info.page_size
        if self._options.events is not None:
            self._log = EventLog(self._options.events, self._header(kernel, info, fingerprint, now))
        if self._spans is not None:
            self._spans.opened(info.model, self._wall(), now)
        if self._options.make_publisher is not None:
            self._kv = self._options.make_publisher()
            self._pages = PageEvents(info.page_size, self._options.key, with_tokens=self._options.kv_tokens)
            self._pages.cleared()
            kernel.watch_pages(self._pages)
            self._publish()

    def _header(self, kernel: Kernel, info: EngineInfo, fingerprint: str, now: float) -> Header:
        return Header(
            t=now, run=uuid.uuid4().hex, part=0, wall=self._wall(), hotprefix=__version__, model=info.model,
            fingerprint=self._prints.of_text(fingerprint), key=self._prints.key_name,
            page_size=info.page_size, config=dataclasses.asdict(kernel.config),
        )  # fmt: skip

    @property
    def wants_events(self) -> bool:
        return self._options.events is not None or self._spans is not None

    # -- what is told -----------------------------------------------------------------------------

    def event(self, event: Event) -> None:
        if self._log is not None:
            self._log.put(event)
        if self._spans is not None:
            self._spans.event(event)

    def submitted(self, request: Request, now: float) -> None:
        self._heat.add(self._prints.pages(request.namespace, request.key, MAX_PAGES), now)
        if self._log is not None:
            self._log.put(lambda: self._info(request, now))

    def _info(self, request: Request, now: float) -> Record:
        return RequestInfo(
            t=now, request=request.id, prompt_tokens=request.prompt_len, max_tokens=request.max_tokens,
            priority=request.priority, pages=self._prints.pages(request.namespace, request.key),
        )  # fmt: skip

    def planned(self, plan: StepPlan, now: float) -> None:
        if self._log is not None and plan.admissions:
            for start in starts(plan, self._page_size, now):
                self._log.put(start)

    def changed(self, now: float) -> None:
        self._publish()

    def ended(self, progress: Progress, now: float) -> None:
        if self._log is not None:
            device = progress.cached - progress.host - progress.storage
            self._log.put(
                Sources(
                    t=now, request=progress.request, device=device, host=progress.host,
                    storage=progress.storage,
                )
            )  # fmt: skip
        if self._spans is not None:
            self._spans.ended(progress, now)

    def _publish(self) -> None:
        """Hand over the pages that came and went since the last call."""
        if self._kv is not None and self._pages is not None:
            events = self._pages.take()
            if events:
                self._kv.publish(self._wall(), events)

    # -- what is asked ----------------------------------------------------------------------------

    def stats(self) -> Observed:
        self._publish()
        log, kv, pages = self._log, self._kv, self._pages
        return Observed(
            written_records=log.written if log else 0,
            dropped_records=log.dropped if log else 0,
            kv_batches=kv.published if kv else 0,
            kv_dropped_batches=kv.dropped if kv else 0,
            kv_stored_pages=pages.stored if pages else 0,
            kv_removed_pages=pages.removed if pages else 0,
            failed=log.failed if log else None,
        )

    def hottest(self, now: float) -> tuple[HotPrefix, ...]:
        self._heat.expire(now)
        return self._heat.hottest()

    def close(self) -> None:
        self._publish()
        if self._log is not None:
            self._log.close()
        if self._kv is not None:
            self._kv.close()
        if self._spans is not None:
            self._spans.close()


def starts(plan: StepPlan, page_size: int, now: float) -> list[Start]:
    """Where each admission of a plan starts, and which of the tokens before that the plan copies back."""
    targets = {copy.target for copy in plan.restores}
    tables = {chunk.request: chunk.table for chunk in plan.chunks.written}
    found = []
    for admission in plan.admissions:
        low: int | None = admission.cached
        high = low
        if targets:
            low = high = None
            table = tables.get(admission.request, ())
            restored = [at for at, page in enumerate(table) if page in targets]
            if table and not restored:
                low = high = admission.cached
            elif restored and restored[-1] - restored[0] + 1 == len(restored):
                low, high = restored[0] * page_size, (restored[-1] + 1) * page_size
        found.append(
            Start(t=now, request=admission.request, step=plan.step, cached=admission.cached,
                  restored_from=low, restored_to=high)
        )  # fmt: skip
    return found

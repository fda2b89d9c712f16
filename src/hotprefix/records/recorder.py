"""What watches an engine. Owns: `Recorder`, the engine's observer: event log, KV events, spans, hot prefixes.

Rules:
1. On the loop's thread the recorder only takes references; the log's fingerprints are computed on the log's
   thread. An exception are those of the first MAX_PAGES pages, which the heat of prefixes needs at once.
2. It reads what the kernel has decided, and calls nothing of the kernel but `watch_pages` (rule 4).
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hotprefix import __version__
from hotprefix.engine.link_totals import LinkTotal
from hotprefix.engine.messages import EngineInfo, HotPrefix, KVSource, Observed
from hotprefix.kernel.events import Event, Finished, Rejected
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import Progress
from hotprefix.kernel.request import Request
from hotprefix.kernel.tokens import TOKEN_BYTES
from hotprefix.records.event_log import EventLog
from hotprefix.records.fingerprint import Fingerprinter
from hotprefix.records.heat import MAX_PAGES, Heat
from hotprefix.records.kvevents import KVPublisher, PageEvents
from hotprefix.records.of_event import end
from hotprefix.records.schema import Header, Link, Record, RequestInfo

if TYPE_CHECKING:
    from hotprefix.records.spans import Spans


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What to record.

    key: the secret of fingerprints, and of the names of salts in KV events.
    events: path of the log; None = no log.
    make_publisher: makes the publisher of KV events; None = there are none.
    kv_tokens: whether KV events carry token ids.
    spans: makes spans of requests; None = there are none.
    """

    key: bytes
    events: Path | None = None
    make_publisher: Callable[[], KVPublisher] | None = None
    kv_tokens: bool = False
    spans: Spans | None = None


@dataclass(slots=True)
class _Asked:
    """A request that has not ended.

    last: the fingerprint chain's state behind the prompt's complete pages; None until the log's thread has
    named them.
    finished: its last event, which waits for the sampled tokens; None until it has come.
    """

    request: Request
    last: bytes | None = None
    finished: Finished | None = None


class Recorder:
    """An `engine.observe.Observer`. wall: a clock that gives Unix time in seconds."""

    def __init__(self, options: RecordOptions, wall: Callable[[], float] = time.time) -> None:
        self._options, self._wall = options, wall
        self._log: EventLog | None = None
        self._spans = options.spans
        self._kv: KVPublisher | None = None
        self._pages: PageEvents | None = None
        self._asked: dict[str, _Asked] = {}
        self._links: dict[str, LinkTotal] = {}

    def opened(self, kernel: Kernel, info: EngineInfo, fingerprint: str, now: float) -> None:
        """Begin to record. Raises ConfigError if the log cannot be opened or the publisher's address cannot
        be bound."""
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
        if self._spans is not None:
            self._spans.event(event)
        if self._log is None:
            return
        if isinstance(event, Finished) and event.request in self._asked:
            self._asked[event.request].finished = event
            return
        self._log.put(event)
        if isinstance(event, Rejected):
            self._asked.pop(event.request, None)

    def submitted(self, request: Request, arrived: float, now: float, trace: str | None = None) -> None:
        self._heat.add(self._prints.pages(request.namespace, request.key, MAX_PAGES), now)
        if self._spans is not None:
            self._spans.arrived(request.id, arrived, trace)
        if self._log is not None:
            asked = self._asked[request.id] = _Asked(request)
            self._log.put(lambda: self._info(asked, arrived, now))

    def _info(self, asked: _Asked, arrived: float, now: float) -> Record:
        request = asked.request
        pages, asked.last = self._prints.chain(self._prints.root(request.namespace), request.key)
        return RequestInfo(
            t=now, request=request.id, arrived=arrived, prompt_tokens=request.prompt_len,
            max_tokens=request.max_tokens, priority=request.priority, session=self._session(request),
            hold_s=request.hold_s or None if request.session is not None else None, pages=pages,
        )  # fmt: skip

    def _session(self, request: Request) -> str | None:
        """The session's fingerprint, within the request's namespace, because two tenants may use the same
        name."""
        if request.session is None:
            return None
        return self._prints.of_name(request.namespace, request.session)

    def _end(self, asked: _Asked, event: Finished, said: bytes) -> Record:
        """The record of a request's end, with fingerprints of the pages that the answer completed. The
        prompt's pages were named when it was submitted."""
        request = asked.request
        if asked.last is None:
            asked.last = self._prints.chain(self._prints.root(request.namespace), request.key)[1]
        begun = request.prompt_len // self._page_size * self._page_size * TOKEN_BYTES
        return end(event, self._prints.chain(asked.last, request.key[begun:] + said)[0])

    def changed(self, now: float) -> None:
        self._publish()

    def moved(self, links: Mapping[str, LinkTotal], now: float) -> None:
        if self._log is None:
            return
        for name, total in links.items():
            before = self._links.get(name, LinkTotal(0, 0, 0.0))
            self._links[name] = total
            failures = Counter(total.failures) - Counter(before.failures)
            pages, size = total.pages - before.pages, total.bytes - before.bytes
            if pages or size or failures:
                self._log.put(Link(t=now, link=name, pages=pages, bytes=size, failures=dict(failures) or None,
                                   seconds=max(0.0, total.seconds - before.seconds)))  # fmt: skip

    def ended(self, progress: Progress, now: float) -> None:
        asked = self._asked.pop(progress.request, None)
        if self._log is not None and asked is not None and asked.finished is not None:
            event, said = asked.finished, progress.said
            self._log.put(lambda: self._end(asked, event, said))
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

    def kv_source(self) -> KVSource | None:
        kv = self._kv
        return None if kv is None else KVSource(kv.endpoint, kv.replay_endpoint, kv.topic)

    def kv_snapshot(self) -> tuple[int, bytes] | None:
        if self._kv is None or self._pages is None:
            return None
        self._publish()  # so that what is resident is what the batches up to the last one tell
        return self._kv.last, self._pages.resident()

    def close(self) -> None:
        self._publish()
        if self._log is not None:
            self._log.close()
        if self._kv is not None:
            self._kv.close()
        if self._spans is not None:
            self._spans.close()

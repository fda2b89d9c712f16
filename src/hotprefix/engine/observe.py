"""Watching the engine. Owns: `Observer`, what may watch, and `Wall`, which keeps its failures from the
engine.

Rules: an observer receives records of what was decided, and decides nothing. If it raises, it is switched
off, the log tells so once, and the exception goes no further. It is called on the loop's thread, so it only
takes things down; writing, hashing and sending belong to threads of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from hotprefix.engine.link_totals import LinkTotal
from hotprefix.engine.messages import EngineInfo, HotPrefix, KVSource, Observed
from hotprefix.kernel.events import Event
from hotprefix.kernel.kernel import Kernel
from hotprefix.kernel.plan import Progress
from hotprefix.kernel.request import Request

log = logging.getLogger(__name__)

LINKS_S = 1.0


class Observer(Protocol):
    """What may watch an engine. now: the loop's clock, in seconds."""

    @property
    def wants_events(self) -> bool:
        """Whether `event` is to be the kernel's sink. Without a sink the kernel builds no records."""
        ...

    def opened(self, kernel: Kernel, info: EngineInfo, fingerprint: str, now: float) -> None:
        """The engine is ready. This call comes first, and once."""
        ...

    def event(self, event: Event) -> None:
        """The kernel's sink."""
        ...

    def submitted(self, request: Request, arrived: float, now: float, trace: str | None) -> None:
        """The kernel is about to be given a request, which it takes or refuses. arrived: when the request
        reached the server. trace: the client's `traceparent` header."""
        ...

    def ended(self, progress: Progress, now: float) -> None:
        """A request has ended; this is its last progress."""
        ...

    def changed(self, now: float) -> None:
        """A step was committed or the cache was flushed."""
        ...

    def moved(self, links: Mapping[str, LinkTotal], now: float) -> None:
        """What has passed over each link until now. Comes at most every LINKS_S seconds, and once before the
        end."""
        ...

    def stats(self) -> Observed: ...

    def hottest(self, now: float) -> tuple[HotPrefix, ...]:
        """The prefixes that most requests had of late, hottest first."""
        ...

    def kv_source(self) -> KVSource | None:
        """Where KV events are published; None = nowhere."""
        ...

    def kv_snapshot(self) -> tuple[int, bytes] | None:
        """(number, hashes) as in `KVSnapshot`; None without KV events."""
        ...

    def close(self) -> None: ...


class Wall:
    """An observer, or none, whose methods can be called without any exception coming back."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self._failed: str | None = None

    @property
    def watched(self) -> bool:
        return self._observer is not None

    def tell(self, name: str, *args: Any) -> None:
        """Call one of the observer's methods that return nothing."""
        self._ask(name, None, *args)

    def stats(self) -> Observed:
        none = Observed(failed=self._failed)
        found: Observed = self._ask("stats", none)
        return found

    def hottest(self, now: float) -> tuple[HotPrefix, ...]:
        found: tuple[HotPrefix, ...] = self._ask("hottest", (), now)
        return found

    def kv_source(self) -> KVSource | None:
        found: KVSource | None = self._ask("kv_source", None)
        return found

    def kv_snapshot(self) -> tuple[int, bytes] | None:
        found: tuple[int, bytes] | None = self._ask("kv_snapshot", None)
        return found

    def _ask(self, name: str, otherwise: Any, *args: Any) -> Any:
        if self._observer is None:
            return otherwise
        try:
            return getattr(self._observer, name)(*args)
        except Exception as error:
            self._observer, self._failed = None, f"{type(error).__name__}: {error}"
            log.exception("observation is switched off: %s raised", name)
            return otherwise

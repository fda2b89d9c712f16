"""What has passed over each physical link. Owns: `Copied`, what L2 counts, and `link_totals`, which metrics
and the event log both read.

Rules: a page counts on each link that it passes, so one from L3 to L1 counts on two. A link that does not
exist is absent. Units: pages, bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from hotprefix.engine.stores.store_counters import StoreStats
from hotprefix.kernel.cache.host import HostCounters

NO_FAILURES: Mapping[str, int] = MappingProxyType({})


@dataclass(slots=True)
class Copied:
    """Bytes moved and seconds spent between L1 and L2."""

    saved_bytes: int = 0
    saved_s: float = 0.0
    restored_bytes: int = 0
    restored_s: float = 0.0


class LinkTotal(NamedTuple):
    """What has passed over one link since the engine's start. failures: pages that could not be moved, by
    reason."""

    pages: int
    bytes: int
    seconds: float
    failures: Mapping[str, int] = NO_FAILURES


def link_totals(host: HostCounters, copied: Copied | None, store: StoreStats | None) -> dict[str, LinkTotal]:
    """Totals of device_to_host, host_to_device, storage_to_host and host_to_storage. copied: None without L2.
    store: None without L3."""
    found = {}
    if copied is not None:
        found["device_to_host"] = LinkTotal(host.saved, copied.saved_bytes, copied.saved_s)
        found["host_to_device"] = LinkTotal(host.restored, copied.restored_bytes, copied.restored_s)
    if store is not None:
        for name, stats in (("storage_to_host", store.read), ("host_to_storage", store.write)):
            failures = {str(reason): count for reason, count in sorted(stats.failures.items())}
            found[name] = LinkTotal(stats.pages, stats.bytes, stats.seconds, failures)
    return found

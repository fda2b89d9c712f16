"""From the kernel's events to the log's records. Owns: `of_event`, and `end`, which adds fingerprints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hotprefix.kernel import events as ev
from hotprefix.kernel.plan import Finish
from hotprefix.records import schema as sc


def _same(kind: type[sc.Record], **other: str) -> Callable[[Any], sc.Record]:
    """A function that makes a record whose fields have the names and values of an event's. other: fields that
    have another name there."""
    fields = [f for f in dataclasses.fields(kind) if f.name not in ("k", "t")]
    names = {f.name: other.get(f.name, f.name) for f in fields}
    lists = [f.name for f in fields if str(f.type).startswith("list")]

    def made(event: Any) -> sc.Record:
        found = {name: getattr(event, theirs) for name, theirs in names.items()}
        for name in lists:
            found[name] = list(found[name])
        return kind(t=event.now, **found)

    return made


def end(event: ev.Finished, answer: list[str] | None = None) -> sc.End:
    """The record of a request's end. answer: see `End`."""
    totals: dict[str, int] = {}
    if event.ran:
        totals = {
            "device": event.cached - event.host - event.storage, "host": event.host,
            "storage": event.storage, "computed": event.computed, "recomputed": event.recomputed,
        }  # fmt: skip
    return sc.End(
        t=event.now, k="abort" if event.reason is Finish.ABORT else "finish", request=event.request,
        reason=event.reason.value, outputs=event.outputs, retractions=event.retractions, answer=answer,
        **totals,
    )  # fmt: skip


def _prefill(event: ev.Prefilled) -> sc.Record:
    return sc.Prefill(
        t=event.now, request=event.request, start=event.start, stop=event.stop,
        taken=[(part.start, part.stop, part.source.value, part.same) for part in event.taken],
        **event.use._asdict(),
    )  # fmt: skip


def _stall(event: ev.Stalled) -> sc.Record:
    s = event.stall
    return sc.Stall(
        t=event.now, request=s.head, need=s.need, free=s.free, evictable=s.evictable,
        protected=s.protected, owned=s.owned, capacity=s.capacity,
    )  # fmt: skip


OF_EVENT: dict[type[ev.Event], Callable[[Any], sc.Record]] = {
    ev.Enqueued: _same(sc.Enqueue),
    ev.Admitted: _same(sc.Admit),
    ev.FetchStarted: _same(sc.FetchStart),
    ev.FetchJoined: _same(sc.FetchJoin),
    ev.FetchEnded: _same(sc.FetchDone),
    ev.RestoreStarted: _same(sc.RestoreStart, l1="pages"),
    ev.RestoreDone: _same(sc.RestoreDone),
    ev.PrefillStarted: _same(sc.PrefillStart),
    ev.Prefilled: _prefill,
    ev.PrefillDone: _same(sc.PrefillDone),
    ev.FirstToken: _same(sc.FirstToken),
    ev.Finished: end,
    ev.Rejected: _same(sc.Reject),
    ev.Retracted: _same(sc.Retract),
    ev.Published: _same(sc.Publish, l1="pages"),
    ev.Evicted: _same(sc.Evict, l1="pages"),
    ev.Flushed: _same(sc.Flush),
    ev.Stalled: _stall,
    ev.Stepped: _same(sc.Step),
}


def of_event(event: ev.Event) -> sc.Record:
    """The record of a kernel event."""
    return OF_EVENT[type(event)](event)

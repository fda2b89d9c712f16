"""What the router shows of itself. Owns: `state`, the one view from which /workers, /metrics and the live
page are made, and `trouble`, what /health says.

Rules: reading changes nothing, and holds no key and nothing that a client sent. What is not known is None.
All values are such as JSON can hold.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotprefix import __version__
from hotprefix.fleet.correction import BOUNDS, Errors
from hotprefix.records.event_log import EventLog
from hotprefix.router.pools import Pool
from hotprefix.router.tally import Times
from hotprefix.router.ticket import Outcome
from hotprefix.router.worker import Worker

if TYPE_CHECKING:
    from hotprefix.router.router import Router


def state(router: Router) -> dict[str, Any]:
    """Units: seconds, tokens, pages of each pool's size. Loads: 1 = as much as a worker should have."""
    now = router.clock()
    pools = list(router.pools.all.values())
    return {
        "version": __version__,
        "policy": router.config.policy,
        "uptime_s": now - router.began,
        "draining": router.gate.draining,
        "clients_left": router.forward.clients_left,
        "cut": dict(router.forward.cut),
        "event_log": _log(router.log),
        "pools": [_pool(pool, now) for pool in pools],
        "workers": [_worker(worker, router, now) for worker in router.roster.workers.values()],
    }


def trouble(router: Router) -> str | None:
    """Why no request would be answered now; None if one would be, by one pool at least."""
    if router.gate.draining:
        return "draining: the router is shutting down"
    now = router.clock()
    if any(pool.able(now) for pool in router.pools.all.values()):
        return None
    told = [f"{w.name} is {w.state}" for w in router.roster.workers.values()]
    return f"no worker can take requests: {', '.join(told[:8]) or 'there is none'}"


def _log(log: EventLog | None) -> dict[str, Any] | None:
    return None if log is None else {"written": log.written, "dropped": log.dropped, "failed": log.failed}


def _pool(pool: Pool, now: float) -> dict[str, Any]:
    fleet, tally = pool.desk.fleet, pool.desk.tally
    return {
        "model": pool.model,
        "names": list(pool.names),
        "page_size": pool.page_size,
        "workers": list(pool.workers),
        "held": pool.desk.held,
        "oldest_wait_s": pool.desk.oldest_wait_s,
        "counters": dataclasses.asdict(fleet.counters),
        "rules": dict(tally.rules),
        "prompt_tokens": tally.prompt,
        "matched_tokens": dict(tally.matched),
        "copied_tokens": {reason.value: tokens for reason, tokens in fleet.copies.items()},
        "hits": dataclasses.asdict(fleet.hits),
        "ended": {stage.value: times for stage, times in tally.ended.items()},
        "refused": dict(tally.refused),
        "waited": tally.held,
        "retries": tally.retries,
        "migrations": [
            {"reason": reason, "outcome": outcome, "count": count}
            for (reason, outcome), count in tally.migrations.items()
        ],
        "first_token": {"predicted": _times(tally.predicted), "observed": _times(tally.observed)},
        "error": _errors(fleet.error),
        "recent": [_outcome(outcome, now) for outcome in reversed(pool.desk.recent)],
    }


def _worker(worker: Worker, router: Router, now: float) -> dict[str, Any]:
    heard = worker.heard
    pool = None if worker.model is None else router.pools.all.get(worker.model)
    return {
        "name": worker.name,
        "url": worker.spec.url,
        "kind": None if heard is None else heard.kind.value,
        "role": worker.spec.role.value,
        "model": worker.model,
        "state": worker.state,
        "why": worker.why or None,
        "breaker": worker.breaker.state.value,
        "opened": worker.breaker.opened,
        "prices": worker.prices,
        "events": worker.events,
        "resumes": worker.resumes,
        "incarnation": None if heard is None else heard.incarnation,
        "asked_s": None if heard is None else now - worker.asked,
        "restarts": worker.restarts,
        "under_way": len(worker.calls),
        "requests": worker.requests,
        "failures": dict(worker.failures),
        **_of_fleet(worker.name, pool, now),
    }


def _of_fleet(name: str, pool: Pool | None, now: float) -> dict[str, Any]:
    """What the pool's fleet knows of it."""
    if pool is None:
        return {"load": None, "pages": None, "corrections": None, "error": None}
    member = pool.desk.fleet.members()[name]
    load, report = pool.desk.fleet.loads(now)[name], member.report
    pages = None
    if report is not None:
        pages = {
            "free": report.free, "evictable": report.evictable, "owned": report.owned,
            "protected": report.protected, "total": member.profile.total_pages,
        }  # fmt: skip
    return {
        "load": {**load._asdict(), "largest": load.largest},
        "pages": pages,
        "corrections": {"queue": member.queue.value, "compute": member.compute.value},
        "error": _errors(member.errors),
    }


def _errors(errors: Errors) -> dict[str, Any]:
    """Predicted less observed seconds to the first token; the histogram is of absolute errors."""
    p50, p95 = errors.quantile(0.5), errors.quantile(0.95)
    most = BOUNDS[-1]
    return {
        "count": errors.count, "bias_s": errors.bias, "histogram": list(errors.histogram),
        "p50_s": None if p50 is None else min(p50, most), "p95_s": None if p95 is None else min(p95, most),
    }  # fmt: skip


def _times(times: Times) -> dict[str, Any]:
    return {"histogram": list(times.histogram), "total_s": times.total_s}


def _outcome(outcome: Outcome, now: float) -> dict[str, Any]:
    """One of the last decisions: why this worker, what was predicted and what came."""
    found = outcome.decision
    return {
        "request": found.request, "ago_s": now - found.at, "worker": found.worker, "rule": found.rule,
        "prompt": found.prompt, "found": found.found._asdict(), "available": found.available,
        "parts": {**found.parts._asdict(), "first": found.parts.first}, "load": found.load._asdict(),
        "runners_up": [{"worker": each.worker, "first_s": each.parts.first, "found": each.found.total,
                        "load": each.load} for each in found.runners_up],
        "age_s": found.age_s, "unknown": list(found.unknown),
        "copying": None if found.copying is None else found.copying.value, "copied": found.copied,
        "first_s": outcome.first_s, "ended": outcome.stage.value,
    }  # fmt: skip

"""The router's event log: every decision and what came of it, as the router itself counts them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotprefix.cli import app
from hotprefix.errors import ConfigError, InputError
from hotprefix.fleet.records import Copying, Decision, Found, Load, Parts, RunnerUp, Seen, Stage
from hotprefix.lab.trace.eventlog import read_beginning
from hotprefix.records.event_log import EventLog
from hotprefix.records.read_log import ReadReport, read_log
from hotprefix.records.route_schema import Route, RouteEnd, RouteRefused, RouterHeader
from hotprefix.records.schema import Dropped, Record, values
from hotprefix.report.inspect import inspect_log
from hotprefix.router import route_log
from hotprefix.router.prompt import Prompt
from hotprefix.router.route_log import RouteLog
from hotprefix.router.ticket import Outcome, Ticket
from tests.support.routing import FakeWorker, fleet, refuses, report, says

SECRET = "a secret that no log may hold. " * 10


def read(path: Path) -> list[Record]:
    return list(read_log(path, ReadReport()))


def of(kind: type[Any], records: list[Record]) -> list[Any]:
    return [record for record in records if isinstance(record, kind)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
async def test_the_log_holds_what_the_router_shows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"routes{suffix}"
    good, bad = FakeWorker("w0", says("a", cached=5), load=report()), FakeWorker("bad", refuses(500))
    settings: Any = {"policy": "round_robin", "breaker_failures": 99, "event_log": str(path)}
    async with fleet(good, bad, **settings) as before:
        for number in range(4):
            found = await before.ask(SECRET + str(number), user="a session's name", stream=number % 2 == 0)
            assert found.status_code == 200
        view = (await before.http.get("/workers")).json()["pools"][0]
        metrics = (await before.http.get("/metrics")).text
    records = read(path)
    assert isinstance(records[0], RouterHeader)
    assert records[0].config["policy"] == "round_robin"
    routes, ends = of(Route, records), of(RouteEnd, records)
    assert len(records) == 1 + len(routes) + len(ends)
    assert len(routes) == len(ends) == view["counters"]["routed"] > 4
    assert sum(r.attempt > 1 for r in routes) == view["retries"] > 0

    recent = list(reversed(view["recent"]))
    key = [(e.request, e.attempt) for e in ends]
    assert [(r.request, r.attempt) for r in routes] == key, "one at a time: each ends before the next"
    for route, end, shown in zip(routes, ends, recent, strict=True):
        assert (route.request, route.worker, route.rule) == (
            shown["request"], shown["worker"], shown["rule"]
        )  # fmt: skip
        assert (end.worker, end.ending, end.actual_first_s) == (
            shown["worker"], shown["ended"], shown["first_s"]
        )  # fmt: skip
        predicted = {f"{name}_s": value for name, value in shown["parts"].items() if value is not None}
        assert predicted.items() <= values(route).items()
        assert [route.found_l1, route.found_flight] == [shown["found"]["l1"], shown["found"]["flight"]]
        assert [one["worker"] for one in route.runners_up] == [o["worker"] for o in shown["runners_up"]]
        assert (route.copying, route.copied_tokens) == (shown["copying"], shown["copied"])
        assert (route.prompt_tokens, route.model) == (shown["prompt"], "m")
        assert end.total_s >= 0
        assert 0 <= route.held_s < 60
    whole = [e for e in ends if e.delivered_tokens is not None]
    assert [e.delivered_tokens for e in whole] == [5, 5]
    assert all(e.actual_first_s is None for e in whole), "a whole answer does not tell its first token"
    assert 'hotprefix_router_event_log_records_total{outcome="dropped"} 0.0' in metrics
    raw = path.read_bytes()
    for word in (b"secret", b"session's"):
        assert word not in raw


async def test_refusals_and_clients_that_leave_are_told(tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    release = asyncio.Event()

    async def slow(asked: Any, send: Any) -> None:
        await release.wait()

    worker = FakeWorker("w0", slow, load=report())
    async with fleet(worker, bound=1, hold_s=0.05, event_log=str(path)) as before:
        first = asyncio.ensure_future(before.ask())
        await before.until(lambda: worker.asked)
        assert (await before.ask()).status_code == 429
        first.cancel()
        await before.until(lambda: worker.left == 1)
        await before.until(lambda: not before.pool.desk.remembered)
        release.set()
    records = read(path)
    (refused,) = of(RouteRefused, records)
    assert (refused.reason, refused.model) == ("overload", "m")
    assert 0.05 <= refused.held_s < 60
    (end,) = of(RouteEnd, records)
    assert (end.ending, end.actual_first_s) == ("cancelled", None)


async def test_what_came_of_one_choice_is_not_told_of_the_next() -> None:
    async with fleet(FakeWorker("w0", says("a"), load=report())) as before:
        desk = before.pool.desk
        ticket = desk.ticket(Prompt(), "tenant")
        for seen in (Seen(cached=1), None):
            await desk.place(ticket)
            if seen is not None:
                desk.first_token(ticket, seen)
            desk.close(ticket, Stage.FAILED)
        first, second = desk.recent
    assert (first.seen, second.seen, second.first_s) == (Seen(cached=1), None, None)
    assert first.first_s is not None


def decision(**more: Any) -> Decision:
    parts = Parts(1.0, 0.0, 0.0, 0.5, 0.0, 0.0, 0.25, 0.125, None)
    fields: dict[str, Any] = {
        "request": "r1", "at": 10.0, "worker": "a", "incarnation": 1, "decode": "a",
        "decode_incarnation": 1, "peer": None, "prompt": 100, "found": Found(l1=32, flight=16),
        "available": 64, "parts": parts, "load": Load(0.1, 0.7, None, 0.0, 0.0),
        "runners_up": (RunnerUp("b", Found(l1=64), parts, 2.0),), "rule": "least_cost", "age_s": None,
        "unknown": ("report",), "copying": Copying.EARLIER_HERE, "copied": 16, **more,
    }  # fmt: skip
    return Decision(**fields)


class Kept:
    """A log that keeps what is put."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, item: Any) -> None:
        self.items.append(item)


def test_a_decision_is_written_field_by_field() -> None:
    kept = Kept()
    log = RouteLog(kept, "m")  # type: ignore[arg-type]
    ticket = Ticket(None, "", 0, since=9.5, attempt=2)  # type: ignore[arg-type]
    log.decided(ticket, decision(decode="b", peer="c"))
    (route,) = kept.items
    assert values(route) == {
        "k": "route", "t": 10.0, "request": "r1", "attempt": 2, "model": "m", "worker": "a", "decode": "b",
        "peer": "c", "rule": "least_cost", "held_s": 0.5, "prompt_tokens": 100, "available_tokens": 64,
        "found_l1": 32, "found_l2": 0, "found_l3": 0, "found_flight": 16, "found_peer": 0, "queue_s": 1.0,
        "restore_s": 0.0, "pull_s": 0.0, "compute_s": 0.5, "hand_off_s": 0.0, "decode_wait_s": 0.0,
        "first_s": 1.5, "delay_s": 0.25, "behind_s": 0.125, "load": 0.7,
        "runners_up": [{"worker": "b", "first_s": 1.5, "found_tokens": 64, "load": 2.0}],
        "unknown": ["report"], "copying": "earlier_here", "copied_tokens": 16,
    }  # fmt: skip
    assert set(route_log.ENDINGS) == {Stage.ENDED, Stage.FAILED, Stage.CANCELLED}
    assert Outcome._fields == ("decision", "stage", "first_s", "seen")


def written(path: Path, *records: Record) -> Path:
    lines = [json.dumps(values(record)) for record in (HEADER, *records)]
    path.write_text("".join(line + "\n" for line in lines))
    return path


HEADER = RouterHeader(t=5.0, run="a", part=0, wall=1000.0, hotprefix="0", config={"policy": "predicted"})


def some(path: Path) -> Path:
    """Two requests, the second of which fails once and has no end; a refusal; a loss."""
    kept = Kept()
    log = RouteLog(kept, "<b>m</b>")  # type: ignore[arg-type]
    ticket = Ticket(None, "", 0, since=9.5)  # type: ignore[arg-type]
    for request, attempt, worker in (("r1", 1, "a"), ("r2", 1, "a"), ("r2", 2, "<img src=x>")):
        ticket.attempt = attempt
        log.decided(ticket, decision(request=request, worker=worker))
    common: Any = {"t": 12.0, "worker": "a", "total_s": 2.0, "attempt": 1}
    ends = [
        RouteEnd(request="r1", ending="ended", actual_first_s=2.0, delivered_tokens=40, **common),
        RouteEnd(request="r2", ending="failed", **common),
        RouteRefused(t=13.0, request="r3", model="m", reason="overload", held_s=4.0, prompt_tokens=1),
        Dropped(t=14.0, count=7),
    ]
    return written(path, *kept.items, *ends)


def test_inspect_counts_a_router_s_log(tmp_path: Path) -> None:
    path, out = some(tmp_path / "routes.jsonl"), tmp_path / "page.html"
    found = inspect_log(path, out)
    assert found["totals"] == {
        "runs": 1, "requests": 2, "retries": 1, "refused": 1, "dropped_records": 7
    }  # fmt: skip
    assert found["endings"] == {"ended": 1, "failed": 1, "open": 1}
    assert found["workers"]["a"] == {"decisions": 2, "ended": 1, "failed": 1, "cancelled": 0, "open": 0}
    assert found["tokens"]["found_l1"] == 96
    assert (found["tokens"]["delivered_tokens"], found["tokens"]["delivered_of"]) == (40, 100)
    assert found["copied_tokens"] == {"earlier_here": 48}
    assert (found["error_s"]["bias"], found["error_s"]["count"]) == (-0.5, 1)
    assert found["error_s"]["p95"] == pytest.approx(0.5, rel=0.01)
    assert (found["held_s"]["count"], found["span_s"]) == (4, 9.0)
    page = out.read_text()
    assert "&lt;img src=x&gt;" in page
    assert "<img" not in page
    assert "7 records were dropped" in page
    ran = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    assert json.loads(ran.stdout)["log"] == "router"


def test_a_router_that_began_again_has_lost_what_was_open(tmp_path: Path) -> None:
    kept = Kept()
    log = RouteLog(kept, "m")  # type: ignore[arg-type]
    log.decided(Ticket(None, "", 0, since=9.5, attempt=1), decision())  # type: ignore[arg-type]
    end = RouteEnd(
        t=3.0, request="r1", attempt=1, worker="a", ending="ended", actual_first_s=1.0, total_s=2.0
    )
    again = dataclasses.replace(HEADER, run="b", t=1.0)
    found = inspect_log(written(tmp_path / "routes.jsonl", *kept.items, again, end), None)
    assert (found["totals"]["runs"], found["endings"]) == (2, {"open": 1, "ended": 1})
    assert (found["error_s"]["count"], found["span_s"]) == (0, 7.0)


def test_what_needs_an_engine_s_log_says_so(tmp_path: Path) -> None:
    path = some(tmp_path / "routes.jsonl")
    with pytest.raises(InputError, match="is a router's log, whose lines are rows already"):
        inspect_log(path, None, rows=tmp_path / "rows.csv")
    with pytest.raises(InputError, match="a router's log, which names no pages"):
        read_beginning(path)


def test_a_full_queue_loses_records_and_tells_where(tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    log = EventLog(path, HEADER, queue=0)
    refused = RouteRefused(t=6.0, request="r", model="m", reason="overload", held_s=0.0, prompt_tokens=1)
    log.put(refused)
    log._limit = 10
    log.put(refused)
    log.close()
    assert [type(record) for record in read(path)] == [RouterHeader, Dropped, RouteRefused]
    assert inspect_log(path, None)["totals"]["dropped_records"] == 1


async def test_a_log_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends with \.jsonl or \.parquet"):
        async with fleet(FakeWorker("w0", says("a")), event_log=str(tmp_path / "routes.txt")):
            raise AssertionError("it must not start")

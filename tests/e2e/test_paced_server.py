"""`hotprefix serve --paced` over sockets: what a router reads of it, and that workers answer alike."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from hotprefix.cost.presets import load_cost
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.cache.keys import chain, root_key
from hotprefix.kernel.request import Namespace
from hotprefix.records.kvevents import block_hash
from hotprefix.server.load_report import LoadReport
from tests.support.serving import Server

PRESET = "llama-3.1-8b.1xh100.fp8"
KEYS = Path(__file__).parents[1] / "fixtures" / "api-keys.txt"
FLAGS = [
    "--port", "0", "--paced", PRESET, "--kv-tokens", "16000", "--kv-events", "tcp://127.0.0.1:*",
    "--internal-key-file", str(KEYS),
]  # fmt: skip
ROUTER = {"x-hotprefix-internal": "sk-test"}
PROMPT = list(range(1000, 1100))


def worker(*more: str) -> Server:
    running = Server([str(Path(sys.executable).parent / "hotprefix"), "serve", *FLAGS, *more])
    running.until_ready()
    return running


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    """Two workers, one of half the speed."""
    running: list[Server] = []
    try:
        running.append(worker())
        running.append(worker("--pace-factor", "2"))
        yield running[0], running[1]
        for one in running:
            one.signal()
            assert one.wait() == 0
    finally:
        for one in running:
            one.process.kill()


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=200)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def load(server: Server) -> LoadReport:
    answer = httpx.get(f"{server.url}/load", timeout=200)
    return LoadReport.model_validate_json(answer.content)


def until(condition: Any, limit_s: float = 120) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_workers_of_any_speed_answer_alike(pair: tuple[Server, Server]) -> None:
    for fields in ({}, {"temperature": 1, "seed": 3}):
        texts = [complete(server, **fields)["choices"][0]["text"] for server in pair]
        assert texts[0] == texts[1]
        assert len(texts[0].split()) == 40


def test_the_report_has_what_a_router_joins_a_worker_with(pair: tuple[Server, Server]) -> None:
    complete(pair[0])
    until(lambda: load(pair[0]).decodes == 0)
    found = [load(server) for server in pair]
    for one in found:
        assert one.worker is not None
        assert (one.worker.page_size, one.worker.total_pages) == (16, 1000)
        assert (one.waiting, one.prefill_tokens) == (0, 0)
        assert one.pages is not None
        assert sum(one.pages.model_dump().values()) == 1000
    assert found[0].pages is not None
    assert found[0].pages.evictable > 0
    cost = load_cost(PRESET)
    assert [one.worker.cost.base_s for one in found] == [cost.base_s, 2 * cost.base_s]  # type: ignore[union-attr]
    assert abs(time.time_ns() - (found[0].incarnation or 0)) < 3600e9


def test_the_keys_of_its_pages_can_be_computed_from_the_report(pair: tuple[Server, Server]) -> None:
    found = load(pair[0])
    assert found.kv_events is not None
    assert found.worker is not None
    assert found.worker.fingerprint is not None
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(found.kv_events.endpoint)
    socket.subscribe(b"")
    prompt, stored = list(range(2000, 2096)), []
    deadline = time.monotonic() + 60
    while not stored:  # the subscription takes effect a moment after `connect`
        assert time.monotonic() < deadline
        prompt[0] += 1
        complete(pair[0], prompt=prompt, max_tokens=1)
        if socket.poll(500):
            _, events, _ = msgspec.msgpack.decode(socket.recv_multipart()[2])
            stored = events[0]["block_hashes"]
    socket.close(0)
    root = root_key(Namespace(model=found.worker.fingerprint), 16)
    keys = [block_hash(key) for key in chain(root, tk.encode(prompt), 16)]
    assert stored == keys[: len(stored)]
    assert len(stored) >= 5


def test_a_late_subscriber_gets_what_it_missed(pair: tuple[Server, Server]) -> None:
    prompt = list(range(3000, 3096))
    complete(pair[0], prompt=prompt, max_tokens=1)
    found = load(pair[0])
    assert found.worker is not None
    assert found.kv_events is not None
    assert found.kv_events.snapshot
    root = root_key(Namespace(model=found.worker.fingerprint or ""), 16)
    keys = {block_hash(key) for key in chain(root, tk.encode(prompt), 16)}
    pages: list[int] = []
    cursor: int | None = 0
    while cursor is not None:
        query = {"cursor": cursor, "limit": 3}
        told = httpx.get(f"{pair[0].url}/kv_snapshot", params=query, headers=ROUTER, timeout=200).json()
        pages, cursor = pages + told["pages"], told["cursor"]
    assert keys <= set(pages)
    assert told["incarnation"] == found.incarnation
    assert told["number"] >= 0
    (source,) = httpx.get(f"{pair[0].url}/kv_event_sources", timeout=200).json()
    assert source["endpoint"] == found.kv_events.endpoint


def test_a_stopped_engine_s_figures_grow_old_and_a_new_one_has_a_larger_number() -> None:
    server = worker()
    try:
        first = load(server)
        pid = server.engine_pid()
        os.kill(pid, signal.SIGSTOP)
        until(lambda: (load(server).age_s or 0) > 0.5)
        held = load(server)
        assert (held.incarnation, held.decodes) == (first.incarnation, 0)
        os.kill(pid, signal.SIGKILL)
        until(lambda: load(server).incarnation != first.incarnation)
        until(lambda: load(server).incarnation is not None)
        again = load(server)
        assert again.incarnation is not None
        assert first.incarnation is not None
        assert again.incarnation > first.incarnation
    finally:
        server.process.kill()
        server.wait()

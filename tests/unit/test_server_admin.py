"""Models, tokenize, health, metrics, flush; draining and leaving clients without sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from hotprefix.engine.client import Health
from hotprefix.engine.messages import FlushReport
from hotprefix.errors import EngineDead
from hotprefix.kernel.plan import Finish
from hotprefix.server.app import create_app
from hotprefix.server.config import ServerConfig
from tests.support.server import CONTEXT, STATS, TURN, BytesText, FakeEngine, chat, client, words

JSON = [(b"content-type", b"application/json")]
VLLM = [
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_cached_by_source_total", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket", "vllm:request_queue_time_seconds_bucket",
    "vllm:kv_cache_usage_perc",
]  # fmt: skip


def samples(text: str) -> dict[str, float]:
    """Metric name with its labels, but those every alias has -> value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            rest = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            found[f"{sample.name}{{{rest}}}" if rest else sample.name] = sample.value
    return found


async def test_models_tell_the_context_length() -> None:
    async with client(FakeEngine(), ServerConfig(served_names=("mine", "alias"))) as http:
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(c["id"], c["object"], c["max_model_len"]) for c in cards] == [
            ("mine", "model", CONTEXT), ("alias", "model", CONTEXT),
        ]  # fmt: skip
        assert (await http.get("/v1/models/alias")).json()["id"] == "alias"
        for name, status in (("alias", 200), ("fake", 404)):
            answer = await http.post("/v1/chat/completions", json={**chat(), "model": name})
            assert answer.status_code == status
        assert answer.json()["error"]["message"].count("mine, alias") == 1


async def test_tokenize_renders_as_the_other_routes_do() -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        text = (await http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
        assert text["tokens"] == list("hé".encode())
        assert (text["count"], text["max_model_len"]) == (3, CONTEXT)
        assert text["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
        back = await http.post("/detokenize", json={"tokens": text["tokens"]})
        assert back.json() == {"prompt": "hé"}
        rendered = (await http.post("/tokenize", json={"messages": chat()["messages"]})).json()["tokens"]
        await http.post("/v1/chat/completions", json=chat())
        assert rendered == list(engine.seen[0].prompt)
        bare = await http.post("/tokenize", json={**chat(), "add_generation_prompt": False})
        assert bare.json()["tokens"] == rendered[:-1]
        assert rendered[-1] == TURN
        for body in ({}, {"prompt": 5}, {"messages": []}, {"prompt": "a", "temperature": 1}):
            assert (await http.post("/tokenize", json=body)).status_code == 400
        for ids in ([-1], [300], [True], [2**70], "a"):
            assert (await http.post("/detokenize", json={"tokens": ids})).status_code == 400


async def test_case_174_every_number_of_the_engine_is_in_metrics() -> None:
    engine = FakeEngine(words("ab", "c", cached=4))
    async with client(engine) as http:
        await http.post("/v1/chat/completions", json=chat(n=2))
        await http.post("/v1/chat/completions", json=chat(nope=1))
        answer = await http.get("/metrics")
    got = samples(answer.text)
    assert all(any(name.split("{")[0] == wanted for name in got) for wanted in VLLM)
    values = sorted(got.values())
    for name in STATS.__slots__:
        if name not in ("page_size", "insight"):
            assert getattr(STATS, name) in values, name
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="fake"} 2.0' in answer.text
    assert 'engine="0",finished_reason="stop",model_name="fake"} 2.0' in answer.text
    assert got["vllm:prefix_cache_queries_total"] == STATS.queried_tokens
    assert got["vllm:prefix_cache_hits_total"] == 640
    assert got["vllm:prompt_tokens_cached_by_source_total{source=host}"] == 30
    assert got["vllm:kv_cache_usage_perc"] == pytest.approx(0.3)
    pages = [
        got[f"hotprefix_pages{{state={s},tier=device}}"] for s in ("free", "owned", "evictable", "protected")
    ]
    assert sum(pages) == got["hotprefix_pages{state=total,tier=device}"]
    assert got["hotprefix_http_errors_total{status=400}"] == 1
    assert got["hotprefix_generations_finished_total{reason=stop}"] == 2
    assert got["vllm:request_success_total{finished_reason=stop}"] == 2
    for name in ("hotprefix_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"):
        assert got[f"{name}_count"] == 2
    for name in ("hotprefix_queue_seconds", "vllm:request_queue_time_seconds"):
        assert (got[f"{name}_count"], got[f"{name}_sum"]) == (2, 1.0)
    assert got["hotprefix_inter_token_seconds_count"] == 2
    assert got["hotprefix_decode_seconds_sum"] == 2.0
    assert got["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(2 * 1.0 / 2)
    assert (got["vllm:request_prompt_tokens_sum"], got["vllm:request_generation_tokens_sum"]) == (18, 6)


def test_case_159_and_161_time_to_first_token_is_not_a_gap_and_chunks_are_not_tokens() -> None:
    from hotprefix.engine.messages import Delta, Usage
    from hotprefix.server.metrics import Metrics

    metrics = Metrics()
    watch = metrics.watch(0.0)
    for now, tokens, finish in ((1.0, 1, None), (1.1, 1, None), (1.4, 3, None), (1.5, 0, Finish.STOP)):
        watch.delta(Delta("a", "", (5,) * tokens, Usage(1, 1), finish), now)
    got = samples(metrics.text().decode())
    assert (got["hotprefix_time_to_first_token_seconds_sum"], got["hotprefix_request_seconds_sum"]) == (
        1.0,
        1.5,
    )
    assert got["hotprefix_inter_token_seconds_count"] == 4
    assert got["hotprefix_inter_token_seconds_sum"] == pytest.approx(0.4)


async def test_metrics_of_a_dead_engine_leave_its_numbers_out() -> None:
    class Dead(FakeEngine):
        async def stats(self) -> Any:
            raise EngineDead("gone")

    engine = Dead()
    engine.ok = Health(False, "restarting")
    engine.restarts = 2
    async with client(engine) as http:
        got = samples((await http.get("/metrics")).text)
        info = (await http.get("/server_info")).json()
    assert (got["hotprefix_engine_up"], got["hotprefix_engine_restarts_total"]) == (0, 2)
    assert not any(name.startswith("hotprefix_pages") for name in got)
    assert (info["stats"], info["state"]) == (None, "restarting")


async def test_a_stuck_engine_does_not_hold_up_the_admin_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(FakeEngine):
        async def stats(self) -> Any:
            await asyncio.Event().wait()

        flush_cache = stats

    monkeypatch.setattr("hotprefix.server.admin.PATIENCE_S", 0.01)
    async with client(Stuck()) as http:
        assert (await http.get("/metrics")).status_code == 200
        assert (await http.get("/server_info")).json()["stats"] is None
        assert (await http.post("/flush_cache")).status_code == 503


@pytest.mark.parametrize("route", ["/flush_cache", "/reset_prefix_cache"])
async def test_flush_is_honest(route: str) -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        whole = await http.post(route)
        assert (whole.status_code, whole.json()["freed_tokens"]) == (200, 64)
        for method in ("GET", "HEAD", "PUT"):  # a link or a picture must not be able to do it
            assert (await http.request(method, route)).status_code == 405
        assert whole.json()["external_store_flushed"] is None
        engine.flushed = FlushReport(freed=16, kept=48, running=2, storage=True)
        partial = (await http.post(route)).json()
    assert partial["success"] is True  # nobody finds what is kept, see the kernel's tests of a flush
    assert (partial["kept_tokens"], partial["running_requests"]) == (48, 2)
    assert partial["external_store_flushed"] is False
    for said in (
        "flushed 16 tokens",
        "48 more are held by 2 running",
        "external store (--l3) was not flushed",
    ):
        assert said in partial["message"]


@pytest.mark.parametrize("alive", [False, True])
async def test_liveness_is_apart_from_readiness(alive: bool) -> None:
    """An engine that reloads is no reason to kill the process; one that is lost is."""
    engine = FakeEngine()
    engine.ok = Health(False, "loading: the engine is loading", alive)
    async with client(engine) as http:
        assert (await http.get("/readyz")).status_code == 503
        answer = await http.get("/livez")
        assert answer.status_code == (200 if alive else 503)
        engine.ok = Health(True, "ready")
        assert (await http.get("/readyz")).status_code == (await http.get("/livez")).status_code == 200


async def test_health_says_why_not() -> None:
    engine = FakeEngine()
    async with client(engine) as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        engine.ok = Health(False, "hung: silent for 40 s")
        answer = await http.get("/health")
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "hung: silent for 40 s")


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_or_a_cancelled_request_aborts_every_choice(
    stream: bool, leaves: bool
) -> None:
    engine = FakeEngine()
    engine.hold = True
    app = create_app(engine, ServerConfig(), BytesText())
    left = asyncio.Event()
    sent: list[Message] = []
    body = json.dumps(chat(n=3, stream=stream)).encode()
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if waiting:
            return waiting.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": JSON, "root_path": "",
        "query_string": b"", "scheme": "http", "server": ("test", 80), "http_version": "1.1",
    }  # fmt: skip
    task = asyncio.create_task(app(scope, receive, send))
    await engine.arrived.wait()
    assert not engine.aborted
    if leaves:
        left.set()
    else:
        task.cancel()
    await task
    assert sorted(engine.aborted) == sorted(request.id for request in engine.seen)
    assert len(engine.aborted) == 3
    assert [message["status"] for message in sent if "status" in message] == ([] if leaves else [503])
    assert samples(app.state.service.metrics.text().decode())["hotprefix_clients_left_total"] == leaves
    await asyncio.wait_for(app.state.service.gate.idle(), 5)


async def test_case_152_the_answer_to_a_body_that_is_too_large_waits_for_the_sender_before_it_closes() -> (
    None
):
    """Closing a connection on unread data can destroy the answer on its way."""
    app = create_app(FakeEngine(), ServerConfig(body_limit=10), BytesText())
    log: list[str] = []

    async def receive() -> Message:
        log.append("read")
        return {"type": "http.request", "body": b"x" * 8, "more_body": log.count("read") < 5}

    async def send(message: Message) -> None:
        log.append(f"{message.get('status', '')}{'...' if message.get('more_body') else ''}")

    scope = {
        "type": "http", "method": "POST", "path": "/tokenize", "headers": JSON, "root_path": "",
        "query_string": b"", "scheme": "http", "server": ("test", 80), "http_version": "1.1",
    }  # fmt: skip
    await app(scope, receive, send)
    assert log == ["read", "read", "413", "...", "read", "read", "read", ""]


async def test_draining_refuses_new_work_and_waits_for_the_open() -> None:
    engine = FakeEngine()
    engine.hold = True
    app = create_app(engine, ServerConfig(), BytesText())
    gate = app.state.service.gate
    import httpx

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        open_one = asyncio.create_task(http.post("/v1/chat/completions", json=chat()))
        await engine.arrived.wait()
        gate.draining = True
        for answer in (await http.post("/v1/chat/completions", json=chat()), await http.get("/health")):
            assert answer.status_code == 503
        assert not await _ends(gate.idle())
        engine.release()
        assert (await open_one).status_code == 200
        await asyncio.wait_for(gate.idle(), 5)


async def _ends(work: Any) -> bool:
    task = asyncio.ensure_future(work)
    for _ in range(10):
        await asyncio.sleep(0)
    return task.done() or not task.cancel()

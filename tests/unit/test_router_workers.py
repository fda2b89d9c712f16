"""Workers that come, go, begin again, and are not what they were."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from hotprefix.errors import ConfigError
from hotprefix.router.config import RouterConfig
from hotprefix.router.vllm_metrics import read_metrics
from hotprefix.router.worker_spec import Kind, parse, parse_all, parse_lines
from hotprefix.server.config import ServerConfig
from tests.support.routing import FakeWorker, Routing, answer, fleet, refuses, report, routing, says, up

VLLM = """# HELP x y
process_start_time_seconds 1.79607641439e+09
vllm:cache_config_info{block_size="32",num_gpu_blocks="40",other="a,\\"b=c"} 1.0
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 1000.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 10.0
"""
ADMIN = {"authorization": "Bearer admin"}
CHANGES = (("POST", "/workers"), ("POST", "/workers/w0/drain"), ("DELETE", "/workers/w0"))
ADMINS = ServerConfig.digests(["admin"])


def model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "root": name, "owned_by": "x"}


async def served_by(before: Routing, **fields: Any) -> str:
    found = await before.ask(**fields)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["text"])


async def test_the_kind_is_found_out_and_what_is_not_known_is_said() -> None:
    own = FakeWorker("own", says("a"), load=report(incarnation=7, waiting=2, prefill=3_000_000, decodes=5))
    vllm, plain = FakeWorker("vllm", says("b"), metrics=VLLM), FakeWorker("plain", says("c"))
    async with fleet(own, vllm, plain) as before:
        await before.until(lambda: all(w.heard for w in before.router.roster.workers.values()))
        view = (await before.http.get("/workers")).json()
        about = {each["name"]: each for each in view["workers"]}
        assert {name: each["kind"] for name, each in about.items()} == {
            "own": "hotprefix", "vllm": "vllm", "plain": "openai"
        }  # fmt: skip
        assert about["own"]["pages"] == {
            "free": 1000, "evictable": 0, "owned": 0, "protected": 0, "total": 1000
        }  # fmt: skip
        assert about["vllm"]["pages"]["total"] == 40 * 2  # in pages of the pool's 16 tokens
        assert about["plain"]["pages"] is None
        assert about["plain"]["load"]["pages"] is None
        assert about["own"]["incarnation"] == 7
        assert about["own"]["load"]["prefill"] > 0
        assert all("a default" in each["prices"] for each in about.values())
        assert [line for line in before.said if line.startswith("worker plain:")] == [
            "worker plain: openai, m; prices: llama-3.1-8b.1xh100.fp8, a default; "
            "what it has cached is presumed"
        ]


def test_vllm_s_metrics_are_read() -> None:
    found = read_metrics(VLLM)
    assert found is not None
    assert found.figures == (2, 200, 3, (30, 0, 10, 0), 0.0)
    assert (found.page_size, found.total_pages, found.incarnation) == (32, 40, int(1.79607641439e18))
    assert read_metrics("python_info 1.0\n") is None
    cold = read_metrics("vllm:num_requests_running 0\nvllm:num_requests_waiting 4\n")
    assert cold is not None
    assert (cold.figures.prefill_tokens, cold.figures.pages) == (None, None)
    assert read_metrics("vllm:num_requests_running nan\n") is None


async def test_a_worker_that_begins_again_has_nothing_cached_and_no_load(tmp_path: Path) -> None:
    w0 = FakeWorker("w0", says("a"), load=report(incarnation=9))
    async with fleet(w0) as before:
        worker = before.router.roster.workers["w0"]
        for _ in range(2):
            await before.ask("p" * 640)
        assert before.pool.desk.recent[-1].decision.found.total > 0
        for _ in range(3):
            worker.failed("5xx", "status 500", before.router.clock())
        w0.load = report(incarnation=4)  # another life; its clock is behind
        await before.until(lambda: worker.restarts == 1)
        assert worker.breaker.state == "closed"
        await before.until(lambda: before.pool.desk.fleet.members()["w0"].report is not None)
        await before.ask("p" * 640)
        assert before.pool.desk.recent[-1].decision.found.total == 0
        assert any("begun again" in line for line in before.said)
        before.nothing_left()


async def test_each_model_is_a_pool_of_its_own() -> None:
    """`ray#58835`: one tree for two models."""
    a, b = FakeWorker("a", says("A"), models=[model("ma")]), FakeWorker("b", says("B"), models=[model("mb")])
    async with fleet(a, b) as before:
        for _ in range(2):
            for name, text in (("ma", "A"), ("mb", "B")):
                assert await served_by(before, prompt="same " * 100, model=name) == text
        for pool in before.router.pools.all.values():
            assert (pool.desk.recent[0].decision.found.total, len(pool.desk.recent)) == (0, 2)
        found = await before.ask(model="mc")
        assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")
        assert "ma, mb" in found.json()["error"]["message"]
        assert (await before.http.post("/v1/completions", json={"prompt": "x"})).status_code == 400
        models = (await before.http.get("/v1/models")).json()
        assert [card["id"] for card in models["data"]] == ["ma", "mb"]
        assert (await before.http.get("/v1/models/mb")).json() == model("mb")
        assert (await before.http.get("/v1/models/mc")).status_code == 404


async def test_a_model_that_is_not_known_goes_to_the_only_pool() -> None:
    async with fleet(FakeWorker("w0", refuses(404))) as before:
        assert (await before.ask(model="other")).json() == {"error": {"message": "status 404"}}


async def test_a_worker_that_changes_its_model_changes_its_pool() -> None:
    w0, w1 = FakeWorker("w0", says("0"), load=report()), FakeWorker("w1", says("1"), load=report())
    async with fleet(w0, w1) as before:
        w1.models, w1.load = [model("n")], report(model="n")
        await before.until(lambda: set(before.router.pools.all) == {"m", "n"})
        assert (await served_by(before, model="m"), await served_by(before, model="n")) == ("0", "1")
        assert any("serves n now, no longer m" in line for line in before.said)
        w1.models, w1.load = [model("m")], report()
        await before.until(lambda: set(before.router.pools.all) == {"m"})
        assert len(before.pool.workers) == 2


async def test_pages_of_another_size_are_said_and_presumed() -> None:
    """`Infera#73`: with other pages than the engine's a router found nothing and did not say so."""
    w0 = FakeWorker("w0", says("0"), load=report())
    w1 = FakeWorker("w1", says("1"), load=report(page_size=64, total_pages=250))
    async with fleet(w0, w1) as before:
        assert [w.heard.page_size for w in before.pool.workers.values()] == [16, 64]
        assert before.pool.desk.fleet.members()["w1"].profile.total_pages == 1000
        assert any("w1" in line and "64 tokens and the pool's 16" in line for line in before.said)
        for _ in range(12):  # shorter than a page, and yet both are used
            await before.ask("x")
        assert min(len(w0.asked), len(w1.asked)) >= 4


async def test_the_list_is_changed_with_the_admin_s_key_only() -> None:
    w0, w1 = FakeWorker("w0", says("0")), FakeWorker("w1", says("1"))
    body = {"worker": "http://127.0.0.1:1"}
    async with up(w1), fleet(w0) as closed:
        assert (await closed.http.post("/workers", json=body, headers=ADMIN)).status_code == 404
        assert (await closed.http.delete("/workers/w0", headers=ADMIN)).status_code == 404
        assert (await closed.http.get("/workers")).status_code == 200
    async with up(w1), fleet(w0, admin_digests=ADMINS) as before:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "admin"}):
            for method, path in CHANGES:
                found = await before.http.request(method, path, json=body, headers=headers)
                assert found.status_code == 401, (method, path)
        added = await before.http.post("/workers", json={"worker": f"{w1.url},name=w1"}, headers=ADMIN)
        assert (added.status_code, added.json()) == (201, {"added": "w1"})
        await before.until(lambda: before.router.roster.workers["w1"].state == "ready")
        again = await before.http.post("/workers", json={"worker": f"{w1.url},name=w1"}, headers=ADMIN)
        assert again.status_code == 400
        wrong = await before.http.post("/workers", json={"worker": "ftp://x"}, headers=ADMIN)
        assert (wrong.status_code, "ftp://x" in wrong.json()["error"]["message"]) == (400, True)
        assert (await before.http.get("/workers/w1")).json()["url"] == w1.url
        assert (await before.http.post("/workers/w0/drain", headers=ADMIN)).json() == {"draining": "w0"}
        assert await served_by(before) == "1"
        assert (await before.http.delete("/workers/w0", headers=ADMIN)).status_code == 202
        await before.until(lambda: set(before.router.roster.workers) == {"w1"})
        assert (await before.http.delete("/workers/w0", headers=ADMIN)).status_code == 404


async def test_an_admin_s_key_is_asked_for_where_clients_have_keys_too() -> None:
    server = ServerConfig(key_digests=ServerConfig.digests(["client"]))
    async with fleet(FakeWorker("w0", says("0")), server=server, admin_digests=ADMINS) as before:
        client = {"authorization": "Bearer client"}
        assert (await before.http.get("/workers")).status_code == 401
        assert (await before.http.get("/metrics")).status_code == 401
        assert (await before.http.get("/workers", headers=client)).status_code == 200
        assert (await before.http.delete("/workers/w0", headers=client)).status_code == 401
        assert (await before.http.delete("/workers/w0", headers=ADMIN)).status_code == 202


async def test_a_drain_lets_requests_end() -> None:
    go = asyncio.Event()

    async def slow(asked: Any, send: Any) -> None:
        await go.wait()
        await answer(send, 200, {"choices": [{"text": "0"}]})

    w0, w1 = FakeWorker("w0", slow), FakeWorker("w1", says("1"))
    async with fleet(w0, w1, policy="round_robin") as before:
        first = asyncio.ensure_future(before.ask())
        await before.until(lambda: w0.asked)
        before.router.roster.remove("w0")
        assert [await served_by(before) for _ in range(3)] == ["1"] * 3
        assert "w0" in before.router.roster.workers
        go.set()
        assert (await first).status_code == 200
        await before.until(lambda: "w0" not in before.router.roster.workers)
        before.nothing_left()


async def test_a_file_of_workers_is_read_again_and_a_typo_changes_nothing(tmp_path: Path) -> None:
    w0, w1 = FakeWorker("w0", says("0")), FakeWorker("w1", says("1"))
    file = tmp_path / "workers"
    async with up(w0), up(w1):
        file.write_text(f"# ours\n\n{w0.url},name=w0\n")
        async with routing(worker_file=str(file), relist_s=0.02) as before:
            workers = before.router.roster.workers
            assert set(workers) == {"w0"}
            file.write_text(f"{w0.url},name=w0\n{w1.url},nmae=w1\n")
            await before.until(lambda: any("line 2" in line for line in before.said))
            assert any("did you mean name?" in line and "stay as they were" in line for line in before.said)
            await asyncio.sleep(0.1)
            assert set(workers) == {"w0"}
            assert len([line for line in before.said if "line 2" in line]) == 1
            file.write_text(f"{w1.url},name=w1\n")
            await before.until(lambda: set(workers) == {"w1"} and workers["w1"].state == "ready")
            assert await served_by(before) == "1"


async def test_a_name_is_a_worker_for_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    w0 = FakeWorker("w0", says("0"))
    addresses = ["127.0.0.1"]

    async def resolved(*_: Any, **__: Any) -> Any:
        if not addresses:
            raise OSError("no such name")
        return [(socket.AF_INET, None, None, "", (each, 0)) for each in addresses]

    async with up(w0):
        port = w0.url.rsplit(":", 1)[1]
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(type(loop), "getaddrinfo", resolved)
        async with routing(f"dns+http://engines.test:{port}", relist_s=0.02) as before:
            workers = before.router.roster.workers
            assert set(workers) == {f"127.0.0.1:{port}"}
            addresses.append("127.0.0.2")
            await before.until(lambda: len(workers) == 2)
            addresses.clear()  # the name does not resolve: the workers stay
            await before.until(lambda: any("has no address" in line for line in before.said))
            assert len(workers) == 2


async def test_a_flush_goes_to_all_and_what_was_presumed_is_gone() -> None:
    w0, w1 = FakeWorker("w0", says("0"), load=report()), FakeWorker("w1", says("1"))
    async with fleet(w0, w1) as before:
        await before.ask("p" * 640)
        await before.ask("p" * 640)
        assert before.pool.desk.recent[-1].decision.found.total > 0
        found = await before.http.post("/flush_cache")
        assert (found.status_code, found.json()["success"]) == (200, True)
        assert [a.path for a in (*w0.asked, *w1.asked) if "cache" in a.path] == [
            "/flush_cache", "/reset_prefix_cache"
        ]  # fmt: skip
        await before.ask("p" * 640)
        assert before.pool.desk.recent[-1].decision.found.total == 0
        w1.serve = refuses(403)
        found = await before.http.post("/reset_prefix_cache")
        assert (found.status_code, found.json()["workers"]["w1"]["message"]) == (
            502, "/reset_prefix_cache answers 403"
        )  # fmt: skip


async def test_questions_go_to_any_worker_of_the_pool() -> None:
    async def tokens(asked: Any, send: Any) -> None:
        await answer(send, 200, {"tokens": [1]})

    gone = FakeWorker("gone", tokens)
    async with fleet(FakeWorker("w0", tokens), FakeWorker("w1", tokens)) as before:
        for _ in range(3):
            found = await before.http.post("/tokenize", json={"model": "m", "prompt": "x"})
            assert found.json() == {"tokens": [1]}
        assert not before.pool.desk.fleet.counters.routed
    assert not gone.asked


async def test_health_says_whether_a_request_would_be_answered() -> None:
    w0 = FakeWorker("w0", says("0"))
    async with routing("http://127.0.0.1:1,name=w0") as before:
        for path in ("/health", "/readyz"):
            found = await before.http.get(path)
            assert (found.status_code, "w0 is unknown" in found.json()["error"]["message"]) == (503, True)
        assert (await before.http.get("/livez")).status_code == 200
        assert (await before.ask()).status_code == 503
    async with fleet(w0) as before:
        assert (await before.http.get("/health")).status_code == 200
        assert "version" in (await before.http.get("/version")).json()
        before.router.gate.draining = True
        assert (await before.http.get("/health")).status_code == 503
        assert (await before.ask()).status_code == 503
        assert (await before.http.get("/livez")).status_code == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10.0.0.5:8000", "give http://HOST:PORT"),
        ("http://", "give http://HOST:PORT"),
        ("http://h:99999", "no URL"),
        ("http://user:pw@h:1", "a key goes into key-file"),
        ("http://h:1/v1", "give http://h:1 without /v1"),
        ("http://h:1?x=1", "scheme, host, port and path only"),
        ("http://h:1,rol=both", "did you mean role?"),
        ("http://h:1,role=prefil", "did you mean prefill?"),
        ("http://h:1,kind=vlm", "did you mean vllm?"),
        ("http://h:1,events", "events has no value"),
        ("http://h:1,events=10.0.0.1:5557", "give events=tcp://HOST:PORT"),
        ("http://h:1,name=a,name=b", "given twice"),
        ("http://h:1,name=a b", "name='a b'"),
        ("http://h:1,key-file=/none/at/all", "key-file=/none/at/all"),
        ("https://h:1,ca=/none/at/all", "no such file"),
    ],
)  # fmt: skip
def test_a_worker_that_is_named_wrongly_is_told_how(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_worker_is_read() -> None:
    found = parse("http://10.0.0.7:8000/,kind=vllm,events=tcp://10.0.0.7:5557,name=big")
    assert (found.url, found.name, found.kind, found.events) == (
        "http://10.0.0.7:8000", "big", Kind.VLLM, "tcp://10.0.0.7:5557"
    )  # fmt: skip
    assert parse("https://[::1]:1").name == "[::1]:1"
    assert parse("dns+http://e.svc:8000").at("10.0.0.1").url == "http://10.0.0.1:8000"
    with pytest.raises(ConfigError, match="two workers are named"):
        parse_all(["http://h:1", "http://h:1"])
    with pytest.raises(ConfigError, match="line 3"):
        parse_lines("http://h:1\n\nhttp://h:1\n", "f")
    with pytest.raises(ConfigError, match="there is no worker"):
        RouterConfig()


def test_a_worker_s_key_is_not_shown(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    assert "secret" not in repr(parse(f"http://h:1,key-file={key}"))

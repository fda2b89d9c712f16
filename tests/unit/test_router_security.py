"""Who may call, and what must not get through: keys, smuggled requests, headers, other servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trustme

from hotprefix.router.isolation import salted
from hotprefix.server.config import ServerConfig
from hotprefix.server.errors import ApiError
from hotprefix.server.guard import tenant
from tests.support.routing import FakeWorker, fleet, report, routing, says, serving, up
from tests.support.sockets import Raw, raw

KEYED = ServerConfig(key_digests=ServerConfig.digests(["one", "two"]))
ISOLATED = ServerConfig(key_digests=ServerConfig.digests(["one", "two"]), isolate_keys=True)
ROUTES = [
    ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/responses"),
    ("GET", "/v1/models"), ("GET", "/v1/models/m"), ("POST", "/tokenize"), ("POST", "/flush_cache"),
    ("GET", "/metrics"), ("GET", "/workers"), ("GET", "/workers/w0"), ("POST", "/workers"),
    ("GET", "/version"), ("GET", "/nope"), ("DELETE", "/workers/w0"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_a_key_where_there_are_keys(method: str, path: str) -> None:
    worker = FakeWorker("w0", says("x"))
    async with fleet(worker, server=KEYED) as before:
        for key in (None, "Bearer", "Bearer three", "Basic one"):
            headers = {} if key is None else {"authorization": key}
            found = await before.http.request(method, path, json={"prompt": "x"}, headers=headers)
            assert found.status_code == 401, (key, found.text)
        assert not worker.asked
        found = await before.http.request(
            method, path, json={"prompt": "x"}, headers={"authorization": "Bearer two"}
        )
        assert found.status_code != 401
    assert all("authorization" not in asked.headers for asked in worker.asked)


async def test_what_needs_no_key_needs_none() -> None:
    async with fleet(FakeWorker("w0", says("x")), server=KEYED) as before:
        for path in ("/health", "/readyz", "/livez"):
            assert (await before.http.get(path)).status_code == 200


async def test_pages_of_other_sites_and_other_hosts_are_refused() -> None:
    worker = FakeWorker("w0", says("x"))
    async with fleet(worker) as before:
        for headers in ({"origin": "https://evil.test"}, {"host": "evil.test"}):
            found = await before.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            assert found.status_code == 403
    assert not worker.asked


async def send(before: Any, data: bytes) -> bytes:
    async with raw(before) as client:
        talk: Raw = client
        await talk.send(data)
        return await talk.until_closed()


BODY = b'{"prompt":"x"}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HIDDEN = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
SMUGGLED = {
    "length and chunks": b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "chunks and length": b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": b"content-length: 14\r\ncontent-length: 0\r\n\r\n" + BODY + HIDDEN,
    "a list of lengths": b"content-length: 14, 0\r\n\r\n" + BODY + HIDDEN,
    "odd coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "space before the colon": b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    "signed length": b"content-length: +14\r\n\r\n" + BODY + HIDDEN,
    "header on a folded line": b"x: a\r\n transfer-encoding: chunked\r\ncontent-length: 14\r\n\r\n" + BODY,
    "bare line end in a header": b"x: a\ntransfer-encoding: chunked\r\ncontent-length: 14\r\n\r\n" + BODY,
    "nul in a header": b"x: a\x00b\r\ncontent-length: 14\r\n\r\n" + BODY,
}


@pytest.mark.parametrize("what", SMUGGLED)
async def test_what_two_readers_could_read_differently_never_becomes_two_requests(what: str) -> None:
    worker = FakeWorker("w0", says("x"))
    async with fleet(worker) as before:
        said = await send(before, HEAD + b"connection: close\r\n" + SMUGGLED[what])
        assert said.startswith(b"HTTP/1.1 ")
        before.nothing_left()
    assert len(worker.asked) <= 1
    assert said.count(b"HTTP/1.1 ") == 1
    for asked in worker.asked:
        lengths = [value for name, value in asked.raw_headers if name == b"content-length"]
        assert lengths == [str(len(asked.body)).encode()]
        assert "transfer-encoding" not in asked.headers


@pytest.mark.parametrize(
    "target",
    [b"http://127.0.0.1:1/v1/completions", b"//127.0.0.1:1/v1/completions", b"/v1/completions/../../load",
     b"/v1/completions/", b"/v1//completions", b"/v1/completions%2f..", b"/load", b"/kv_snapshot",
     b"/server_info", b"@127.0.0.1:1/"],
)  # fmt: skip
async def test_only_the_router_s_own_paths_at_configured_workers_are_reached(target: bytes) -> None:
    other, worker = FakeWorker("other", says("never")), FakeWorker("w0", says("x"), load=report())
    async with up(other), fleet(worker) as before:
        target = target.replace(b"127.0.0.1:1", other.url.removeprefix("http://").encode())
        head = b"POST " + target + HEAD.removeprefix(b"POST /v1/completions")
        said = await send(before, head + b"connection: close\r\ncontent-length: 14\r\n\r\n" + BODY)
        assert said
    assert not other.asked
    assert {asked.path for asked in worker.asked} <= {"/v1/completions"}


async def test_a_worker_in_a_header_or_a_body_is_not_contacted() -> None:
    other, worker = FakeWorker("other", says("never")), FakeWorker("w0", says("x"))
    async with up(other), fleet(worker) as before:
        host = other.url.removeprefix("http://")
        headers = {"x-forwarded-host": host, "forwarded": f"host={host}", "x-worker": other.url}
        body = {"prompt": "x", "worker": other.url, "base_url": other.url}
        assert (await before.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    assert (other.asked, len(worker.asked)) == ([], 1)


async def test_a_query_that_is_no_query_is_refused() -> None:
    worker = FakeWorker("w0", says("x"))
    async with fleet(worker) as before:
        said = await send(
            before,
            HEAD.replace(b"ons ", b"ons?a=\xc3\xa4 ")
            + b"connection: close\r\ncontent-length: 14\r\n\r\n"
            + BODY,
        )
    assert said.startswith(b"HTTP/1.1 400")
    assert not worker.asked


async def test_the_limits_of_a_server_are_a_router_s_too() -> None:
    server = ServerConfig(body_limit=1000, max_headers=10, max_header_bytes=4096)
    async with fleet(FakeWorker("w0", says("x")), server=server) as before:
        assert (await before.ask("y" * 2000)).status_code == 413
        found = await before.http.get("/health", headers={f"x-{n}": "1" for n in range(20)})
        assert found.status_code == 431
        found = await before.http.get("/health", headers={"x": "y" * 5000})
        assert found.status_code == 431
        found = await before.http.post(
            "/v1/completions", content=b"x", headers={"content-type": "text/plain"}
        )
        assert found.status_code == 415


async def test_keys_are_isolated_by_a_salt_that_a_client_cannot_choose() -> None:
    worker = FakeWorker("w0", says("x"))
    owners = {key: tenant(key.encode()) for key in ("one", "two")}
    async with fleet(worker, server=ISOLATED) as before:
        for key in ("one", "two"):
            forged = json.dumps([owners["two"], None])
            for body in (b'{"prompt":"%s"}' % (b"p" * 640), json.dumps({"cache_salt": forged}).encode()):
                await before.http.post(
                    "/v1/completions", content=body,
                    headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
                )  # fmt: skip
        salts = [json.loads(json.loads(asked.body)["cache_salt"]) for asked in worker.asked]
        assert [(owner, given is None) for owner, given in salts] == [
            (owners["one"], True), (owners["one"], False), (owners["two"], True), (owners["two"], False)
        ]  # fmt: skip
        assert [outcome.decision.found.total for outcome in before.pool.desk.recent] == [0] * 4
        wrong = await before.http.post(
            "/v1/completions", content=b"[1]",
            headers={"authorization": "Bearer one", "content-type": "application/json"},
        )  # fmt: skip
        assert wrong.status_code == 400


def test_the_salt_is_added_to_every_form_of_a_body() -> None:
    for body in (b"{}", b" { } \n", b'{"a":1}', b'{"a": {"b": 2} }', b'{"cache_salt":"mine","a":[]}'):
        value = json.loads(salted(body, "owner"))
        assert json.loads(value.pop("cache_salt"))[0] == "owner"
        given = json.loads(body)
        given.pop("cache_salt", None)
        assert value == given
    for body in (b"", b"[]", b"{", b'{"cache_salt": 1}'):
        with pytest.raises(ApiError):
            salted(body, "owner")


async def test_a_worker_s_certificate_is_checked(tmp_path: Path) -> None:
    authority = trustme.CA()
    names = {"ssl_certfile": tmp_path / "cert", "ssl_keyfile": tmp_path / "key"}
    issued = authority.issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(names["ssl_certfile"])
    issued.private_key_pem.write_to_path(names["ssl_keyfile"])
    authority.cert_pem.write_to_path(tmp_path / "ca")
    worker = FakeWorker("w0", says("x"))
    async with serving(worker, **names) as (url, _):
        url = url.replace("http:", "https:")
        async with routing(f"{url},ca={tmp_path / 'ca'}") as before:
            assert (await before.ask()).status_code == 200
        async with routing(url) as before:
            assert (await before.ask()).status_code == 503
            assert any("certificate verify failed" in line for line in before.said)
    assert len(worker.asked) == 1


async def test_unknown_routes_and_methods_have_openai_s_shape() -> None:
    async with fleet(FakeWorker("w0", says("x"))) as before:
        found = await before.http.get("/nope")
        assert (found.status_code, found.json()["error"]["code"]) == (404, "not_found")
        found = await before.http.get("/v1/completions")
        assert (found.status_code, found.headers["allow"]) == (405, "POST")
        assert (await before.http.head("/metrics")).status_code == 200
        found = await before.http.put("/workers")
        assert (found.status_code, found.headers["allow"]) == (405, "GET, HEAD, POST")

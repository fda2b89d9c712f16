"""API keys, cross-origin answers and tenants (rule 52)."""

from __future__ import annotations

import logging
from pathlib import Path

import httpx
import pytest

from hotprefix.errors import ConfigError
from hotprefix.server.app import create_app
from hotprefix.server.config import ServerConfig, key_digest
from tests.support.server import BytesText, FakeEngine, chat, client

KEY, OTHER = "sk-first-key-äö", "sk-second"
CONFIG = ServerConfig(key_digests=ServerConfig.digests([KEY, OTHER]), isolate_keys=True)
ROUTES = [
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/fake", "/tokenize", "/detokenize",
    "/metrics", "/server_info", "/flush_cache", "/reset_prefix_cache", "/version", "/nope", "/live.json",
    "/live.json/", "/v1", "/health/", "/v1//health", "/Health",
]  # fmt: skip
WRONG = [
    None, "", "Bearer", "Bearer ", "Bearer sk", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY,
    f"Bearer {KEY} {KEY}", f"Bearer {KEY.upper()}",
]  # fmt: skip


def bearer(value: str | None) -> dict[str, bytes]:
    return {} if value is None else {"authorization": value.encode()}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "PUT", "DELETE", "PATCH"])
async def test_case_151_every_route_needs_a_key(route: str, method: str) -> None:
    engine = FakeEngine()
    async with client(engine, CONFIG) as http:
        for value in WRONG:
            answer = await http.request(method, route, json=chat(), headers=bearer(value))
            assert answer.status_code == 401, (value, answer.status_code)
            assert method == "HEAD" or answer.json()["error"]["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in (KEY, OTHER):
            answer = await http.request(method, route, json=chat(), headers=bearer(f"bearer {key}"))
            assert answer.status_code != 401
    assert all(request.salt for request in engine.seen)


@pytest.mark.parametrize("route", [*ROUTES, "/health"])
async def test_case_151_options_is_204_without_a_key(route: str) -> None:
    async with client(FakeEngine(), CONFIG) as http:
        answer = await http.options(route, headers={"origin": "http://localhost:3000"})
    assert (answer.status_code, answer.content) == (204, b"")
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "authorization" in answer.headers["access-control-allow-headers"]


async def test_the_page_needs_no_key_and_nothing_else_at_its_place() -> None:
    async with client(FakeEngine(), CONFIG) as http:
        for method in ("GET", "HEAD"):
            assert (await http.request(method, "/")).status_code == 200
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await http.request(method, "/")).status_code == 401


async def test_health_needs_no_key() -> None:
    async with client(FakeEngine(), CONFIG) as http:
        for route in ("/health", "/readyz", "/livez"):
            assert (await http.get(route)).status_code == 200
            assert (await http.head(route)).status_code == 200


async def test_other_sites_may_not_read_answers() -> None:
    async with client(FakeEngine()) as http:
        for origin in ("https://evil.example", "http://localhost.evil.example", "null"):
            answer = await http.get("/v1/models", headers={"origin": origin})
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
        answer = await http.get("/v1/models", headers={"origin": "http://127.0.0.1:5000"})
        assert answer.headers["access-control-allow-origin"] == "http://127.0.0.1:5000"
        assert answer.headers["vary"] == "origin"
    async with client(FakeEngine(), ServerConfig(cors_origin=".*")) as http:
        answer = await http.get("/v1/models", headers={"origin": "https://any.example"})
        assert answer.headers["access-control-allow-origin"] == "https://any.example"


async def test_a_key_is_in_no_log_answer_or_setting(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(FakeEngine(), CONFIG, BytesText())
    with caplog.at_level(logging.DEBUG):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            info = await http.get("/server_info", headers=bearer(f"Bearer {KEY}"))
            metrics = await http.get("/metrics", headers=bearer(f"Bearer {KEY}"))
            refused = await http.get("/server_info", headers=bearer(f"Bearer {KEY}x"))
    for place in (caplog.text, info.text, metrics.text, refused.text, repr(CONFIG)):
        assert KEY not in place
        assert KEY[:10] not in place
    assert info.status_code == 200


async def test_isolated_keys_have_their_own_namespaces() -> None:
    engine = FakeEngine()
    async with client(engine, CONFIG) as http:
        for key, fields in ((KEY, {}), (OTHER, {}), (KEY, {"cache_salt": "a"}), (KEY, {})):
            await http.post("/v1/chat/completions", json=chat(**fields), headers=bearer(f"Bearer {key}"))
    salts = [request.salt for request in engine.seen]
    assert len(set(salts)) == 3
    assert salts[0] == salts[3]
    assert not any(KEY in (salt or "") for salt in salts)
    shared = ServerConfig(key_digests=CONFIG.key_digests)
    engine = FakeEngine()
    async with client(engine, shared) as http:
        await http.post("/v1/chat/completions", json=chat(), headers=bearer(f"Bearer {KEY}"))
    assert engine.seen[0].salt is None


async def test_request_ids_are_echoed_unless_they_could_do_harm() -> None:
    async with client(FakeEngine()) as http:
        assert (await http.get("/health", headers={"x-request-id": "abc-1"})).headers[
            "x-request-id"
        ] == "abc-1"
        for odd in ("", "a b", "x" * 200):
            assert (await http.get("/health", headers={"x-request-id": odd})).headers["x-request-id"] not in (
                "",
                odd,
            )


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\n\n  {KEY}  \n{OTHER}\n", encoding="utf-8")
    assert ServerConfig.keys_from_file(path) == CONFIG.key_digests
    path.write_text("# none\n\n", encoding="utf-8")
    for bad in (path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match="api key file"):
            ServerConfig.keys_from_file(bad)


def test_the_internal_key_is_the_one_key_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"# ours\n {KEY} \n", encoding="utf-8")
    assert ServerConfig.internal_from_file(path) == key_digest(KEY.encode())
    for text in ("# none\n", f"{KEY}\n{OTHER}\n"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match="internal key file") as refused:
            ServerConfig.internal_from_file(path)
        assert refused.value.param == "internal_key_file"
        assert OTHER not in str(refused.value)
    assert KEY not in repr(ServerConfig(internal_digest=key_digest(KEY.encode())))

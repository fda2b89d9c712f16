"""A web page that somebody visits cannot use the server on that person's machine."""

from __future__ import annotations

import socket

import pytest

from hotprefix.server.config import ServerConfig
from tests.support.server import FakeEngine, chat, client

CHAT = "/v1/chat/completions"
LOCAL = ServerConfig()
KEPT_APART = ServerConfig(host="0.0.0.0", allowed_hosts=("llm.example.com", "*.example.org"))
PROXIED = ServerConfig(allowed_hosts=("llm.example.com",))
OPEN = ServerConfig(host="0.0.0.0")
ANY = ServerConfig(allowed_hosts=("*",))

OURS = [
    "localhost", "localhost:8000", "LOCALHOST:80", "localhost.", "127.0.0.1:8000", "[::1]:8000", "[::1]",
    "192.168.1.5:8000", "host.docker.internal:8000", "me.localhost:3000", socket.gethostname(),
]  # fmt: skip
FOREIGN = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil", "",
    "localhost:8000@evil.example", "127.0.0.1.nip.example:8000",
]  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN)
async def test_a_name_that_points_here_is_not_answered(host: str) -> None:
    """DNS rebinding: the page's own name resolves to 127.0.0.1, so its requests are of the same origin."""
    engine = FakeEngine()
    async with client(engine, LOCAL) as http:
        headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        for method, route in (
            ("POST", CHAT),
            ("GET", "/metrics"),
            ("POST", "/flush_cache"),
            ("OPTIONS", CHAT),
        ):
            answer = await http.request(method, route, json=chat(), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_host")
            assert "--allowed-host" in answer.json()["error"]["message"]
    assert not engine.seen


@pytest.mark.parametrize("host", OURS)
async def test_addresses_and_local_names_are_answered(host: str) -> None:
    async with client(FakeEngine(), LOCAL) as http:
        assert (await http.post(CHAT, json=chat(), headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    ("config", "host", "status"),
    [(OPEN, "evil.example", 200), (ANY, "evil.example", 200), (KEPT_APART, "evil.example", 403),
     (KEPT_APART, "llm.example.com:443", 200), (KEPT_APART, "a.b.example.org", 200),
     (KEPT_APART, "example.org", 403), (PROXIED, "llm.example.com", 200), (PROXIED, "localhost", 200),
     (PROXIED, "evil.example", 403)],
)  # fmt: skip
async def test_names_are_a_setting(config: ServerConfig, host: str, status: int) -> None:
    async with client(FakeEngine(), config) as http:
        assert (await http.get("/health", headers={"host": host})).status_code == status


async def test_two_host_headers_are_refused() -> None:
    async with client(FakeEngine(), LOCAL) as http:
        answer = await http.get("/health", headers=[("host", "localhost"), ("host", "evil.example")])
        assert answer.status_code == 400


PAGES = [
    {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}, {"origin": "null"},
    {"origin": "https://evil.example"}, {"origin": "http://localhost.evil.example"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
]  # fmt: skip


@pytest.mark.parametrize("headers", PAGES)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
async def test_a_page_of_another_site_can_neither_generate_nor_flush(
    headers: dict[str, str], kind: str | None
) -> None:
    """What a browser sends for forms, `fetch` with and without CORS, and bodies without a type."""
    engine = FakeEngine()
    sent = headers if kind is None else {**headers, "content-type": kind}
    async with client(engine, LOCAL) as http:
        for route in (CHAT, "/v1/completions", "/tokenize", "/flush_cache", "/reset_prefix_cache"):
            answer = await http.post(route, content=b'{"prompt":"a","messages":[]}', headers=sent)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_origin")
            assert "access-control-allow-origin" not in answer.headers
    assert not engine.seen


LINKED: list[tuple[dict[str, str], int]] = [
    ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
    ({"origin": "https://evil.example"}, 403),
    ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
    ({"sec-fetch-site": "none"}, 200),
    ({"sec-fetch-site": "same-origin"}, 200),
    ({}, 200),
]


@pytest.mark.parametrize(("headers", "status"), LINKED)
async def test_links_to_the_live_page_work_and_embedding_does_not(
    headers: dict[str, str], status: int
) -> None:
    async with client(FakeEngine(), LOCAL) as http:
        assert (await http.get("/", headers=headers)).status_code == status


async def test_pages_of_this_machine_of_the_same_origin_and_of_allowed_origins_may() -> None:
    public = ServerConfig(host="0.0.0.0", cors_origin=r"https://chat\.example\.com")
    cases = [(LOCAL, "localhost:8000", "http://localhost:3000", True),
             (public, "llm.example.com", "https://llm.example.com", True),
             (public, "llm.example.com", "https://chat.example.com", True),
             (public, "llm.example.com", "https://chat.example.com.evil.example", False),
             (public, "llm.example.com", "http://localhost:3000", False)]  # fmt: skip
    for config, host, origin, may in cases:
        async with client(FakeEngine(), config) as http:
            headers = {"host": host, "origin": origin, "sec-fetch-site": "cross-site"}
            answer = await http.post(CHAT, json=chat(), headers=headers)
            assert answer.status_code == (200 if may else 403), (host, origin)

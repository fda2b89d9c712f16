"""Talking to one worker. Owns: `Client`, the connections of a router, and `Upstream`, a worker's end of them.

Rules:
1. Only the URLs of configured workers are ever contacted: a URL is the worker's own and one of the router's
   paths. Redirects are not followed, proxies of the environment are not used, cookies are not kept.
2. What is read is what the worker sent: nothing is decompressed.
3. A resting connection is closed sooner than a usual worker would close it (uvicorn: 5 s), so that no request
   is sent on one that is about to go.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp
import yarl

from hotprefix.errors import ConfigError
from hotprefix.router.worker_spec import WorkerSpec

REST_S = 4.0
AUTO_HEADERS = frozenset({"User-Agent", "Accept", "Accept-Encoding", "Content-Type"})
MOST_LINE, MOST_HEADER = 8190, 32 * 1024


class Client:
    """One session for all workers. Made inside the event loop."""

    def __init__(self, connect_timeout_s: float, silence_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s, sock_read=silence_s)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=REST_S, use_dns_cache=True),
            cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, timeout=self._timeout,
            trust_env=False, raise_for_status=False, max_line_size=MOST_LINE, max_field_size=MOST_HEADER,
            skip_auto_headers=AUTO_HEADERS,
        )  # fmt: skip

    async def close(self) -> None:
        await self.session.close()


class Upstream:
    """One worker's end. kind: what it is, as far as is known. Raises ConfigError if its certificate authority
    cannot be read."""

    def __init__(self, client: Client, spec: WorkerSpec) -> None:
        self._session, self._base, self.kind, self.url = client.session, spec.url, spec.kind, spec.url
        self._ssl = _context(spec)
        self._headers = {} if spec.key is None else {"Authorization": f"Bearer {spec.key}"}
        self._urls: dict[str, yarl.URL] = {}

    def request(
        self, method: str, path: str, query: str = "", data: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:  # fmt: skip
        """aiohttp's request context. path: one of the router's own. query: without its question mark.
        headers: those of the request; the worker's own key goes with them."""
        url = self._urls.get(path)
        if url is None:
            url = self._urls[path] = yarl.URL(self._base + path, encoded=True)
        if query:
            url = yarl.URL(f"{self._base}{path}?{query}", encoded=True)
        sent: Mapping[str, str] = self._headers if headers is None else headers
        if headers is not None and self._headers:
            sent = {**headers, **self._headers}
        return self._session.request(
            method, url, data=data, headers=sent, allow_redirects=False, ssl=self._ssl
        )


def _context(spec: WorkerSpec) -> ssl.SSLContext | bool:
    if spec.ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=spec.ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"worker {spec.name}: ca={spec.ca}: {error}", param="workers") from error

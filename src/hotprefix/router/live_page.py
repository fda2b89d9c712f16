"""The live page of the router. Owns: `/` (server/page.py), and `/live.json`, what it shows.

Rules:
1. The data are the view of state.py, and the hot prefixes with those who have them. They are made at most
   once every `FRESH_S`, however many pages are open.
2. A prefix is shown by a digest whose key is drawn at each start, so it tells nothing of the text, not even
   to a reader that can guess it.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from hotprefix.router.pools import Pool
from hotprefix.router.state import state, trouble
from hotprefix.server.page import Page, data

if TYPE_CHECKING:
    from hotprefix.router.router import Router

FRESH_S = 0.5
RECENT = 25


class LivePage:
    """The two routes."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._page = Page("hotprefix.router")
        self._secret = secrets.token_bytes(16)
        self._shown: dict[str, Any] = {}
        self._made = -math.inf

    async def page(self, request: Request) -> Response:
        return self._page.response()

    async def data(self, request: Request) -> Response:
        now = self._router.clock()
        if now - self._made >= FRESH_S:
            self._made, self._shown = now, self._view()
        return data(self._shown)

    def _view(self) -> dict[str, Any]:
        why, found = trouble(self._router), state(self._router)
        found |= {"ok": why is None, "state": why}
        for pool in found["pools"]:
            pool["recent"] = pool["recent"][:RECENT]
            pool["hottest"] = self._hottest(self._router.pools.all[pool["model"]])
        return found

    def _hottest(self, pool: Pool) -> list[dict[str, Any]]:
        """Positions in tokens."""
        size = pool.page_size
        return [
            {"name": self._name(hot.key), "parent": hot.parent, "start": hot.start * size,
             "stop": hot.stop * size, "requests": hot.requests, "holders": hot.holders}
            for hot in pool.desk.fleet.hottest()
        ]  # fmt: skip

    def _name(self, key: int) -> str:
        return hashlib.blake2b(key.to_bytes(8, "big"), key=self._secret, digest_size=8).hexdigest()

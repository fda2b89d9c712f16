"""Pages that show what a server has. Owns: `Page`, one static page that loads nothing from elsewhere.

Rules: every page is static/page.html (style, key, polling) around cards and a script of its own. It holds
nothing worth guarding and needs no key; its data, /live.json, need one like every other route. A content
security policy lets the page run its own script and style only, and talk to its own server only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

from starlette.responses import JSONResponse, Response


class Page:
    """The page whose own part is static/live.html of this package: cards, then their script."""

    def __init__(self, package: str) -> None:
        shared, own = (files(name).joinpath("static") for name in ("hotprefix.server", package))
        cards, _, script = own.joinpath("live.html").read_text("utf-8").partition("<script>\n")
        page = shared.joinpath("page.html").read_text("utf-8").replace("<!-- cards -->\n", cards)
        self._page = page.replace("/* script */\n", script.partition("</script>")[0]).encode()
        self._headers = {"content-security-policy": policy(self._page), "cache-control": "no-cache",
                         "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}  # fmt: skip

    def response(self) -> Response:
        """The page itself."""
        return Response(self._page, media_type="text/html; charset=utf-8", headers=self._headers)


def data(found: dict[str, Any]) -> Response:
    """What the page shows."""
    return JSONResponse(found, headers={"cache-control": "no-store"})


def policy(page: bytes) -> str:
    """The content security policy for the page's own inline script and style."""
    allowed = {}
    for kind in (b"script", b"style"):
        found = re.search(b"<" + kind + b">(.*?)</" + kind + b">", page, re.DOTALL)
        assert found is not None
        allowed[kind] = base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{allowed[b'script']}'; "
        f"style-src 'sha256-{allowed[b'style']}'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )

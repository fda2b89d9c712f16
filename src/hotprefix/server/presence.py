"""Working for a client as long as it is there. Owns: `while_there`.

Rules: it is only for a request whose body has been read to its end, because then the one message that may
still come says that the client has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. If the client leaves first, `work` is cancelled and ClientDisconnect raised."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

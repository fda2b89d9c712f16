"""Interrupting what a request waits for. Owns: `Call`, the task of one client's request, and why it was
stopped.

Rules: a task is only ever cancelled through its call while the call is open, and whoever catches the
cancellation learns from `why` whether it was the client that left, or the worker that went silent. A
cancellation that came from elsewhere, too, goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from starlette.types import Receive


class Why(StrEnum):
    """CLIENT_LEFT: there is none to answer. WORKER_SILENT: its worker counts as gone."""

    CLIENT_LEFT = "client_left"
    WORKER_SILENT = "worker_silent"


class Call:
    """See the module's rules. Made in the task that it stands for. left: the client has. giving: the client
    is given bytes, which an interruption would lose."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.why: Why | None = None
        self.left = self.giving = False

    def interrupt(self, why: Why) -> None:
        """Stop what the task waits for. A second reason changes nothing."""
        if self.why is None:
            self.why = why
            self._task.cancel()

    def caught(self, why: Why) -> bool:
        """Called with a CancelledError in hand: whether it is this interruption and no other. Then the task
        goes on, unless the client has left meanwhile: then it is interrupted again."""
        if self.why is not why:
            return False
        if self._task.uncancel():
            return False
        self.why = None
        if self.left and why is not Why.CLIENT_LEFT:
            self.interrupt(Why.CLIENT_LEFT)
        return True

    @contextmanager
    def watching(self, receive: Receive) -> Iterator[None]:
        """Within this context the task is interrupted when the client leaves. The request's body has been
        read to its end."""
        gone = asyncio.ensure_future(self._until_gone(receive))
        try:
            yield
        finally:
            gone.cancel()

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self.interrupt(Why.CLIENT_LEFT)

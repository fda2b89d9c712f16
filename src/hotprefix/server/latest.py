"""What the engine answered last. Owns: `Latest`, behind routes that are asked often.

Rules: however many ask, the engine is asked at most once every `fresh_s` seconds. No route waits for a busy
engine longer than `wait_s`: after that it gets the last answer, with its age.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from hotprefix.errors import HotprefixError

T = TypeVar("T")


class Latest(Generic[T]):
    """The answers to one question.

    ask: asks it; raises HotprefixError if the engine is gone, which then has no answer.
    clock: seconds, monotonic.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[T]], fresh_s: float, wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._ask_for, self._fresh_s, self._wait_s, self._clock = ask, fresh_s, wait_s, clock
        self._answer: T | None = None
        self._taken = 0.0
        self._asked = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def get(self) -> tuple[T, float] | None:
        """(the answer, how many seconds ago it came); None if there is none."""
        if self._asking is None and self._clock() - self._asked >= self._fresh_s:
            self._asked = self._clock()
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait((self._asking,), timeout=self._wait_s)
        return None if self._answer is None else (self._answer, self._clock() - self._taken)

    async def _ask(self) -> None:
        try:
            self._answer = await self._ask_for()
            self._taken = self._clock()
        except HotprefixError:
            self._answer = None  # an engine that is gone has no numbers
        finally:
            self._asking = None

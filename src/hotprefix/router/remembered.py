"""What was worked out before. Owns: `Remembered`, a bounded memory of results.

Rules: two generations. What is asked for goes into the young one; when that is full it becomes the old one,
and the old one is forgotten. So what is asked for often stays, at the cost of one look-up. Results may be
asked for and entered from several threads; at worst one is worked out twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """limit: what all entries together may weigh, about. weigh: bytes of an entry."""

    def __init__(self, limit: int, weigh: Callable[[K, V], int]) -> None:
        self._half, self._weigh = limit // 2, weigh
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}
        self._weight = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def get(self, key: K) -> V | None:
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: K, value: V) -> None:
        with self._lock:
            if key in self._young:
                return
            self._young[key] = value
            self._weight += self._weigh(key, value)
            if self._weight > self._half:
                self._old, self._young, self._weight = self._young, {}, 0

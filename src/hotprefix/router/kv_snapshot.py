"""What a worker has cached, read page by page. Owns: `whole_snapshot`.

Rules: all pages of one snapshot have one number and one incarnation. If the worker moves on too far while
they are read, they are read again. Anything of another form is refused as a whole.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from hotprefix.fleet.records import Batch, Change
from hotprefix.router.foreign_keys import shelf_of

PAGES_AT_ONCE = 16_384
MOST_PAGES = 1 << 23
TRIES = 3

Snapshot = Callable[[int, int], Awaitable[Mapping[str, Any]]]
"""(cursor, limit) -> one page of a snapshot: number (of the last batch that it covers, -1 = none), pages
(keys), medium, cursor (of the next page, null = this is the last), incarnation."""


async def whole_snapshot(page_at: Snapshot) -> Batch:
    """All that a worker has. Raises ValueError, KeyError or TypeError for what is no snapshot, and what
    `page_at` raises."""
    for _ in range(TRIES):
        batch = await _read(page_at)
        if batch is not None:
            return batch
    raise ValueError(f"it changed {TRIES} times while it was read")


async def _read(page_at: Snapshot) -> Batch | None:
    """None if the worker has moved on."""
    found: dict[str, list[int]] = {}
    head: tuple[int, int | None] | None = None
    cursor, count = 0, 0
    while count <= MOST_PAGES:
        try:
            page = await page_at(cursor, PAGES_AT_ONCE)
        except Exception:
            if cursor == 0:
                raise
            return None  # it forgets old snapshots
        life = page["incarnation"]
        told = _whole(page["number"]), None if life is None else _whole(life)
        if head is not None and head != told:
            return None
        head = told
        keys = _keys(page["pages"])
        found.setdefault(str(page["medium"]), []).extend(keys)
        count += len(keys)
        following = page["cursor"]
        if following is None:
            changes = tuple(Change(shelf_of(medium), tuple(keys)) for medium, keys in found.items())
            return Batch(told[0], changes, None, told[1])
        if _whole(following) <= cursor:
            raise ValueError(f"after cursor {cursor} comes {following}")
        cursor = following
    raise ValueError(f"it has more than {MOST_PAGES} pages")


def _keys(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(key) is int and 0 <= key < 1 << 63 for key in value):
        raise ValueError("pages: a list of 63-bit numbers is expected")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or value < -1:
        raise ValueError(f"{value!r}: a whole number is expected")
    return value

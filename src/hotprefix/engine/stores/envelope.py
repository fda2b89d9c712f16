"""What is written around a page's bytes. Owns: `pack`, `unpack`, `checked` and the envelope's layout.

Rules: a payload comes out of `unpack` only if every byte of header and payload is what `pack` wrote for
that very key; anything else raises `PageError` with its reason. The header is 96 bytes, little endian:

    magic 4 | version 2 | zero 2 | key 32 | parent's key 32 | payload length 8 | checksum 16 | payload

A prefix's first page has no parent: 32 zeros. Every store keeps the pages of each version under a name that
contains the version. So a page whose header gives another version is damaged. The checksum is XXH3-128 over
the payload and the part of the header before the checksum. It finds accidents (torn writes, bad disks,
swapped files) at memory speed; a cryptographic digest would cost more than reading the page. It does not
protect against an attacker who can write to the store: whatever can write to a cache is trusted.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_128

from hotprefix.engine.stores.base import KEY_BYTES
from hotprefix.engine.stores.errors import PageError, Reason

VERSION = 2
MAGIC = b"hPKV"
_HEAD = struct.Struct("<4sHH32s32sQ")
_DIGEST_BYTES = 16
_NO_PARENT = bytes(KEY_BYTES)
HEADER_BYTES = _HEAD.size + _DIGEST_BYTES


def pack(key: bytes, payload: bytes, parent: bytes | None = None) -> bytes:
    """The wrapped page, `HEADER_BYTES` longer than the payload. parent: the key of the page before it, None
    for a prefix's first. Raises ValueError for a bad key."""
    above = _NO_PARENT if parent is None else parent
    for name in (key, above):
        if len(name) != KEY_BYTES:
            raise ValueError(f"a page key has {KEY_BYTES} bytes, got {len(name)}")
    head = _HEAD.pack(MAGIC, VERSION, 0, key, above, len(payload))
    return b"".join((head, _digest(head, payload), payload))


def parent_of(data: bytes) -> bytes | None:
    """The parent's key in a wrapped page or in its first `HEADER_BYTES`. None for a prefix's first page, and
    for bytes that are no header of this version."""
    if len(data) < _HEAD.size:
        return None
    magic, version, _, _, parent, _ = _HEAD.unpack_from(data)
    return parent if (magic, version) == (MAGIC, VERSION) and parent != _NO_PARENT else None


def unpack(key: bytes, data: bytes) -> bytes:
    """The payload wrapped for `key`. Raises PageError with the reason truncated, corrupted, foreign_version,
    wrong_length (there are bytes after the payload) or wrong_key (an intact page of another key)."""
    if len(data) < HEADER_BYTES:
        raise PageError(Reason.TRUNCATED, f"{len(data)} bytes are less than a header of {HEADER_BYTES}")
    magic, version, _, owner, _, length = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise PageError(Reason.CORRUPTED, f"a page starts with {MAGIC!r}, found {magic!r}")
    if version != VERSION:
        raise PageError(Reason.FOREIGN_VERSION, f"page format {version}, this engine reads {VERSION}")
    actual = len(data) - HEADER_BYTES
    if actual < length:
        raise PageError(Reason.TRUNCATED, f"the page has {actual} of {length} bytes")
    if actual > length:
        raise PageError(Reason.WRONG_LENGTH, f"the page has {actual} bytes instead of {length}")
    view = memoryview(data)
    payload = view[HEADER_BYTES:]
    if _digest(view[: _HEAD.size], payload) != view[_HEAD.size : HEADER_BYTES]:
        raise PageError(Reason.CORRUPTED, "the page does not have the checksum it was written with")
    if owner != key:
        raise PageError(Reason.WRONG_KEY, f"the page belongs to key {owner.hex()}, not {key.hex()}")
    return bytes(payload)


def checked(key: bytes, found: bytes | PageError | None, page_bytes: int) -> bytes:
    """The payload in what a store gave for `key`. Raises PageError: the store's own if it gave one, missing
    if it gave None, else as `unpack` does; also if the payload is not `page_bytes` long."""
    if found is None:
        raise PageError(Reason.MISSING, "not there")
    if isinstance(found, PageError):
        raise found
    payload = unpack(key, found)
    if len(payload) != page_bytes:
        raise PageError(Reason.WRONG_LENGTH, f"a page has {page_bytes} bytes, found {len(payload)}")
    return payload


def _digest(head: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    checksum = xxh3_128(head)
    checksum.update(payload)
    return checksum.digest()

"""What is written around a page's bytes. Owns: `pack`, `unpack` and the frame's layout.

Rules: a payload comes out of `unpack` only if every byte of header and payload is what `pack` wrote for
that very key; anything else raises `PageError` with its reason. The header is 64 bytes, little endian:

    magic 4 | version 2 | reserved 2 (zero) | key 32 | payload length 8 | checksum 16 | payload

The checksum is XXH3-128 over the header before it and the payload. It finds accidents (torn writes, bad
disks, swapped files), at memory speed: a cryptographic digest would cost more than reading the page.
It does not stop somebody who may write to the store: whoever can is trusted, as with any cache.
"""

from __future__ import annotations

import struct

from xxhash import xxh3_128

from hotprefix.engine.stores.base import KEY_BYTES
from hotprefix.engine.stores.errors import PageError, Reason

VERSION = 1
MAGIC = b"hPKV"
_HEAD = struct.Struct("<4sHH32sQ")
_DIGEST_BYTES = 16
HEADER_BYTES = _HEAD.size + _DIGEST_BYTES


def pack(key: bytes, payload: bytes) -> bytes:
    """The framed page, `HEADER_BYTES` longer than the payload. Raises ValueError for a bad key."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"a page key has {KEY_BYTES} bytes, got {len(key)}")
    head = _HEAD.pack(MAGIC, VERSION, 0, key, len(payload))
    return b"".join((head, _digest(head, payload), payload))


def unpack(key: bytes, data: bytes) -> bytes:
    """The payload framed for `key`. Raises PageError: truncated, corrupted, foreign_version,
    wrong_length (bytes behind the end) or wrong_key (a sound page of another key)."""
    if len(data) < HEADER_BYTES:
        raise PageError(Reason.TRUNCATED, f"{len(data)} bytes are less than a header of {HEADER_BYTES}")
    magic, version, _, owner, length = _HEAD.unpack_from(data)
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


def _digest(head: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    checksum = xxh3_128(head)
    checksum.update(payload)
    return checksum.digest()

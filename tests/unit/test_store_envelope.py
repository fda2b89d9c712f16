"""Envelopes: what comes out is what went in for that key, or an error with the right reason."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from hotprefix.engine.stores.envelope import HEADER_BYTES, VERSION, pack, parent_of, unpack
from hotprefix.engine.stores.errors import PageError, Reason

KEY = bytes(range(32))
PARENT = bytes(range(100, 132))
PAYLOAD = bytes(range(256)) * 3


def reason_of(data: bytes, key: bytes = KEY) -> Reason:
    with pytest.raises(PageError) as caught:
        unpack(key, data)
    return caught.value.reason


@given(st.binary(max_size=3000), st.binary(min_size=32, max_size=32))
def test_a_page_comes_back_whole(payload: bytes, key: bytes) -> None:
    assert unpack(key, pack(key, payload)) == payload


def test_the_layout_is_fixed() -> None:
    """Another process, release or hash seed writes and reads the same bytes (rule 32)."""
    wrapped = pack(KEY, b"abc", PARENT)
    assert wrapped[:8] == b"hPKV\x02\x00\x00\x00"
    assert wrapped[8:80] == KEY + PARENT + struct.pack("<Q", 3)
    assert wrapped[80:96] == xxh3_128(wrapped[:80] + b"abc").digest()
    assert wrapped[80:96].hex() == "b8325fe3d35eeecec8a651a9066ecefd"
    assert wrapped[96:] == b"abc"


def test_an_envelope_tells_the_page_before_it() -> None:
    assert parent_of(pack(KEY, PAYLOAD, PARENT)) == PARENT
    assert parent_of(pack(KEY, PAYLOAD, PARENT)[:HEADER_BYTES]) == PARENT
    assert parent_of(pack(KEY, PAYLOAD)) is None
    assert [parent_of(data) for data in (b"", b"short", bytes(200), b"JUNK" * 50)] == [None] * 4


def test_every_flipped_bit_of_every_byte_is_found() -> None:
    wrapped = pack(KEY, PAYLOAD)
    for position in range(len(wrapped)):
        for bit in range(8):
            data = bytearray(wrapped)
            data[position] ^= 1 << bit
            with pytest.raises(PageError):
                unpack(KEY, bytes(data))


def test_every_truncation_is_found() -> None:
    wrapped = pack(KEY, PAYLOAD)
    assert {reason_of(wrapped[:length]) for length in range(len(wrapped))} == {Reason.TRUNCATED}


@given(st.data())
def test_any_overwritten_region_is_found(data: st.DataObject) -> None:
    wrapped = pack(KEY, PAYLOAD)
    start = data.draw(st.integers(0, len(wrapped) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=len(wrapped) - start))
    damaged = wrapped[:start] + junk + wrapped[start + len(junk) :]
    if damaged == wrapped:
        return
    with pytest.raises(PageError):
        unpack(KEY, damaged)


@given(st.binary(max_size=400))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PageError):
        unpack(KEY, data)


def test_each_damage_has_its_reason() -> None:
    wrapped = pack(KEY, PAYLOAD)
    newer = wrapped[:4] + struct.pack("<H", VERSION + 1) + wrapped[6:]
    assert reason_of(newer) is Reason.FOREIGN_VERSION
    assert reason_of(wrapped, key=bytes(32)) is Reason.WRONG_KEY
    assert reason_of(wrapped + b"x") is Reason.WRONG_LENGTH
    assert reason_of(b"JUNK" + wrapped[4:]) is Reason.CORRUPTED
    assert reason_of(wrapped[:-1] + b"\x00") is Reason.CORRUPTED
    assert reason_of(wrapped[: HEADER_BYTES - 1]) is Reason.TRUNCATED


def test_a_page_of_zeros_is_not_a_page() -> None:
    """A file system may leave such a file after a power loss."""
    assert reason_of(bytes(HEADER_BYTES + len(PAYLOAD))) is Reason.CORRUPTED


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, got 3"):
        pack(b"abc", PAYLOAD)

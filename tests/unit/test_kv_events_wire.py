"""KV events on the wire: byte for byte what vLLM 0.32 sends, as recorded (tests/fixtures/vllm-0.32)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from hotprefix.errors import InputError
from hotprefix.records.kvevents import END, KVPublisher, PageEvents
from hotprefix.records.kvwire import (
    Batch,
    Cleared,
    Form,
    Medium,
    PageEvent,
    Removed,
    Stored,
    from_wire,
    to_wire,
)
from tests.support.drive import Driver

FOLDER = Path(__file__).parents[1] / "fixtures" / "vllm-0.32"


def frames(name: str) -> list[list[bytes]]:
    lines = (FOLDER / name).read_text().splitlines()
    return [[bytes.fromhex(frame) for frame in json.loads(line)["frames"]] for line in lines]


RECORDED = frames("kv_events.jsonl")
decode, encode = msgspec.msgpack.decode, msgspec.msgpack.encode


# -- theirs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", RECORDED, ids=lambda m: f"number-{int.from_bytes(m[1], 'big')}")
def test_read_and_written_again_a_recorded_batch_is_the_same_bytes(message: list[bytes]) -> None:
    assert encode(to_wire(from_wire(decode(message[2])))) == message[2]


def test_what_a_recorded_batch_says() -> None:
    first, more, salted, evicting, reset = (from_wire(decode(message[2])) for message in RECORDED)
    assert (first.ts, first.rank) == (1796076438.179126, 0)
    (prompt,) = first.events
    assert isinstance(prompt, Stored)
    assert (len(prompt.hashes), prompt.parent, prompt.page_size) == (7, None, 32)
    assert prompt.hashes[:2] == (2542775367564046161, 18434453451795193578)
    assert len(prompt.tokens) == 7 * 32
    assert prompt.tokens[:3] == (8034, 10238, 3680)
    assert prompt.extra == (None,) * 7
    assert prompt.medium == Medium.GPU
    (following,) = more.events
    assert isinstance(following, Stored)
    assert following.parent == 5701820893850927910
    (private,) = salted.events
    assert isinstance(private, Stored)
    assert private.extra == (("tenant1",), *(None,) * 6)
    assert private.tokens == prompt.tokens
    assert not set(private.hashes) & set(prompt.hashes)
    assert [type(event) for event in evicting.events] == [Removed] * 4 + [Stored]
    assert [type(event) for event in reset.events] == [Cleared, Stored]


def test_events_as_arrays_byte_hashes_and_unknown_fields_are_read() -> None:
    """As vLLM sent events before they became maps: the values in the same order, trailing ones left out."""
    stored = ["BlockStored", [b"\x01" * 32], None, [1, 2], 2, None, "CPU", None, [["x"]], 0, "full", "new"]
    value = [1.5, [stored, ["BlockStored", [5], 7, [], 2, None], ["BlockRemoved", [5]], ["AllBlocksCleared"]]]
    assert from_wire(value) == Batch(
        1.5,
        (
            Stored((b"\x01" * 32,), None, (1, 2), 2, (("x",),), None, "CPU"),
            Stored((5,), 7, (), 2, (), None, None),
            Removed((5,), None),
            Cleared(),
        ),
        None,
    )
    assert from_wire([1, [{"type": "AllBlocksCleared", "why": "reset"}], 3]) == Batch(1.0, (Cleared(),), 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"ts": 1.0, "events": []}, "a dict is no batch"),
        ([1.0], "a list is no batch"),
        ([1.0, [7], 0], "a int is no event"),
        ([1.0, [{"type": "Stored"}], 0], "type 'Stored': there are"),
        ([1.0, [{"type": "BlockStored", "block_hashes": []}], 0], "BlockStored lacks 'parent_block_hash'"),
    ],
)
def test_what_is_no_batch_is_told(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_wire(value)


# -- ours -------------------------------------------------------------------------------------------


def types(value: Any) -> set[str]:
    """Of a value; of a list also those of what it holds, at any depth."""
    if isinstance(value, list):
        return {"list", *(f"list of {kind}" for held in value for kind in types(held))}
    return {type(value).__name__}


def shape(batches: list[Any]) -> tuple[set[Any], dict[Any, set[str]]]:
    """The keys of each type of event in their order, and the types that each key's value has."""
    keys, found = set(), {}
    for batch in batches:
        ts, events, rank = batch
        for name, value in (("ts", ts), ("rank", rank)):
            found.setdefault(name, set()).update(types(value))
        for event in events:
            keys.add((event["type"], *event))
            for key, value in event.items():
                found.setdefault((event["type"], key), set()).update(types(value))
    return keys, found


def ours() -> list[PageEvent]:
    """A prompt, one that goes on from it, a salted one, evictions, a fresh start."""
    d = Driver(page_size=4, total_pages=12)
    pages = PageEvents(4, b"key", with_tokens=True)
    pages.cleared()
    d.kernel.watch_pages(pages)
    prompt = list(range(17))
    for name, ids, salt in (
        ("a", prompt, None), ("b", [*prompt, *range(8)], None), ("salted", prompt, "tenant1"),
        ("other", list(range(40, 73)), None),
    ):  # fmt: skip
        d.submit(name, ids, 1, salt)
        d.run()
    return pages.take()


def test_our_batches_have_the_shape_of_the_recorded_ones() -> None:
    batch = decode(encode(to_wire(Batch(12.5, tuple(ours())))))
    assert shape([batch]) == shape([decode(message[2]) for message in RECORDED])


def test_arrays_hold_the_values_of_the_maps_in_order() -> None:
    events = tuple(ours())
    maps, arrays = (to_wire(Batch(1.0, events), form) for form in Form)
    assert (maps[0], maps[2]) == (arrays[0], arrays[2]) == (1.0, 0)
    assert [list(event.values()) for event in maps[1]] == arrays[1]
    assert from_wire(decode(encode(arrays))) == from_wire(decode(encode(maps))) == Batch(1.0, events)


# -- frames -----------------------------------------------------------------------------------------


@pytest.fixture
def dealer() -> Iterator[tuple[KVPublisher, zmq.Socket[bytes]]]:
    publisher = KVPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic="kv")
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVTIMEO, 60_000)
    socket.connect(publisher.replay_endpoint or "")
    yield publisher, socket
    context.destroy(linger=0)
    publisher.close()


def test_a_replay_answers_with_the_recorded_frames(dealer: tuple[KVPublisher, zmq.Socket[bytes]]) -> None:
    """The recorded batches published again give the recorded answer, but for their numbers."""
    publisher, socket = dealer
    *wanted, end = frames("replay.jsonl")
    for message in wanted:
        batch = from_wire(decode(message[3]))
        publisher.publish(batch.ts, list(batch.events))
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    got = [socket.recv_multipart() for _ in range(3)]
    assert [m[:2] + m[3:] for m in got[:-1]] == [m[:2] + m[3:] for m in wanted]
    assert [m[2] for m in got[:-1]] == [bytes(8), bytes(7) + b"\x01"]
    assert got[-1] == end
    assert end[2] == END

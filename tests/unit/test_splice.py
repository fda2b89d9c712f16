"""The splice: what a client gets does not depend on how bytes arrive, nothing comes twice or cut, and what
cannot be taken up ends with an error."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from hotprefix.router import splice as module
from hotprefix.router.passage import Passage
from hotprefix.router.splice import Splice

PATH, BODY = "/v1/chat/completions", b' {"stream": true, "messages": []}\n'
HEAD = b':hp {"id":"a-1","created":7,"model":"m","system_fingerprint":"f","prompts":"00"}\n'
BEAT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
COUNTS = b'data: {"choices":[],"usage":{}}\n\n'


def event(text: str, index: int = 0) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": index, "text": text}]}).encode() + b"\n\n"


def mark(index: int, ids: list[int], *, ended: bool = False, cached: int = 0) -> bytes:
    return b":hp " + json.dumps([index, ended, ids, [cached, 0, 0]]).encode() + b"\n"


# Events of two choices; a text that looks like a mark; a comment; the counts; the end.
PARTS = [
    (HEAD, BEAT),
    (mark(0, []), event("")),
    (mark(0, [5, 6]), event("ab")),
    (mark(1, [9], cached=4), event("z", 1)),
    (b"", BEAT),
    (mark(0, [7], cached=16), event(":hp [1]\n:hp \n\n")),
    (mark(1, [], ended=True, cached=4), event("", 1)),
    (mark(0, [8], ended=True, cached=16), event("é")),
    (b"", COUNTS),
    (b"", DONE),
]
STREAM = b"".join(marks + shown for marks, shown in PARTS)
SHOWN = b"".join(shown for _, shown in PARTS)


def fed(splice: Splice, stream: bytes, *cuts: int) -> bytes:
    pieces = itertools.pairwise([0, *sorted(cuts), len(stream)])
    return b"".join(splice.feed(stream[start:stop]) for start, stop in pieces)


def choices(splice: Splice) -> dict[int, tuple[list[int], int, int, bool]]:
    wanted = splice.continuation()
    assert wanted is not None
    assert wanted.path == "/internal/resume"
    value = json.loads(wanted.body)
    assert (value["path"], value["body"]) == (PATH, {"stream": True, "messages": []})
    assert value["head"] == json.loads(HEAD[4:])
    return {c["index"]: (c["ids"], c["events"], c["cached"][0], c["ended"]) for c in value["choices"]}


def test_a_stream_that_does_not_break_comes_without_its_marks() -> None:
    splice = Splice(PATH, BODY)
    assert splice.feed(STREAM) == SHOWN
    assert splice.done
    assert splice.marked
    assert splice.continuation() is None
    assert splice.feed(STREAM) == b""


def test_any_chunking_gives_the_same_bytes() -> None:
    """Every single cut, every chunk size, and many random ones."""
    for cut in range(len(STREAM)):
        assert fed(Splice(PATH, BODY), STREAM, cut) == SHOWN
    for size in range(1, 40):
        assert fed(Splice(PATH, BODY), STREAM, *range(size, len(STREAM), size)) == SHOWN
    r = random.Random(4)
    for _ in range(300):
        cuts = r.sample(range(len(STREAM)), r.randrange(1, 30))
        assert fed(Splice(PATH, BODY), STREAM, *cuts) == SHOWN


def test_an_event_is_passed_on_as_soon_as_it_is_complete() -> None:
    splice, given = Splice(PATH, BODY), b""
    for number, (marks, shown) in enumerate(PARTS):
        assert splice.feed(marks + shown[:-1]) == b""
        passed = splice.feed(shown[-1:])
        given += passed
        assert (passed == shown) is (shown not in (COUNTS, DONE)), number
    assert given == SHOWN


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_after_a_failure_at_any_byte_the_answer_goes_on_behind_the_last_complete_event(size: int) -> None:
    """The engine that goes on is played by the parts behind those that were passed on."""
    for cut in range(len(HEAD) + 1, len(STREAM)):
        splice = Splice(PATH, BODY)
        shown = fed(splice, STREAM[:cut], *range(size, cut, size))
        complete = sum(1 for n in range(len(PARTS)) if len(b"".join(m + s for m, s in PARTS[: n + 1])) <= cut)
        complete -= complete == 9  # the counts wait for the end
        before = PARTS[:complete]
        assert shown == b"".join(s for _, s in before)
        if complete:
            found = choices(splice)
            events = [json.loads(m[4:]) for m, _ in before[1:] if m]
            assert sum(c[1] for c in found.values()) == len(events)
            for index, (ids, count, cached, ended) in found.items():
                own = [e for e in events if e[0] == index]
                assert (ids, count) == ([t for e in own for t in e[2]], len(own))
                assert (ended, cached) == (own[-1][1], own[-1][3][0])
            rest = HEAD + b"".join(m + s for m, s in PARTS[complete:])
            shown += fed(splice, rest, *range(size, len(rest), size))
            assert splice.done
            assert shown == SHOWN


def test_it_may_fail_again_and_again() -> None:
    splice, shown = Splice(PATH, BODY), b""
    for number, (marks, part) in enumerate(PARTS):
        head = b"" if number == 0 else HEAD
        shown += splice.feed(head + marks + part + (PARTS[number + 1][0] if number + 1 < len(PARTS) else b""))
        assert (splice.continuation() is None) is (part == DONE)
        if part == COUNTS:  # it waited for the end, which did not come
            shown += splice.feed(HEAD + COUNTS + DONE)
            break
    assert shown == SHOWN


def test_before_the_first_bytes_there_is_nothing_to_take_up() -> None:
    for cut in range(len(HEAD)):
        splice = Splice(PATH, BODY)
        assert splice.feed(STREAM[:cut]) == b""
        assert not splice.begun
        assert splice.continuation() is None


def test_a_lost_stream_gives_nothing_more() -> None:
    splice = Splice(PATH, BODY)
    good = HEAD + mark(0, [5]) + event("a")
    error = b':hp "lost"\ndata: {"error":{"message":"the engine died"}}\n\n'
    assert splice.feed(good + error + mark(0, [6]) + event("b")) == event("a")
    assert splice.lost == "gave_up"
    assert not splice.done
    assert choices(splice) == {0: ([5], 1, 0, False)}
    assert not splice.lost
    assert splice.feed(HEAD + mark(0, [6], ended=True) + event("b") + DONE) == event("b") + DONE


def test_an_error_that_would_be_the_same_elsewhere_ends_the_answer() -> None:
    splice = Splice(PATH, BODY)
    error = b'data: {"error":{"message":"bad grammar"}}\n\n'
    assert splice.feed(HEAD + mark(0, [5]) + event("a") + error) == event("a") + error
    assert splice.done
    assert splice.continuation() is None


PLAIN: list[bytes] = [
    b"data: {}\n\ndata: [DONE]\n\n", b": hello\n\ndata: {}\n\n", b":hp", b":hq \n\n", b"\r\n\r\n", b"<html>",
    b"\n\n\n", b'data: {"error":{}}\n\ndata: more\n\n', b"event: x\ndata: :hp {}\n\n", b":HP {}\n\n",
    b"\x00\xff\x00", b"",
]  # fmt: skip


@pytest.mark.parametrize("stream", PLAIN)
def test_a_stream_without_marks_goes_the_way_of_any_other(stream: bytes) -> None:
    for size in (1, 3, 100):
        splice, passage = Splice(PATH, BODY), Passage(events=True, must_end=True)
        given, wanted = b"", b""
        for at in range(0, len(stream), size):
            given += splice.feed(stream[at : at + size])
            wanted += passage.feed(stream[at : at + size])
        assert given == wanted
        assert not splice.marked
        assert splice.continuation() is None
        assert (splice.begun, splice.done, splice.lost) == (passage.begun, passage.done, "")
        end = passage.ended()
        assert splice.ended() == end
        assert end is not None or splice.broken("it is gone") == passage.broken("it is gone")


BAD_MARKS = [
    b":hp {\n", b":hp 5\n", b":hp [0,false,[1]]\n", b':hp [0,false,["a"],[0,0,0]]\n', b":hp null\n",
    b":hp [0,false,[1,null],[0,0,0]]\n", b":hp [[],false,[1],[0]]\n", b":hp \xff\n",
    b":hp [0,false,[99999999999999999999],[]]\n", b':hp "found"\n', b":hp \n",
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_MARKS)
def test_a_mark_that_makes_no_sense_loses_the_stream_and_not_the_answer(bad: bytes) -> None:
    splice = Splice(PATH, BODY)
    assert splice.feed(HEAD + mark(0, [5]) + event("a") + bad + event("b")) == event("a")
    assert splice.lost
    assert choices(splice) == {0: ([5], 1, 0, False)}


@pytest.mark.parametrize("stream", [b'{"error": {}}', b"<html>\n\n", b"data: {}\n\n", DONE])
def test_what_is_no_stream_of_an_engine_that_goes_on_is_lost(stream: bytes) -> None:
    splice = Splice(PATH, BODY)
    splice.feed(HEAD + mark(0, [5]) + event("a"))
    assert splice.continuation() is not None
    assert splice.feed(stream) == b""
    assert splice.lost
    assert choices(splice) == {0: ([5], 1, 0, False)}


BAD_EVENTS = [b"\x00garbage\n\n", b"<html></html>\n\n", COUNTS + COUNTS, COUNTS + b"event: x\n\n"]


@pytest.mark.parametrize("bad", BAD_EVENTS)
def test_what_is_no_event_of_an_engine_loses_the_stream_and_not_the_answer(bad: bytes) -> None:
    splice = Splice(PATH, BODY)
    assert splice.feed(HEAD + mark(0, [5]) + event("a") + bad + mark(0, [6]) + event("b")) == event("a")
    assert splice.lost == "garbage"
    assert choices(splice) == {0: ([5], 1, 0, False)}
    rest = mark(0, [6], ended=True) + event("b") + COUNTS + DONE
    assert splice.feed(HEAD + rest) == event("b") + COUNTS + DONE


def test_an_engine_that_cannot_go_on_loses_the_stream_and_not_the_answer() -> None:
    """Comments had to begin its stream, so it could not refuse with a status."""
    splice = Splice(PATH, BODY)
    splice.feed(HEAD + mark(0, [5]) + event("a"))
    error = b'data: {"error":{"message":"other ids here"}}\n\n'
    assert splice.continuation() is not None
    assert splice.feed(HEAD + BEAT + error) == BEAT
    assert splice.lost == "gave_up"
    assert choices(splice) == {0: ([5], 1, 0, False)}
    assert splice.feed(HEAD + mark(0, [6]) + event("b") + error) == event("b") + error
    assert splice.done


def test_an_end_without_done_is_no_end() -> None:
    splice = Splice(PATH, BODY)
    splice.feed(STREAM[: -len(DONE)])
    assert splice.ended() is None
    splice.continuation()
    assert splice.ended() is None
    splice.feed(HEAD + COUNTS + DONE)
    assert splice.ended() == b""


def test_each_stream_begins_with_an_event_of_a_choice() -> None:
    splice = Splice(PATH, BODY)
    splice.feed(HEAD + BEAT)
    assert not splice.begun
    splice.feed(mark(0, [5]) + event("a"))
    assert splice.begun
    splice.continuation()
    assert not splice.begun
    splice.feed(HEAD + BEAT + mark(0, [6]) + event("b"))
    assert splice.begun


def test_a_continuation_says_how_many_outputs_it_has() -> None:
    splice = Splice(PATH, BODY)
    for ids in ([5], [6, 7, 8]):
        splice.feed(HEAD + mark(0, ids) + event("a") + mark(1, ids) + event("a", 1))
        wanted = splice.continuation()
        assert wanted is not None
    assert wanted.outputs == 8


def test_an_answer_that_cannot_be_completed_ends_with_an_error_that_can_be_read() -> None:
    splice = Splice(PATH, BODY)
    shown = splice.feed(HEAD + mark(0, [5]) + event("a") + b"data: {")
    assert splice.continuation() is not None
    last = splice.broken("no engine is left")
    assert last is not None
    assert splice.done
    assert splice.feed(DONE) == b""
    first, second, rest = (shown + last).split(b"\n\n")
    assert (first + b"\n\n", rest) == (event("a"), b"")
    error: dict[str, Any] = json.loads(second.removeprefix(b"data: "))["error"]
    assert error["message"] == "no engine is left; the answer is not complete"
    assert error["code"] == "worker_lost"


def test_a_long_event_passes_through_and_ends_what_can_be_taken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_EVENT_BYTES", 600)
    long = event(":hp " + "x" * 5000)
    stream = HEAD + mark(0, [5]) + event("a") + mark(0, [6]) + long + mark(0, [7]) + event("b") + DONE
    wanted = event("a") + long + event("b") + DONE
    for size in (1, 3, 50, 599, 700):
        splice = Splice(PATH, BODY)
        shown = b""
        for at in range(0, len(stream), size):
            shown += splice.feed(stream[at : at + size])
            assert len(splice._rest) <= 600
        assert shown == wanted
        assert splice.done
    splice = Splice(PATH, BODY)
    shown = splice.feed(stream[:3000]) + splice.feed(stream[3000:3001])
    assert wanted.startswith(shown)
    assert len(shown) > 2500
    assert splice.continuation() is None
    last = splice.broken("it broke off")
    assert last is not None
    assert last.startswith(b"\n\ndata: ")


def test_ids_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_IDS", 10)
    splice = Splice(PATH, BODY)
    stream = HEAD + b"".join(mark(0, [n]) + event(str(n)) for n in range(9))
    assert splice.feed(stream)
    assert choices(splice)[0][1] == 9
    more = b"".join(mark(n, [n]) + event("") for n in range(50))
    assert splice.feed(HEAD + more + DONE) == event("") * 50 + DONE
    assert not splice._sent
    splice._done = False
    assert splice.continuation() is None

"""Stop strings in a stream: found however the text is cut, held exactly as long as they could match."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotprefix.engine.text.stop import StopMatcher


def feed(matcher: StopMatcher, parts: list[str]) -> tuple[list[str], str | None]:
    shown = []
    for part in parts:
        text, stop = matcher.push(part)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "stop"),
    [
        (["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "K"], ["ABC", "", "", "", ""], "DEFGHIJ"),
        (["own fox"], [" br", "own", " fox"], [" br", "", ""], "own fox"),
        (["own fox"], [" br", "own", " dog"], [" br", "", "own dog", ""], None),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""], "aab"),
        (["abc", "b"], ["abc"], ["a"], "b"),
        (["bc", "abc"], ["xabc"], ["x"], "abc"),
        (["ab"], ["xa"], ["x", "a"], None),
        ([], ["xa", ""], ["xa", "", ""], None),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
    ],
)
def test_known_streams(stops: list[str], parts: list[str], shown: list[str], stop: str | None) -> None:
    assert feed(StopMatcher(stops), parts) == (shown, stop)


def test_the_stop_itself_is_shown_on_request() -> None:
    assert feed(StopMatcher(["END"], include=True), ["a", "EN", "Dx"]) == (["a", "", "END"], "END")


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first end of any stop, the longest one there."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=12),
)
def test_any_cut_gives_the_text_before_the_first_stop_and_holds_no_more_than_needed(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    want, stop = naive(text, stops)
    matcher, shown, seen = StopMatcher(stops), "", ""
    for a, b in itertools.pairwise(edges):
        new, found = matcher.push(text[a:b])
        seen += text[a:b]
        shown += new
        if found is not None:
            assert (shown, found) == (want, stop)
            return
        possible = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert shown == seen[: len(seen) - possible]
    assert stop is None
    assert shown + matcher.flush() == text

"""Tokens to text: characters whole, stop strings held, the join equal to decoding at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from text_models import CHATML, default_tokenizer, toy

from hotprefix.engine.params import SamplingParams
from hotprefix.engine.text.detokenizer import Detokenizer
from hotprefix.engine.text.output import OutputText

TOY = toy(CHATML)


def stream(ids: list[int], **params: object) -> tuple[list[str], str | None]:
    output = OutputText(TOY, SamplingParams(**params))  # type: ignore[arg-type]
    shown = []
    for i in ids:
        text, stopped, reason = output.push(i)
        shown.append(text)
        if stopped:
            assert output.flush() == ""
            return shown, reason
    return [*shown, output.flush()], None


def test_characters_are_never_split() -> None:
    assert stream([0xF0, 0x9F, 0x98, 0xB8, 65]) == (["", "", "", "😸", "A", ""], None)
    assert stream([0x80, 65]) == (["\ufffd", "A", ""], None)
    assert stream([65, 0xF0, 0x9F]) == (["A", "", "", "\ufffd"], None)
    assert stream([0xF0, 65]) == (["", "\ufffdA", ""], None)


def test_special_tokens_are_hidden_or_shown() -> None:
    assert stream([65, 258, 66]) == (["A", "", "B", ""], None)
    assert stream([65, 258, 66], skip_special_tokens=False) == (["A", "<|im_end|>", "B", ""], None)
    assert stream([65, 999, 66])[0] == ["A", "", "B", ""]


@given(
    st.lists(st.integers(0, 258) | st.sampled_from([0xF0, 0x9F, 0x98, 0xB8, 0xE2, 0x82]), max_size=40),
    st.booleans(),
)
def test_the_join_equals_decoding_at_once_and_holds_at_most_three_bytes(ids: list[int], skip: bool) -> None:
    shown, _ = stream(ids, skip_special_tokens=skip)
    whole = TOY.decode(ids, skip_special_tokens=skip)
    assert "".join(shown) == whole
    characters = Detokenizer(TOY, skip_special_tokens=skip)
    got = ""
    for n, i in enumerate(ids, 1):
        got += characters.push(i)
        now = TOY.decode(ids[:n], skip_special_tokens=skip)
        assert now.startswith(got)
        assert len(now) - len(got) <= 1


@given(st.text(max_size=60))
def test_the_default_models_text_streams_whole(text: str) -> None:
    tokenizer = default_tokenizer()
    output = OutputText(tokenizer, SamplingParams())
    ids = tokenizer.encode(text)
    assert "".join(output.push(i)[0] for i in ids) + output.flush() == tokenizer.decode(ids)


def test_stop_strings_across_tokens_and_characters() -> None:
    ids = list("x€y".encode())
    assert stream(ids, stop=("€y",)) == (["x", "", "", "", ""], "€y")
    assert stream(ids, stop=("€z",)) == (["x", "", "", "", "€y", ""], None)
    assert stream(ids, stop=("€",), include_stop=True) == (["x", "", "", "€"], "€")
    assert stream([65, 0xF0], stop=("A\ufffd",)) == (["", "", ""], None)


def test_min_tokens_lets_the_first_outputs_pass() -> None:
    ids = list(b"ababab")
    assert stream(ids, stop=("ab",)) == (["", ""], "ab")
    assert stream(ids, stop=("ab",), min_tokens=3, max_tokens=9) == (["a", "b", "", ""], "ab")
    assert stream(ids, stop=("ab",), min_tokens=2, max_tokens=9) == (["a", "b", "", ""], "ab")
    assert stream(ids, stop=("b",), min_tokens=2, max_tokens=9) == (["a", ""], "b")


@given(
    st.lists(st.sampled_from(list("ab€😸".encode())), max_size=30),
    st.lists(st.text("ab€", min_size=1, max_size=3), max_size=3),
    st.integers(0, 8),
)
def test_the_shown_text_never_holds_a_stop_that_counts(
    ids: list[int], stops: list[str], min_tokens: int
) -> None:
    shown, reason = stream(ids, stop=tuple(stops), min_tokens=min_tokens)
    exempt = "".join(shown[: max(min_tokens - 1, 0)])
    counted = "".join(shown)[len(exempt) :] if len(ids) > min_tokens - 1 else ""
    if reason is None:
        assert not any(s in counted for s in stops if "\ufffd" not in counted)
    else:
        assert len(shown) >= min_tokens
        assert not any(s in counted for s in stops)

"""What admission remembers and predicts is what it would find if it tried. A sequence that is known not to
fit does not fit, and whether a sequence would fit is the same with and without a pin on its prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotprefix.kernel.config import Flight, Publication
from hotprefix.kernel.sched.admit import Admission
from hotprefix.kernel.state.sequence import Sequence
from tests.property.test_repeats import ARRIVALS, CONFIGS, Program


def fits_when_pinned(admission: Admission, seq: Sequence) -> bool:
    s = admission._s
    match = s.tables.lookup(seq) if s.config.prefix_cache else None
    if match is None:
        return admission.fits(seq, 0)
    handle = s.l1.tree.pin(match)
    try:
        return admission.fits(seq, match.pages)
    finally:
        s.l1.tree.unpin(handle)


def watched(seen: Counter[str]) -> dict[str, Callable[..., Any]]:
    """`shut` and `attempt`, with their answers checked. seen: counts the answers by kind."""
    shut, attempt = Admission.shut, Admission.attempt

    def checked_shut(self: Admission, seq: Sequence) -> bool:
        found = shut(self, seq)
        if found:
            self._owed_at = (-1, -1, 0.0)
            assert not self._would_fit(seq, self._s.reserve.share)
            seen["shut"] += 1
        return found

    def checked_attempt(self: Admission, seq: Sequence) -> object:
        would = self._would_fit(seq, self._s.reserve.share)
        assert would == fits_when_pinned(self, seq)
        seen[f"fits {would}"] += 1
        return attempt(self, seq)

    return {"shut": checked_shut, "attempt": checked_attempt}


@given(
    config=CONFIGS, arrivals=ARRIVALS, page=st.sampled_from([2, 8, 16]), tokens=st.integers(40, 200),
    same=st.booleans(), prefix_cache=st.sampled_from([True, True, True, False]),
)  # fmt: skip
def test_who_is_known_not_to_fit_does_not_fit(
    config: dict[str, Any], arrivals: list[tuple[Any, ...]], page: int, tokens: int, same: bool,
    prefix_cache: bool,
) -> None:  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, function in watched(Counter()).items():
            patch.setattr(Admission, name, function)
        Program(config | {"prefix_cache": prefix_cache}, max(1, tokens // page), page, same, many=False).run(
            arrivals
        )


@pytest.mark.patches
def test_a_request_that_waits_for_room_is_evaluated_once() -> None:
    seen: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name, function in watched(seen).items():
            patch.setattr(Admission, name, function)
        # 20 pages of 2; the first holds 12 at its end, the second needs 12 of its own.
        first, second = (0, 0, 12, 12, 0, None), (3, 1, 12, 12, 0, None)
        Program({"output_reserve": 1.0}, 20, 2, True, many=False).run([first, second])
    assert seen["fits True"] == 2
    assert seen["shut"] >= 8
    assert seen["fits False"] <= 2


def test_a_match_that_grows_is_looked_at_again() -> None:
    """The second request has the first one's prompt, which is published when the first prefill is done. No
    page is given back then, and yet the second request fits."""
    config = {"publication": Publication.PREFILL, "flight": Flight.NONE, "output_reserve": 1.0}
    program = Program(config, 12, 2, True, many=False)
    for name in ("first", "second"):
        program.d.submit(name, list(range(12)), 5)
    for _ in range(2):
        program._step(10**9)
    assert [[a.request for a in plan.admissions] for plan in program.d.plans] == [["first"], ["second"]]

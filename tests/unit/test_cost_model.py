"""The cost model: prices by hand, its file, and every file that has to be refused."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotprefix.cost.features import Features, features
from hotprefix.cost.model import Beyond, CostModel, ErrorOf, FitError, Link, Links
from hotprefix.errors import InputError
from hotprefix.kernel import tokens as tk
from hotprefix.kernel.plan import Chunk


def model(**changes: Any) -> CostModel:
    fields: dict[str, Any] = {
        "name": "hand", "source": "made up", "model": "m", "dtype": "float32", "hardware": "none",
        "date": dt.date(2026, 1, 2), "base_s": 1.0, "prefill_token_s": 0.1, "prefill_context_s": 0.01,
        "decode_s": 0.5, "decode_context_s": 0.001, "scheduler_base_s": 0.25, "scheduler_running_s": 0.125,
        "scheduler_waiting_s": 0.0625, "kv_token_bytes": 1000,
        "links": Links(restore=Link(latency_s=0.5, bytes_per_s=1000.0)),
        "fit": FitError(method="by eye", overall=ErrorOf(samples=2, median=0.01, p95=0.125), bias=-0.5),
    }  # fmt: skip
    return CostModel(**{**fields, **changes})


def chunk(start: int, n: int) -> Chunk:
    return Chunk("r", 0, start, tk.encode(range(n)), 0, (), samples=True, prefill=n > 1)


def test_each_term_is_a_price() -> None:
    assert model().prices.step_s(0, 0, 0, 0) == 1.0
    assert model().prices.step_s(10, 0, 0, 0) == pytest.approx(2.0)
    assert model().prices.step_s(0, 100, 0, 0) == pytest.approx(2.0)
    assert model().prices.step_s(0, 0, 4, 0) == pytest.approx(3.0)
    assert model().prices.step_s(0, 0, 0, 3000) == pytest.approx(4.0)
    assert model().prices.scheduler_s(2, 4) == 0.25 + 0.25 + 0.25
    assert Link(latency_s=0.5, bytes_per_s=1000.0).seconds(250) == 0.75


def test_a_price_may_change_with_the_number_in_the_step() -> None:
    """A decode costs 0.5 s up to the 8th, 2 s from the 9th to the 16th, and 1 s from the 17th on."""
    beyond = (Beyond(after=8, each_s=2.0), Beyond(after=16, each_s=1.0))
    prices = model(base_s=0.0, decode_beyond=beyond).prices
    assert [prices.step_s(0, 0, n, 0) for n in (0, 1, 8, 9, 16, 18)] == [0.0, 0.5, 4.0, 6.0, 20.0, 22.0]
    prices = model(base_s=0.0, prefill_token_beyond=(Beyond(after=10, each_s=1.0),)).prices
    assert [prices.step_s(n, 0, 0, 0) for n in (10, 12)] == [pytest.approx(1.0), pytest.approx(3.0)]


def test_a_machine_twice_as_slow_has_every_price_doubled_and_the_same_links() -> None:
    slow = model(decode_beyond=(Beyond(after=8, each_s=2.0),)).scaled(2.0)
    assert slow.prices.step_s(10, 100, 9, 1000) == 2 * model(
        decode_beyond=(Beyond(after=8, each_s=2.0),)
    ).prices.step_s(10, 100, 9, 1000)
    assert slow.prices.scheduler_s(2, 4) == 2 * model().prices.scheduler_s(2, 4)
    assert slow.links == model().links
    assert slow.refresh_touch_s is None
    assert model(refresh_touch_s=1e-6).scaled(2.0).refresh_touch_s == 2e-6


def test_a_file_of_version_1_has_one_price_each() -> None:
    """Presets and calibrations were written so before prices could change with the number."""
    fields = json.loads(model().model_dump_json()) | {"version": 1}
    del fields["decode_beyond"], fields["prefill_token_beyond"]
    assert CostModel.parse(json.dumps(fields), "old").prices == model().prices


def test_features_count_pairs_and_take_single_positions_for_decodes() -> None:
    """3 positions from 5 attend to 6 + 7 + 8 = 21, and 2 positions from 0 to 1 + 2 = 3. One position from 9,
    a decode, attends to 10."""
    assert features([chunk(5, 3), chunk(0, 2), chunk(9, 1)]) == Features(5, 24, 1, 10)
    assert features([]) == Features(0, 0, 0, 0)
    assert [Features(2, 3, 0, 0).regime, Features(0, 0, 1, 1).regime, Features(2, 3, 1, 1).regime] == [
        "prefill",
        "decode",
        "mixed",
    ]


def test_the_file_gives_back_what_was_saved_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cost.json"
    saved = model(decode_beyond=(Beyond(after=8, each_s=2.0),))
    saved.save(path)
    assert CostModel.load(path) == saved
    assert [p.name for p in path.parent.iterdir()] == ["cost.json"]
    assert "median 1.0%, p95 12.5% (by eye)" in model().label
    assert "no fit error known" in model(fit=None).label


def test_where_it_cannot_be_written_the_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/cost\.json: cannot write the cost model"):
        model().save(tmp_path / "file" / "cost.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_s": -0.5}, r"base_s=-0\.5: .*greater than or equal to 0"),
        ({"base_s": float("nan")}, r"base_s=nan: .*finite"),
        ({"decode_s": float("inf")}, r"decode_s=inf: .*finite"),
        ({"base_s": "1"}, r"base_s='1': .*number"),
        ({"base_s": True}, r"base_s=True: .*number"),
        ({"kv_token_bytes": 0}, r"kv_token_bytes=0: "),
        ({"date": "soon"}, r"date='soon': "),
        ({"sped": 1}, r"sped=1: Extra"),
        ({"model": None}, r"model=None: "),
        ({"links": {"restore": {"latency_s": 0.0, "bytes_per_s": 0}}}, r"links\.restore\.bytes_per_s=0: "),
        ({"version": 3}, r"cost model version 3, this reads 1 and 2: calibrate again"),
        (
            {"decode_beyond": [{"after": 8, "each_s": 1.0}, {"after": 8, "each_s": 2.0}]},
            r"`after` must grow, it is \[8, 8\]",
        ),
        ({"decode_beyond": [{"after": 8, "each_s": -1.0}]}, r"decode_beyond\.0\.each_s=-1\.0: "),
        ({"base_s": 0.0, "decode_s": 0.0}, r"a step takes time"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_value(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(json.loads(model().model_dump_json()) | change))
    with pytest.raises(InputError, match=message):
        CostModel.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (model().model_dump_json()[:40], "damaged, not JSON"),
        ("[]", "no cost model"),
        ("{}", "no cost model"),
        ('{"version": 1}', "name: Field required"),
    ],
)
def test_a_damaged_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"cost\.json: {message}"):
        CostModel.load(path)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the cost model: No such file"):
        CostModel.load(tmp_path / "none.json")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"not UTF-8"):
        CostModel.load(tmp_path / "bytes")


def test_the_lab_loads_without_torch() -> None:
    code = (
        "import sys, hotprefix.lab.cost.calibrate, hotprefix.lab.live.against\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

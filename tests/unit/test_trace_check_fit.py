"""Faults counted across a whole trace, and parameters fitted to recorded sessions."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from hotprefix.errors import InputError
from hotprefix.lab.trace.check import Problem, check
from hotprefix.lab.trace.fit_agents import MAX_KS, fit_agents
from hotprefix.lab.trace.generate.registry import generate_trace
from hotprefix.lab.trace.info import info
from hotprefix.lab.trace.open_trace import open_trace
from hotprefix.lab.trace.problems import BadTrace, Report
from tests.support.traces import mooncake, row, session, shared, write_lines
from tests.unit.test_trace_canonical import ids, made, request


def test_every_kind_of_fault_is_counted(tmp_path: Path) -> None:
    rows = [
        mooncake(timestamp=10), mooncake(timestamp=0, hash_ids=[0]), mooncake(hash_ids=[7]),
        mooncake(input_length=-3),
        mooncake(timestamp=5, hash_ids=[2, 1]), "{", mooncake(timestamp=10, hash_ids=[0, 5]),
    ]  # fmt: skip
    path = write_lines(tmp_path / "m.jsonl", rows)
    found = check(open_trace(path))
    assert (found.requests, found.skipped) == (3, 4)
    kinds = {p.what: (p.count, p.first) for p in found.problems}
    wrong = "hash_ids: N ids for N tokens, but blocks of N tokens make N"
    assert kinds.pop(f"{wrong}; is the block size right (--block-size)?")[0] == 2
    assert kinds.pop("a block id follows different blocks") == (1, "request 1, block 1")
    assert [(what.split(":")[0], count) for what, (count, _) in kinds.items()] == [
        ("input_length", 1),
        ("the line", 1),
    ]
    assert found.notes == {"arrivals out of order": 1, "arrivals equal to the one before": 1}


def test_what_ends_the_reading_is_reported(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"hash_ids": [0], "timestamp": 0, "input_length": 9, "output_length": 1}\n' * 9)
    path = tmp_path / "m.jsonl.gz"
    path.write_bytes(whole[:-9])
    (problem,) = check(open_trace(path)).problems
    assert (problem.what, problem.count) == ("reading ends", 1)
    assert "cut off" in problem.first


def test_ids_are_followed_through_the_trace() -> None:
    good = request("a", 48, 1, 2, 3, arrival_s=0.0, session="s", output_blocks=ids(4))
    assert check(made(good, request("b", 64, 1, 2, 3, 4, arrival_s=1.0, session="s"))).problems == []
    cases = [
        (request("b", 48, 1, 3, 2, session="s"), "a block id follows different blocks", 2),
        (request("b", 16, 4, session="s"), "a block id follows different blocks", 1),
        (request("b", 16, 3000, session="s", output_blocks=ids(2)), "a block id follows different blocks", 1),
        (request("b", 32, 1, 2, session="s", namespace="m"), "a block id stands in different namespaces", 2),
        (request("a", 32, 1, 2, session="s"), "a request id stands twice", 1),
        (request("b", 32, 1, 2, session="t", parent="a"), "a parent is no earlier request of its session", 1),
        (request("b", 32, 1, 2, session="s", parent="b"), "a parent is no earlier request of its session", 1),
    ]
    for bad, what, count in cases:
        (problem,) = check(made(good, bad)).problems
        assert (problem.what, problem.count) == (what, count)
    assert isinstance(problem, Problem)


def test_a_planted_session_is_measured_where_it_is_used(tmp_path: Path) -> None:
    rows = [
        row(0, tokens=640, out=100, api=1.0),
        row(3, tokens=1280, parent=0, keep=10, inp="r", out=50, api=2.0),  # tool: 640 fresh, 2 s
        row(10, tokens=1290, parent=1, keep=20, inp="u", out=20, api=1.0),  # user: 10 fresh, 5 s
        row(11.5, 1, tokens=320, inp="u", api=0.5),  # a sub-agent
        row(13, 1, tokens=400, parent=3, keep=5, inp="r", api=0.5),  # its tool step: 80 fresh, 1 s
        row(20, tokens=1300, parent=2, keep=2, inp="ckru", api=1.0),  # reset
        row(30, tokens=640, parent=5, keep=2, inp="u", api=None),  # compaction
        row(32, tokens=704, parent=6, keep=10, inp="u", api=1.0),  # after an answer that was not timed
    ]
    lines = [session(rows), session([row(tokens=200000)], id="t", tool_tokens=72)]
    found = fit_agents(write_lines(tmp_path / "c.jsonl", lines), Report())
    params, fit = found["params"], found["fit"]
    assert fit["steps"] == {"first": 2, "tool": 2, "user": 1, "sub_agent": 1, "reset": 1, "compaction": 1} | {
        "after_unrecorded": 1
    }
    assert (params["sessions"], params["prefixes"], params["prefix"]) == (2, 2, 114)
    assert (params["user_share"], params["reset_share"]) == (1 / 6, 1 / 6)
    assert (params["sub_agents"], params["resumed_share"]) == (1 / 8, 1 / 2)
    assert (params["window"], params["resumed_window"], params["sub_prefix"]) == (1300, 200000, 319)
    quantities = fit["quantities"]
    assert [quantities[f"fresh_after_{k}"]["p50"] for k in ("tool", "user")] == [360.0, 10.0]
    assert [quantities[f"delay_after_{k}"]["p50"] for k in ("tool", "user")] == [1.5, 5.0]
    assert quantities["compacted"]["p50"] == 640.0
    assert quantities["reset_length"]["p50"] == pytest.approx(1300 / 1290)
    assert (quantities["steps"]["p50"], quantities["resumed_steps"]["p50"]) == (6.0, 1.0)
    assert info(generate_trace("agents", params, seed=1)).sessions == 2, "a generator takes it as it is"


def test_a_lognormal_quantity_is_found_and_another_is_not(tmp_path: Path) -> None:
    """The sessions are made with lognormal outputs of median 300 and sigma 1.2, and with first contexts of
    two sizes."""
    random = np.random.default_rng(2)
    lines = []
    for n in range(300):
        out = [max(1, round(300 * float(np.exp(1.2 * random.standard_normal())))) for _ in range(10)]
        first = 6400 if n % 2 else 64000
        rows = [
            row(9.0 * i, tokens=first + 64 * i, parent=i - 1, keep=(first // 64 + i - 1) if i else 0, out=o)
            for i, o in enumerate(out)
        ]
        lines.append(session(rows, id=str(n)))
    found = fit_agents(write_lines(tmp_path / "c.jsonl", lines), Report())
    output = found["params"]["output"]
    assert set(output) == {"median", "sigma"}
    assert 290 < output["median"] < 310
    assert 1.17 < output["sigma"] < 1.23
    assert found["fit"]["quantities"]["output"]["ks"] < MAX_KS
    assert found["fit"]["quantities"]["first_context"]["ks"] > 0.3
    shape = found["params"]["first_context"]
    assert (shape["values"][0], shape["values"][7], shape["values"][-1]) == (6400.0, 35200.0, 64000.0)
    assert shape["at"][7] == 0.5


def test_bad_session_lines(tmp_path: Path) -> None:
    lines = [session([row()]), session([], id="t"), session([row(parent=3)], id="u"), "{"]
    path = write_lines(tmp_path / "c.jsonl", lines)
    with pytest.raises(BadTrace, match="line 2: rows: empty"):
        fit_agents(path, Report())
    report = Report(skip_bad=True)
    assert fit_agents(path, report)["fit"]["sessions"] == 1
    assert report.skipped == 3
    other = session([row(tokens=256, new=8)], id="t", block_size=32)
    path = write_lines(tmp_path / "d.jsonl", [session([row()]), other])
    with pytest.raises(InputError, match=r"block sizes differ: .32, 64."):
        fit_agents(path, Report())
    path.write_text('{"hotprefix_trace": 1}\n')
    with pytest.raises(BadTrace, match="give the coding-agent session file"):
        fit_agents(path, Report(skip_bad=True))


def test_the_recorded_sessions_fitted() -> None:
    """The fit gives the numbers that docs/traces.md states."""
    found = fit_agents(shared("cc_weka_sessions_b64.jsonl.gz"), Report())
    fit, params = found["fit"], found["params"]
    assert fit["steps"] == {
        "first": 710, "tool": 41421, "user": 2095, "reset": 519, "sub_agent": 63, "compaction": 238,
        "after_unrecorded": 4244,
    }  # fmt: skip
    assert (params["prefixes"], params["prefix"], params["window"]) == (343, 14948, 151090)
    p50 = {name: round(of["p50"], 2) for name, of in fit["quantities"].items()}
    assert [p50[f"fresh_after_{k}"] for k in ("tool", "user")] == [720, 583]
    assert [p50[f"delay_after_{k}"] for k in ("tool", "user")] == [8.48, 177.66]
    assert (p50["output"], p50["first_context"], p50["resumed_context"]) == (216, 20181, 208858)
    assert all(of["form"] == "quantiles" for of in fit["quantities"].values()), "no curve is close enough"
    made_up = info(generate_trace("agents", params, seed=1))
    assert made_up.sessions == 710
    assert made_up.ideal_reuse_share == pytest.approx(0.963, abs=0.005)

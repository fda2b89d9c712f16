"""Our own event log as a trace: what happened live happens in its replay, and no ideal lies below what
was."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace as changed
from pathlib import Path

import pytest

from hotprefix.engine.messages import Generate
from hotprefix.engine.params import SamplingParams
from hotprefix.errors import ContextLengthExceeded, QueueFull
from hotprefix.kernel.config import KernelConfig
from hotprefix.lab.sim.arrivals import Loop
from hotprefix.lab.sim.replay import Replay
from hotprefix.lab.sim.simulate import IdealBroken, simulate
from hotprefix.lab.trace.ideal import EndlessCache
from hotprefix.lab.trace.open_trace import open_trace
from hotprefix.lab.trace.problems import BadTrace
from hotprefix.lab.trace.write_trace import write_trace
from hotprefix.records.recorder import Recorder, RecordOptions
from tests.support.engine import Clock, fake_loop
from tests.support.fake import VOCAB
from tests.support.replays import price
from tests.support.traces import ideal

KEY = bytes(range(32))
QUICK = price(
    base_s=1e-6, prefill_token_s=0.0, prefill_context_s=0.0, decode_s=0.0, decode_context_s=0.0,
    scheduler_base_s=0.0, scheduler_running_s=0.0, scheduler_waiting_s=0.0,
)  # fmt: skip


class Chats:
    """Conversations over a live loop with an event log, turn by turn in turn; each turn sends all that was
    said."""

    def __init__(self, path: Path, **config: object) -> None:
        self.recorder = Recorder(RecordOptions(KEY, path), wall=lambda: 1_000_000.0)
        self.loop, _, self.clock = fake_loop(observer=self.recorder, **config)
        self.said: dict[str, list[int]] = {}
        self.reused: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        self.random = random.Random(7)

    def run(self, chats: int, turns: int, named: bool = True) -> None:
        system = [self.random.randrange(VOCAB) for _ in range(14)]
        for turn in range(turns):
            for chat in range(chats):
                name = f"chat{chat}"
                known = self.said.setdefault(name, [*system])
                known += [self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 5))]
                self._turn(f"{name}-{turn}", name if named else None, known)
        self.recorder.close()

    def _turn(self, request: str, session: str | None, known: list[int]) -> None:
        self.clock.now += 1.0
        self.prompts[request] = len(known)
        params = SamplingParams(max_tokens=self.random.randint(1, 9))
        self.loop.submit(
            Generate(
                request, tuple(known), params, session=session, arrived=self.clock.now - 0.25, hold_s=5.0
            )
        )
        while self.loop.has_work:
            self.clock.now += 0.001
            for delta in self.loop.step():
                known += delta.tokens
                self.reused[request] = delta.usage.cached_tokens


def replayed(path: Path, config: KernelConfig, **how: object) -> dict[str, int]:
    trace = open_trace(path)
    tables = simulate(Replay(config, QUICK, **how), trace, block_size=trace.block_size)  # type: ignore[arg-type]
    cached = tables.requests.select("trace_id", "cached_l1", "cached_l2", "cached_l3").rows()
    return {name: sum(parts) for name, *parts in cached}


@pytest.mark.parametrize("config", [
    {}, {"page_size": 1, "total_pages": 200}, {"total_pages": 40}, {"session_pages": 40, "total_pages": 50},
], ids=["roomy", "tokens", "evicting", "holds"])  # fmt: skip
def test_a_log_replays_to_what_happened(tmp_path: Path, config: dict[str, object]) -> None:
    """Without lower tiers: whether to copy or to compute is decided by measured times, which no log can
    repeat."""
    chats = Chats(tmp_path / "log.jsonl", **config)
    chats.run(4, 6)
    assert sum(chats.reused.values()) > 0.4 * sum(chats.prompts.values())
    assert replayed(tmp_path / "log.jsonl", chats.loop.kernel.config) == chats.reused


def test_a_hold_is_replayed(tmp_path: Path) -> None:
    """Others fill the cache while a session thinks; its pages stay, live and in the replay."""
    chats = Chats(tmp_path / "log.jsonl", session_pages=40, total_pages=40)
    known = [chats.random.randrange(VOCAB) for _ in range(40)]
    chats._turn("first", "s", known)
    for number in range(2):
        chats._turn(f"other{number}", None, [number] * 100)
    chats._turn("second", "s", known)
    chats.recorder.close()
    assert chats.reused["second"] == 40
    assert replayed(tmp_path / "log.jsonl", chats.loop.kernel.config) == chats.reused


def test_the_ideal_of_a_log_is_no_less_than_what_its_requests_reused(tmp_path: Path) -> None:
    chats = Chats(tmp_path / "log.jsonl")
    chats.run(4, 6)
    found = list(ideal(open_trace(tmp_path / "log.jsonl")))
    assert len(found) == len(chats.reused)
    assert all(best.tokens >= reused for best, reused in zip(found, chats.reused.values(), strict=True))


def without_answers(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        record = json.loads(line)
        record.pop("answer", None)
        yield json.dumps(record, separators=(",", ":"))


def test_a_log_that_reused_more_than_it_shows_is_refused(tmp_path: Path) -> None:
    """As it was when answers were not recorded: chats had reused what, by the log, nobody had ever said."""
    Chats(tmp_path / "log.jsonl").run(4, 6)
    (tmp_path / "less.jsonl").write_text("\n".join(without_answers(tmp_path / "log.jsonl")) + "\n")
    with pytest.raises(
        BadTrace, match=r"reused \d+ tokens .* an endless cache would have had \d+: .* missing"
    ):
        list(open_trace(tmp_path / "less.jsonl"))


def test_a_log_that_lacks_records_is_not_held_against_itself(tmp_path: Path) -> None:
    """One that is still written, or dropped some: of it nothing follows."""
    Chats(tmp_path / "log.jsonl").run(2, 4)
    lines = list(without_answers(tmp_path / "log.jsonl"))
    (tmp_path / "cut.jsonl").write_text("\n".join(lines[:-4]) + "\n" + lines[-4][:9])
    assert len(list(open_trace(tmp_path / "cut.jsonl"))) > 6


def test_arrivals_sessions_and_think_times(tmp_path: Path) -> None:
    """An arrival is when the client's request came; a turn's time to think ends there."""
    Chats(tmp_path / "log.jsonl").run(2, 3)
    trace = open_trace(tmp_path / "log.jsonl")
    assert trace.has_sessions
    requests = {r.id: r for r in trace}
    assert requests["chat0-0"].arrival_s == 0.0
    assert requests["chat1-0"].arrival_s == pytest.approx(1.0, abs=0.02)
    assert [requests[f"chat1-{turn}"].parent for turn in range(3)] == [None, "chat1-0", "chat1-1"]
    assert requests["chat0-1"].think_s == pytest.approx(1.75, abs=0.02)
    assert len({r.session for r in requests.values()}) == 2
    assert all(r.hold_s == 5.0 for r in requests.values())
    assert "chat" not in "".join(str(r.session) for r in requests.values()), "a session's name is not shown"


def test_a_log_with_sessions_replays_in_closed_loop(tmp_path: Path) -> None:
    chats = Chats(tmp_path / "log.jsonl")
    chats.run(3, 4)
    assert replayed(tmp_path / "log.jsonl", chats.loop.kernel.config, loop=Loop.CLOSED) == chats.reused


def test_a_log_without_sessions_has_none(tmp_path: Path) -> None:
    chats = Chats(tmp_path / "log.jsonl")
    chats.run(2, 3, named=False)
    trace = open_trace(tmp_path / "log.jsonl")
    assert not trace.has_sessions
    assert all(r.session is None for r in trace)
    assert replayed(tmp_path / "log.jsonl", chats.loop.kernel.config) == chats.reused


def test_a_trace_made_of_a_log_is_the_same_when_written_and_read(tmp_path: Path) -> None:
    chats = Chats(tmp_path / "log.jsonl", session_pages=40, total_pages=50)
    chats.run(3, 4)
    write_trace(open_trace(tmp_path / "log.jsonl"), tmp_path / "trace.jsonl")
    assert replayed(tmp_path / "trace.jsonl", chats.loop.kernel.config) == chats.reused


def test_refused_requests_are_part_of_the_load(tmp_path: Path) -> None:
    """One that the queue was too full for, and one that could never fit: both are refused again."""
    recorder = Recorder(RecordOptions(KEY, tmp_path / "log.jsonl"))
    loop, _, _ = fake_loop(observer=recorder, max_waiting=1, max_running=1, max_model_len=999)
    loop.submit(Generate("a", tuple(range(20)), SamplingParams(max_tokens=20)))
    loop.step()
    loop.submit(Generate("b", tuple(range(30)), SamplingParams(max_tokens=2)))
    with pytest.raises(QueueFull):
        loop.submit(Generate("c", tuple(range(24)), SamplingParams(max_tokens=7)))
    with pytest.raises(ContextLengthExceeded):
        loop.submit(Generate("d", tuple(range(24)), SamplingParams(max_tokens=300)))
    while loop.has_work:
        loop.step()
    recorder.close()
    requests = {r.id: r for r in open_trace(tmp_path / "log.jsonl")}
    assert {name: (r.input_length, r.output_length) for name, r in requests.items()} == {
        "a": (20, 20), "b": (30, 2), "c": (24, 0), "d": (24, 300),
    }  # fmt: skip
    assert len(requests["c"].blocks) == 6
    trace = open_trace(tmp_path / "log.jsonl")
    burst = [changed(r, arrival_s=0.001 * i) for i, r in enumerate(trace)]
    tables = simulate(Replay(loop.kernel.config, price()), burst, block_size=trace.block_size)
    outcome = dict(tables.requests.select("trace_id", "outcome").rows())
    assert outcome == {"a": "finished", "b": "finished", "c": "rejected", "d": "rejected"}


def test_no_answer_and_no_prompt_can_be_read_off_a_session_s_name(tmp_path: Path) -> None:
    """Two tenants that use one name have two sessions."""
    recorder = Recorder(RecordOptions(KEY, tmp_path / "log.jsonl"))
    loop, _, _ = fake_loop(observer=recorder)
    for number, salt in enumerate(("a", "b", "a")):
        loop.submit(Generate(str(number), (1, 2, 3), SamplingParams(max_tokens=1), salt=salt, session="s"))
        while loop.has_work:
            loop.step()
    recorder.close()
    one, two, three = [r.session for r in open_trace(tmp_path / "log.jsonl")]
    assert one == three
    assert one != two


def test_more_than_the_ideal_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = Chats(tmp_path / "log.jsonl")
    chats.run(3, 4)
    trace = list(open_trace(tmp_path / "log.jsonl"))
    add = EndlessCache.add
    monkeypatch.setattr(EndlessCache, "add", lambda self, r: add(self, r)._replace(tokens=0))
    with pytest.raises(IdealBroken, match=r"\d+ tokens were reused, an endless cache would have had 0"):
        simulate(Replay(chats.loop.kernel.config, QUICK), trace, block_size=4)


def test_a_clock_that_tells_of_the_future_is_not_believed(tmp_path: Path) -> None:
    """Times of another process's clock: never after the loop takes the request."""
    recorder = Recorder(RecordOptions(KEY, tmp_path / "log.jsonl"))
    loop, _, clock = fake_loop(observer=recorder)
    assert isinstance(clock, Clock)
    clock.now = 10.0
    loop.submit(Generate("a", (1, 2, 3), SamplingParams(max_tokens=1), arrived=99.0))
    while loop.has_work:
        loop.step()
    recorder.close()
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [r["arrived"] for r in records if r["k"] == "request"] == [10.0]

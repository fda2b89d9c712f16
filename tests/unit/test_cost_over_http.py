"""`hotprefix calibrate --url`: prices from waits and gaps, and servers that are none."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotprefix import cli
from hotprefix.cost.model import CostModel
from hotprefix.cost.presets import load_cost
from hotprefix.errors import InputError
from hotprefix.lab.cost import over_http
from hotprefix.lab.cost.fit_prices import step_prices
from hotprefix.lab.cost.over_http import Server, _Answer, _gap, _rounds, calibrate_url

PRESET = "llama-3.1-8b.1xh100.fp8"
IDLE_S = 0.002


class Pretended:
    """A client of a server that takes what a cost model says. Each of its requests moves the clock."""

    def __init__(self, cost: CostModel, limit: int = 10**9) -> None:
        self.prices, self.limit = cost.prices, limit
        self.now, self.active, self.asked = 0.0, 0, list[tuple[int, int]]()

    async def idle_s(self) -> float:
        return IDLE_S

    async def ask(self, words: int, outputs: int) -> _Answer:
        prompt = 2 * words + 10
        if prompt > self.limit:
            raise InputError("too long")
        self.asked.append((words, outputs))
        self.active += 1
        await asyncio.sleep(0)
        streams = self.active
        first = IDLE_S + self.prices.step_s(prompt, prompt * (prompt + 1) // 2, 0, 0)
        times = [self.now, self.now + first]
        for number in range(outputs - 1):
            context = streams * (prompt + 1 + number)
            times.append(times[-1] + self.prices.step_s(0, 0, streams, context))
        await asyncio.sleep(0)
        self.active -= 1
        if not self.active:
            self.now = times[-1]
        return _Answer(prompt, times, outputs)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    client = Pretended(load_cost(PRESET))
    monkeypatch.setattr(over_http.time, "perf_counter", lambda: client.now)
    return client


def test_the_prices_of_a_pretended_server_are_found(clock: Pretended) -> None:
    cost = load_cost(PRESET)
    samples = asyncio.run(_rounds(clock, 20.0, 64, lambda line: None))  # type: ignore[arg-type]
    found = step_prices(samples)
    assert found.base_s == pytest.approx(cost.base_s, rel=0.05)
    assert found.prefill[0][1] == pytest.approx(cost.prefill_token_s, rel=0.05)
    assert found.prefill_context_s == pytest.approx(cost.prefill_context_s, rel=0.3)
    assert found.decode[0][1] == pytest.approx(cost.decode_s, rel=0.05)
    assert found.decode_context_s == pytest.approx(cost.decode_context_s, rel=0.05)
    assert max(s.features.decodes for s in samples) == 32
    few = asyncio.run(_rounds(clock, 20.0, 4, lambda line: None))  # type: ignore[arg-type]
    assert max(s.features.decodes for s in few) <= 4
    rounds = [sum(s.point == point for s in samples) for point in {s.point for s in samples}]
    assert min(rounds) == max(rounds) > 1


def test_what_takes_too_long_or_is_refused_is_left_out(clock: Pretended) -> None:
    clock.limit = 600
    samples = asyncio.run(_rounds(clock, 1e-9, 2, lambda line: None))  # type: ignore[arg-type]
    assert {s.point for s in samples} == {"16 words, 0 streams", "16 words, 1 streams"}
    clock.asked.clear()
    samples = asyncio.run(_rounds(clock, 10.0, 2, lambda line: None))  # type: ignore[arg-type]
    assert {s.point for s in samples} == {f"{words} words, 0 streams" for words in (16, 64, 256)} | {
        "16 words, 1 streams"
    }
    clock.limit = 1
    with pytest.raises(InputError, match="too long"):
        asyncio.run(_rounds(clock, 1.0, 2, lambda line: None))  # type: ignore[arg-type]


def test_a_gap_is_between_tokens_while_all_streams_were_open() -> None:
    assert _gap([_Answer(5, [0.0, 1.0, 2.0, 3.0, 4.0], 4)]) == 1.0
    assert _gap([_Answer(5, [0.0, 1.0, 2.0, 3.0], 6)]) == 0.5  # two tokens a piece
    assert _gap([_Answer(5, [0.0, 1.0, 1.0, 1.0, 4.0], 4)]) == 1.0  # in a bunch
    early, late = [0.0, 1.0, 5.0, 9.0, 13.0, 17.0, 18.0], [0.0, 16.5, 17.5, 18.5]
    assert _gap([_Answer(5, early, 6), _Answer(5, late, 3)]) == 1.0
    with pytest.raises(InputError, match="in one piece"):
        _gap([_Answer(5, [0.0, 1.0], 1)])


# -- over sockets -------------------------------------------------------------------------------------


class Scripted(BaseHTTPRequestHandler):
    """An OpenAI server that says a word for each token.

    seen: the bodies.
    keys: the headers by which the client showed who it is.
    garbage: what it answers in place of a stream.
    models, load: what it answers on these routes.
    """

    seen: list[Any]
    keys: set[str | None]
    garbage: bytes | None = None
    models: bytes = b'{"data": [{"id": "the model"}]}'
    load: bytes = b"{}"
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        found = {"/v1/models": self.models, "/load": self.load}[self.path]
        self._send(found, "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append(body)
        self.keys.add(self.headers["authorization"])
        prompt = len(body["messages"][0]["content"].split()) + 7
        usage = {"prompt_tokens": prompt, "completion_tokens": body["max_tokens"],
                 "prompt_tokens_details": {"cached_tokens": 2}}  # fmt: skip
        events = [{"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}]
        events += [
            {"choices": [{"delta": {"content": " w"}, "finish_reason": None}]}
            for _ in range(body["max_tokens"])
        ]
        events += [{"choices": [{"delta": {}, "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
        self._send(self.garbage or b"".join(lines) + b"data: [DONE]\n\n", "text/event-stream")

    def _send(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def scripted(**fields: Any) -> Iterator[tuple[str, type[Scripted]]]:
    kind = type("Handler", (Scripted,), {"seen": [], "keys": set(), **fields})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", kind
    finally:
        server.shutdown()
        server.server_close()


def test_the_command_writes_a_cost_model_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_http, "TOO_LONG", 1e9)
    out, key = tmp_path / "cost.json", tmp_path / "key"
    key.write_text("sk-1\n")
    with scripted(load=b'{"worker": {"kv_token_bytes": 99}}') as (url, handler):
        options = ["--url", url, "--out", str(out), "--seconds", "0.5", "--max-running", "2"]
        done = CliRunner().invoke(cli.app, ["calibrate", *options, "--api-key-file", str(key)])
        assert done.exit_code == 0, (done.output, done.exception)
    found = CostModel.load(out)
    assert (found.name, found.model, found.kv_token_bytes) == ("cost", "the model", 99)
    assert found.fit is not None
    texts = [body["messages"][0]["content"] for body in handler.seen]
    assert len(set(texts)) == len(texts) > 9
    assert all(a.split()[0] != b.split()[0] for a, b in pairwise(texts))
    assert handler.keys == {"Bearer sk-1"}
    assert {body["model"] for body in handler.seen} == {"the model"}


def test_the_role_s_piece_and_the_end_s_are_no_tokens() -> None:
    async def asked(url: str) -> _Answer:
        async with over_http.aiohttp.ClientSession() as session:
            return await over_http._Client(session, Server(url, "m"), 0).ask(5, 3)

    with scripted() as (url, _):
        found = asyncio.run(asked(url))
    assert (found.prompt, found.outputs, len(found.times)) == (10, 3, 4)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"models": b"<html>"}, "no answer of OpenAI's API"),
        ({"models": b'{"data": []}'}, "no answer of OpenAI's API"),
        ({"garbage": b"data: {\n\n"}, "no answer of OpenAI's API"),
        ({"garbage": b'data: {"choices": [7]}\n\n'}, "no answer of OpenAI's API"),
        ({"garbage": b"data: [DONE]\n\n"}, "tell no usage or no text"),
    ],
)
def test_a_server_that_is_none_is_told_in_a_line(fields: dict[str, Any], says: str) -> None:
    with scripted(**fields) as (url, _), pytest.raises(InputError, match=says) as refused:
        calibrate_url(Server(url), "n", 0.1, 1, lambda line: None)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--url", "http://127.0.0.1:1"], "--url http://127.0.0.1:1"),
        (["--url", "nonsense"], "--url nonsense/v1/models"),
        (["--url", "http://127.0.0.1:1", "--dtype", "float32"], "--url takes of the engine's options only"),
        (["--url", "http://127.0.0.1:1", "--clock", "cpu"], "--url takes of the engine's options only"),
        (["--url", "http://127.0.0.1:1", "--api-key-file", "/no/such"], "--api-key-file /no/such"),
        (["--api-key-file", "/no/such"], "--api-key-file belongs to --url"),
    ],
)
def test_wrong_options_are_told_as_they_were_typed(options: list[str], says: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.app, ["calibrate", "--out", str(tmp_path / "c.json"), *options])
    assert isinstance(done.exception, InputError)
    assert str(done.exception).startswith(says)

"""The server as a process, over sockets, with a scripted engine: draining, dying, leaving, large bodies."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support import loops
from tests.support.server import events
from tests.support.serving import Server, server

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with server() as running:
        running.until_ready()
        yield running


def body(order: int = loops.RUN, **fields: Any) -> dict[str, Any]:
    return {"prompt": [order, 1, 2], "max_tokens": 5, **fields}


def post(running: Server, value: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/completions", json=value, timeout=200)


def running_now(running: Server) -> int:
    return int(httpx.get(f"{running.url}/server_info", timeout=200).json()["stats"]["running"])


def until(condition: Any, limit_s: float = 120) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class OpenStream:
    """A stream that was opened and has given its first event; `rest` reads it to the end."""

    def __init__(self, running: Server, **fields: Any) -> None:
        self._client = httpx.Client(timeout=200)
        request = self._client.build_request(
            "POST", f"{running.url}/v1/completions", json=body(stream=True, **fields)
        )
        self.response = self._client.send(request, stream=True)
        assert self.response.status_code == 200, self.response.read()
        self._bytes = self.response.iter_bytes()
        self._first = next(self._bytes)

    def rest(self) -> list[Any]:
        text = (self._first + b"".join(self._bytes)).decode()
        self.close()
        return events(text)

    def close(self) -> None:
        self.response.close()
        self._client.close()


def test_case_94_sigterm_lets_open_streams_finish_and_refuses_new_ones() -> None:
    with server() as running:
        running.until_ready()
        streams = [OpenStream(running, max_tokens=900) for _ in range(3)]
        running.signal()
        assert running.until_health(503).json()["error"]["message"].startswith("draining")
        refused = post(running, body())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        with ThreadPoolExecutor(3) as pool:
            for found in pool.map(OpenStream.rest, streams):
                assert found[-1] == "[DONE]"
                assert found[-2]["choices"][0]["finish_reason"] == "length"
        assert running.wait() == 0


def test_case_94_it_ends_at_once_when_nobody_is_left() -> None:
    with server("build", "1000") as running:
        running.until_ready()
        assert post(running, body()).status_code == 200
        running.signal(signal.SIGINT)
        assert running.wait() == 0
        assert running.process.stderr is not None
        assert "loop closed" in running.process.stderr.read()


def test_after_the_limit_open_streams_end_with_an_error() -> None:
    with server("build", "0.2") as running:
        running.until_ready()
        stream = OpenStream(running, max_tokens=None)
        running.signal()
        found = stream.rest()
        assert found[-1]["error"]["code"] == "draining"
        assert "[DONE]" not in found
        assert running.wait() == 0


def test_a_second_signal_stops_at_once() -> None:
    with server("build", "1000") as running:
        running.until_ready()
        stream = OpenStream(running, max_tokens=None)
        running.signal()
        running.until_health(503)
        running.signal()
        assert running.wait() == 0
        stream.close()


def test_a_signal_while_loading_stops_at_once() -> None:
    with server("build_slow") as running:
        running.until_says(re.compile("loading for ever"))
        assert running.until_health(503).json()["error"]["message"].startswith("loading")
        assert post(running, body()).status_code == 503
        running.signal()
        assert running.wait() == 0


def test_a_model_that_cannot_load_ends_the_server_with_its_reason() -> None:
    with server("build_bad") as running:
        assert running.process.stderr is not None
        assert "no such model: give a folder" in running.process.stderr.read()
        assert running.wait() == 2


def test_a_taken_port_is_one_clear_line(shared: Server) -> None:
    port = shared.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "tests.support.serving", "build", "30", "127.0.0.1", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_kill_9_of_the_engine_is_told_at_once_and_survived() -> None:
    with server() as running:
        running.until_ready()
        streams = [OpenStream(running, max_tokens=None) for _ in range(4)]
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(post, running, body(max_tokens=None))
            until(lambda: running_now(running) == 5)
            os.kill(running.engine_pid(), signal.SIGKILL)
            for stream in streams:
                found = stream.rest()
                assert found[-1]["error"]["code"] == "engine_unavailable"
                assert "[DONE]" not in found
            assert whole.result().status_code == 503
        running.until_health(200)
        assert post(running, body()).json()["choices"][0]["text"] == "1,2,3,4,5,"
        assert "hotprefix_engine_restarts_total 1.0" in httpx.get(f"{running.url}/metrics", timeout=200).text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_all_its_choices(shared: Server, stream: bool) -> None:
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", int(shared.url.rsplit(":", 1)[1]))) as raw:
            value = json.dumps(body(max_tokens=None, n=3, stream=stream)).encode()
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(value), value)
            )
            until(lambda: running_now(shared) == 3)
        until(lambda: running_now(shared) == 0)


def test_case_147_slow_readers_lose_nothing(shared: Server) -> None:
    streams = [OpenStream(shared, max_tokens=200, stream_options={"include_usage": True}) for _ in range(20)]
    until(lambda: running_now(shared) == 0)
    for stream in streams:
        *chunks, usage, done = stream.rest()
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == "".join(f"{k}," for k in range(1, 201))
        assert (usage["usage"]["completion_tokens"], done) == (200, "[DONE]")


def test_case_152_a_million_token_ids_are_read_and_the_event_loop_goes_on(shared: Server) -> None:
    big = json.dumps({"prompt": [12345] * 10**6}).encode()
    assert len(big) > 6_900_000
    waits: list[float] = []
    done = threading.Event()

    def probe() -> None:
        with httpx.Client(timeout=200) as http:
            while not done.is_set():
                start = time.monotonic()
                assert http.get(f"{shared.url}/health").status_code == 200
                waits.append(time.monotonic() - start)

    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(probe)
        answer = httpx.post(f"{shared.url}/v1/completions", content=big, headers=JSON, timeout=200)
        done.set()
        probing.result()
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in (None, "context_length_exceeded")
    assert waits


@pytest.mark.parametrize("chunked", [False, True])
def test_case_152_one_byte_too_many_is_a_413_without_reading_all(shared: Server, chunked: bool) -> None:
    limit = 32 * 1024 * 1024
    sent = 0

    def content() -> Iterator[bytes]:
        nonlocal sent
        while sent < 8 * limit:
            sent += 1 << 20
            yield b" " * (1 << 20)

    headers = JSON if chunked else {**JSON, "content-length": str(8 * limit)}
    try:
        answer = httpx.post(f"{shared.url}/v1/completions", content=content(), headers=headers, timeout=200)
    except httpx.WriteError:
        pytest.fail("the answer was lost")
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert str(limit) in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"


def test_case_152_a_declared_length_over_the_limit_is_answered_before_the_body(shared: Server) -> None:
    with socket.create_connection(("127.0.0.1", int(shared.url.rsplit(":", 1)[1])), timeout=30) as raw:
        raw.sendall(
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 99999999999\r\n\r\n"
        )
        assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_body_of_exactly_the_limit_is_read(shared: Server) -> None:
    value = json.dumps(body()).encode()
    padded = value + b" " * (32 * 1024 * 1024 - len(value))
    assert (
        httpx.post(f"{shared.url}/v1/completions", content=padded, headers=JSON, timeout=200).status_code
        == 200
    )
    assert (
        httpx.post(
            f"{shared.url}/v1/completions", content=padded + b" ", headers=JSON, timeout=200
        ).status_code
        == 413
    )


def test_metrics_answers_head_too(shared: Server) -> None:
    answer = httpx.head(f"{shared.url}/metrics", timeout=200)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_flush_says_what_running_requests_keep(shared: Server) -> None:
    stream = OpenStream(shared, max_tokens=None)
    partial = httpx.post(f"{shared.url}/reset_prefix_cache", timeout=200)
    assert (partial.status_code, partial.json()["success"]) == (200, True)
    assert (partial.json()["kept_tokens"], partial.json()["running_requests"]) == (16, 1)
    assert "1 running request" in partial.json()["message"]
    stream.close()
    until(lambda: running_now(shared) == 0)
    whole = httpx.post(f"{shared.url}/flush_cache", timeout=200)
    assert (whole.status_code, whole.json()["freed_tokens"]) == (200, 16)


def test_sigterm_while_the_engine_hangs_ends_every_answer_with_an_error() -> None:
    """Streams with an event, others with JSON; also those that the engine has not even taken."""
    with server("build", "0.2") as running:
        running.until_ready()
        streams = [OpenStream(running, max_tokens=None) for _ in range(2)]
        with ThreadPoolExecutor(3) as pool:
            whole = pool.submit(post, running, body(max_tokens=None))
            until(lambda: running_now(running) == 3)
            os.kill(running.engine_pid(), signal.SIGSTOP)
            late = [pool.submit(post, running, body(stream=stream)) for stream in (False, True)]
            until(lambda: httpx.get(f"{running.url}/metrics", timeout=200).status_code == 200)
            running.signal()
            for stream in streams:
                found = stream.rest()
                assert found[-1]["error"]["code"] == "draining"
                assert "[DONE]" not in found
            for answer in (whole.result(), *(one.result() for one in late)):
                assert answer.status_code == 503
                assert answer.headers["content-type"] == "application/json"
                assert answer.json()["error"]["type"] == "service_unavailable_error"
        assert running.wait() == 0


def test_liveness_stays_while_the_engine_is_replaced_and_readiness_does_not() -> None:
    with server() as running:
        running.until_ready()
        os.kill(running.engine_pid(), signal.SIGKILL)
        seen = set()
        end = time.monotonic() + 120
        while (
            ready := httpx.get(f"{running.url}/readyz", timeout=200).status_code
        ) != 200 or 503 not in seen:
            seen.add(ready)
            assert httpx.get(f"{running.url}/livez", timeout=200).status_code == 200
            assert time.monotonic() < end
        running.signal()
        running.until_health(503)

"""`hotprefix fleet` as processes: paced engines and a router, which come back when they are killed and are
gone when the fleet is."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

COMMAND = str(Path(sys.executable).parent / "hotprefix")
PACED = ["--paced", "llama-3.1-8b.1xh100.fp8", "--kv-tokens", "16000", "--poll", "0.05"]
LIMIT_S = 200


class Running:
    """A fleet on a free port, whose temporary folder is under `folder`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)}
        command = [COMMAND, "fleet", "--port", "0", *PACED, *arguments]
        self.folder = folder
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.log: list[str] = []

    def until_says(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"it ended: {''.join(self.log)}")

    def until_ready(self) -> str:
        return self.until_says(r"ready: \d of \d engines at (http://\S+)/v1").group(1)

    def rest(self) -> str:
        """What it said since."""
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, words: str) -> psutil.Process:
        (found,) = [p for p in self.family() if "fleet_child" in (t := " ".join(p.cmdline())) and words in t]
        return found


@contextmanager
def fleet(folder: Path, *arguments: str) -> Iterator[Running]:
    running = Running(folder, *arguments)
    family: list[psutil.Process] = []
    try:
        yield running
    finally:
        if running.process.poll() is None:
            family = running.family()
        running.process.kill()
        running.process.wait()
        gone(family)


def gone(family: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(family, timeout=LIMIT_S)
    assert not left


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def workers(url: str) -> dict[str, Any]:
    return {each["name"]: each for each in httpx.get(f"{url}/workers", timeout=60).json()["workers"]}


def ready(url: str) -> bool:
    try:
        return [each["state"] for each in workers(url).values()] == ["ready", "ready"]
    except httpx.TransportError:
        return False


def ask(url: str, **fields: Any) -> httpx.Response:
    body = {"prompt": [5, 6, 7], "max_tokens": 5, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)


def test_what_is_killed_comes_back_and_one_signal_ends_all(tmp_path: Path) -> None:
    with fleet(tmp_path) as running:
        url = running.until_ready()
        first = ask(url)
        assert first.status_code == 200
        before = workers(url)
        running.child("serve --host=127.0.0.1 --port=" + before["worker-1"]["url"].rsplit(":", 1)[1]).kill()
        running.until_says("worker-1: was ended by SIGKILL; starts again")
        running.until_says("worker-1: ready: .* at http")
        until(lambda: ready(url) and workers(url)["worker-1"]["restarts"] == 1)
        assert workers(url)["worker-1"]["url"] == before["worker-1"]["url"]
        running.child(" route ").kill()
        running.until_says("router: ready: 2 workers")
        until(lambda: ready(url))
        assert ask(url).json()["choices"] == first.json()["choices"]
        family = running.family()
        assert len(family) >= 5
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(LIMIT_S) == 0
        gone(family)
        assert "starts again" not in running.rest()
        assert not list(tmp_path.iterdir())


def test_children_notice_that_their_parent_was_killed(tmp_path: Path) -> None:
    with fleet(tmp_path) as running:
        running.until_ready()
        family = running.family()
        running.process.kill()
        gone(family)
        assert not list(tmp_path.iterdir())


def test_the_second_signal_kills(tmp_path: Path) -> None:
    """The first would wait for the answer that is under way, which takes many minutes. Engines that
    hang go, too."""
    with fleet(tmp_path, "--pace-factor", "1000", "--drain-seconds", "3000") as running:
        url = running.until_ready()
        body = {"prompt": [5, 6, 7], "max_tokens": 500, "stream": True}
        with httpx.Client(timeout=LIMIT_S) as http, http.stream("POST", f"{url}/v1/completions", json=body):
            family = running.family()
            running.process.send_signal(signal.SIGINT)
            running.until_says("router: stopping: open requests may run")
            stuck = next(p for p in family if "spawn_main" in " ".join(p.cmdline()))
            stuck.suspend()
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(LIMIT_S) == 0
        gone(family)
        assert not list(tmp_path.iterdir())


def test_what_cannot_be_started_is_told_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, says in (
            (["--port", port], f"cannot listen on 127.0.0.1 port {port}"),
            (["--model", "/nowhere"], "/nowhere"),
        ):
            command = [COMMAND, "fleet", "--port", "0", *PACED, *arguments]
            done = subprocess.run(
                command, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
            )
            assert done.returncode == 2, done.stderr
            assert says in done.stderr.splitlines()[-1]
            assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_what_the_router_expects_of_a_cache_is_what_the_engine_finds_there(tmp_path: Path) -> None:
    """Texts and a conversation, eight equal ones at once: one prefill each, and no token that the router took
    to be there was computed."""
    words = " ".join(f"word{number}" for number in range(300))
    turns = [{"role": "system", "content": words}, {"role": "user", "content": "And now?"}]
    model = "SmolLM2-135M-Instruct"
    bodies = [
        ("completions", {"model": model, "prompt": words, "max_tokens": 2}),
        ("chat/completions", {"model": model, "messages": turns, "max_tokens": 2}),
    ]
    with fleet(tmp_path, "--workers", "2") as running:
        url = running.until_ready()
        for path, body in bodies:
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(usage, [f"{url}/v1/{path}"] * 8, [body] * 8))
            prompt = found[0]["prompt_tokens"]
            cached = sorted(each["prompt_tokens_details"]["cached_tokens"] for each in found)
            assert cached == [0] + [(prompt - 1) // 16 * 16] * 7
        until(lambda: told(url)["hits"]["requests"] == 16)
        pool = told(url)
    assert pool["hits"]["captured"] == pool["hits"]["delivered"] > 0
    assert sum(pool["copied_tokens"].values()) == 0
    assert pool["counters"]["gaps"] == 0


def usage(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url, json=body, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["usage"]
    return found


def told(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/workers", timeout=60).json()["pools"][0]
    return found

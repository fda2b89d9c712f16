"""A server in a process of its own, over a scripted loop. Owns: the script's main and `Server`, its handle.

Rules: the port is chosen by the system and read from what the server says.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import httpx

URL = re.compile(r"listening on (http://\S+?),")


class Server:
    """A running server process. log: what it said on stderr so far."""

    def __init__(self, command: Sequence[str]) -> None:
        path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.log: list[str] = []
        self.url = self.until_says(URL).group(1)

    def until_says(self, pattern: re.Pattern[str]) -> re.Match[str]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := pattern.search(line):
                return found
        raise AssertionError(f"the server ended: {''.join(self.log)}")

    def until_ready(self) -> None:
        self.until_says(re.compile("ready: "))
        assert httpx.get(f"{self.url}/health", timeout=200).status_code == 200

    def engine_pid(self) -> int:
        import psutil

        children = psutil.Process(self.process.pid).children()
        (engine,) = [child.pid for child in children if "spawn_main" in " ".join(child.cmdline())]
        return int(engine)

    def until_health(self, status: int, limit_s: float = 120) -> httpx.Response:
        end = time.monotonic() + limit_s
        while (answer := httpx.get(f"{self.url}/health", timeout=200)).status_code != status:
            assert time.monotonic() < end, answer.text
            time.sleep(0.02)
        return answer

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, limit_s: float = 120) -> int:
        return self.process.wait(limit_s)


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[Server]:
    """The scripted server; arguments are `main`'s."""
    running = Server([sys.executable, "-m", "tests.support.serving", *arguments])
    try:
        yield running
    finally:
        running.process.kill()
        running.wait()


def main(build: str = "build", drain_s: str = "30", host: str = "127.0.0.1", port: str = "0") -> None:
    """Serve with a builder of `tests.support.loops`."""
    from hotprefix.engine.config import EngineConfig
    from hotprefix.errors import InputError
    from hotprefix.server.config import ServerConfig
    from hotprefix.server.serve import serve
    from tests.support import loops
    from tests.support.server import BytesText

    config = ServerConfig(host=host, port=int(port), drain_s=float(drain_s))
    try:
        serve(EngineConfig(), config, build=getattr(loops, build), load=lambda model: BytesText())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(*sys.argv[1:])

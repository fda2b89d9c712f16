"""Refusing grammars that cost too much. Owns: `GrammarChecker` and the small process it keeps.

Rules: a hostile schema can make the compiler run for minutes and take all memory, and a thread cannot
be stopped; so each new grammar is first compiled in a process of its own, under limits of processor
time, memory and wall time, and only what passes reaches an engine. The process starts with the first
grammar, serves all that follow, and is replaced after one that broke it. Verdicts are kept.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import threading
import time
from collections import OrderedDict

from hotprefix.engine.params import StructuredOutput
from hotprefix.engine.sampling.structured import Compiler, Vocabulary
from hotprefix.errors import HotprefixError, InputError

MAX_CPU_S = 1.0
MAX_WALL_S = 5.0
MAX_MEMORY = 2 << 30
_START_WALL_S = 60.0
_KEPT_VERDICTS = 256


class GrammarChecker:
    """Checks grammars for one vocabulary. Thread-safe; `check` blocks, so call it off the event loop."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._verdicts: OrderedDict[StructuredOutput, str | None] = OrderedDict()

    def check(self, structured: StructuredOutput) -> None:
        """Return where the grammar compiles within the limits. Raises InputError."""
        with self._lock:
            if structured not in self._verdicts:
                self._verdicts[structured] = self._judge(structured)
                if len(self._verdicts) > _KEPT_VERDICTS:
                    self._verdicts.popitem(last=False)
            self._verdicts.move_to_end(structured)
            problem = self._verdicts[structured]
        if problem is not None:
            raise InputError(problem, param="response_format")

    def close(self) -> None:
        """End the process; a later check starts another."""
        with self._lock:
            self._stop()

    def _judge(self, structured: StructuredOutput) -> str | None:
        limits = f"{MAX_CPU_S:g} s or {MAX_MEMORY >> 20} MiB"
        too_much = f"{structured.kind} takes more than {limits} to compile: simplify it"
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            problem, seconds = self._ask(structured, MAX_WALL_S)
        except (OSError, EOFError, pickle.UnpicklingError):
            self._stop()
            return too_much
        return too_much if problem is None and seconds > MAX_CPU_S else problem

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._ask(self._vocabulary, _START_WALL_S)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._stop()
            raise HotprefixError(f"the grammar checker's process did not start: {error!r}") from error

    def _ask(self, message: object, wall_s: float) -> tuple[str | None, float]:
        """Send a message and wait for its answer; the process is killed when the time is over."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        alarm = threading.Timer(wall_s, process.kill)
        alarm.start()
        try:
            pickle.dump(message, process.stdin)
            process.stdin.flush()
            answer: tuple[str | None, float] = pickle.load(process.stdout)
            return answer
        finally:
            alarm.cancel()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _serve() -> None:
    """The process: a `Vocabulary`, then one grammar after the other. Answers are (problem, CPU seconds)."""
    _limit_memory()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    compiler = Compiler(pickle.load(source))
    structured = StructuredOutput("json_object", "")  # makes the tokenizer ready
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            start, problem = time.process_time(), None
            try:
                compiler.compile(structured)
            except InputError as error:
                problem = error.message
            pickle.dump((problem, time.process_time() - start), sink)
            sink.flush()
            structured = pickle.load(source)


def _limit_memory() -> None:
    """Where the platform can (not on Windows). The limit of wall time holds everywhere."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _serve()

"""Refusing grammars that cost too much. Owns: `GrammarChecker`, its verdicts and its helper process.

Rules:
1. A hostile schema can make the compiler run for minutes and take all memory, and a thread cannot be stopped.
   So each new grammar is first compiled in a helper process, with limits on processor time, memory and wall
   time, and only a grammar that passes reaches an engine.
2. The process starts with the first grammar and checks all later ones. It is replaced after a grammar that
   broke it.
3. Verdicts are kept. A grammar with a known verdict waits for no check.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from hotprefix.engine.params import StructuredOutput
from hotprefix.engine.sampling.structured import Compiler, Vocabulary
from hotprefix.errors import HotprefixError, InputError

MAX_CPU_S = 1.0
MAX_WALL_S = 5.0
MAX_MEMORY = 2 << 30
_START_WALL_S = 60.0
_KEPT_VERDICTS = 16_384


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check.

    problem: why the grammar is refused; None if it is accepted.
    cost_s: processor time that the check took.
    """

    problem: str | None
    cost_s: float


class GrammarChecker:
    """Checks grammars for one vocabulary. Thread-safe. All methods but `known` block, so do not call them on
    an event loop's thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._checking = threading.Lock()  # the process answers one question at a time
        self._process: subprocess.Popen[bytes] | None = None
        self._table = threading.Lock()
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    def known(self, structured: StructuredOutput) -> Verdict | None:
        """The verdict on a grammar that was judged before; None if it was not. Does not block."""
        key = _key(structured)
        with self._table:
            verdict = self._verdicts.get(key)
            if verdict is not None:
                self._verdicts.move_to_end(key)
            return verdict

    def judge(self, structured: StructuredOutput) -> Verdict:
        """The verdict on a grammar: the known one, or that of a check now, which is kept."""
        with self._checking:
            verdict = self.known(structured)
            if verdict is None:
                verdict = self._judge(structured)
                with self._table:
                    self._verdicts[_key(structured)] = verdict
                    if len(self._verdicts) > _KEPT_VERDICTS:
                        self._verdicts.popitem(last=False)
            return verdict

    def check(self, structured: StructuredOutput) -> None:
        """Raises InputError unless the grammar compiles within the limits."""
        verdict = self.known(structured) or self.judge(structured)
        if verdict.problem is not None:
            raise InputError(verdict.problem, param="response_format")

    def close(self) -> None:
        """End the process; a later check starts another."""
        with self._checking:
            self._stop()

    def _judge(self, structured: StructuredOutput) -> Verdict:
        limits = f"{MAX_CPU_S:g} s or {MAX_MEMORY >> 20} MiB"
        too_much = f"{structured.kind} takes more than {limits} to compile: simplify it"
        if self._process is None or self._process.poll() is not None:
            self._start()
        try:
            problem, seconds = self._ask(structured, MAX_WALL_S)
        except (OSError, EOFError, pickle.UnpicklingError):
            self._stop()
            return Verdict(too_much, MAX_WALL_S)
        return Verdict(too_much if problem is None and seconds > MAX_CPU_S else problem, seconds)

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


def _key(structured: StructuredOutput) -> bytes:
    """A digest that names a grammar: the grammar itself may have 200,000 characters."""
    text = f"{structured.kind}:{structured.spec}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _serve() -> None:
    """The process's main function: receives a `Vocabulary`, then one grammar after the other, and answers
    each with (problem, CPU seconds)."""
    _limit_memory()
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    compiler = Compiler(pickle.load(source))
    structured = StructuredOutput("json_object", "")  # makes the tokenizer ready
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            start, problem = time.process_time(), None
            try:
                compiler.check(structured)
            except InputError as error:
                problem = error.message
            except MemoryError:
                return  # this process may be damaged, so it ends
            except Exception as error:  # no input may end the process, which all requests share
                problem = f"{structured.kind} cannot be used: {error}"
            pickle.dump((problem, time.process_time() - start), sink)
            sink.flush()
            structured = pickle.load(source)


def _limit_memory() -> None:
    """Limit this process's memory if the platform can (Windows cannot). The limit on wall time holds
    everywhere."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _serve()

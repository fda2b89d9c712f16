"""What a request needs before it can be queued is done beside the loop: the others' steps go on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from text_models import CHATML, toy

from hotprefix.engine.child import Driver, Inbox
from hotprefix.engine.messages import Generate
from hotprefix.engine.params import SamplingParams, StructuredOutput
from hotprefix.engine.pipe_records import Abort, Control, Deltas, FromChild, Reply, Submit
from hotprefix.engine.sampling.structured import Compiler, Constraint, Vocabulary
from hotprefix.errors import InputError
from hotprefix.kernel.plan import Finish
from tests.support.loops import FOREVER, RUN, ScriptedLoop


def ask(name: str, outputs: int = 3, spec: str | None = None) -> Generate:
    grammar = None if spec is None else StructuredOutput("regex", spec)
    return Generate(name, (RUN, 1), SamplingParams(max_tokens=outputs, structured=grammar))


class Slow(ScriptedLoop):
    """Requests with a grammar are prepared, which ends when it is told to. log: what happened, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.ready: set[str] = set()
        self.go_on = threading.Semaphore(0)

    def prepare(self, message: Generate) -> Callable[[], None] | None:
        grammar = message.params.structured
        if grammar is None or grammar.spec in self.ready:
            return None

        def work() -> None:
            assert self.go_on.acquire(timeout=60)
            self.ready.add(grammar.spec)
            if grammar.spec == "broken":
                raise RuntimeError("cannot be prepared")

        return work

    def submit(self, message: Generate) -> None:
        self.log.append(f"submit {message.id}")
        if message.params.structured is not None and message.params.structured.spec == "broken":
            raise InputError("the grammar is broken")
        super().submit(message)

    def abort(self, request_id: str) -> None:
        self.log.append(f"abort {request_id}")
        super().abort(request_id)

    def close(self) -> None:
        self.log.append("close")


class Child:
    """A driver and what it has told."""

    def __init__(self) -> None:
        self.told: list[FromChild] = []
        self.inbox: Inbox = queue.SimpleQueue()
        self.loop = Slow()
        self.driver = Driver(self.told.append, self.inbox, self.loop)

    def turn(self) -> None:
        """Take the messages that have arrived, or wait for one, and step."""
        for message in self.driver._arrived():
            self.driver._handle(message)
        if self.loop.has_work:
            self.driver._step()

    def until(self, reached: Callable[[], bool], turns: int = 5000) -> None:
        for _ in range(turns):
            if reached():
                return
            self.turn()
        raise AssertionError("never reached")

    @property
    def replies(self) -> list[Reply]:
        return [message for message in self.told if isinstance(message, Reply)]

    def ends(self) -> dict[str, Finish]:
        deltas = [d for message in self.told if isinstance(message, Deltas) for d in message.items]
        return {delta.id: delta.finish for delta in deltas if delta.finish is not None}


def test_steps_and_other_requests_go_on_while_one_is_prepared() -> None:
    child = Child()
    child.inbox.put(Submit(1, (ask("running", 50),)))
    child.inbox.put(Submit(2, (ask("slow", spec="new"),)))
    child.inbox.put(Submit(3, (ask("known", spec="ready"),)))
    child.loop.ready.add("ready")
    child.inbox.put(Submit(4, (ask("plain"),)))
    child.until(lambda: len(child.ends()) == 3)
    assert child.loop.log == ["submit running", "submit known", "submit plain"]
    assert [reply.call for reply in child.replies] == [1, 3, 4]
    child.loop.go_on.release()
    child.until(lambda: "slow" in child.ends())
    assert child.replies[-1] == Reply(2)
    assert child.loop.log[-1] == "submit slow"


def test_one_that_is_aborted_meanwhile_ends_at_once_and_its_mates_do_not() -> None:
    child = Child()
    child.inbox.put(Submit(1, (ask("a", FOREVER, "new"), ask("b", 3, "new"))))
    child.turn()
    child.inbox.put(Abort(("a", "nobody")))
    child.turn()
    child.loop.go_on.release(2)
    child.until(lambda: len(child.ends()) == 2)
    assert child.ends() == {"a": Finish.ABORT, "b": Finish.LENGTH}
    assert child.loop.log == ["submit a", "submit b", "abort a"]
    assert (child.driver._aside, child.driver._aborted) == (set(), set())


def test_what_cannot_be_prepared_is_refused_by_submit() -> None:
    child = Child()
    child.loop.go_on.release(10)
    child.inbox.put(Submit(1, (ask("bad", spec="broken"),)))
    child.inbox.put(Submit(2, (ask("good", spec="good"),)))
    child.until(lambda: "good" in child.ends())
    first, second = sorted(child.replies)
    assert str(first.error) == "the grammar is broken"
    assert second.error is None
    child.inbox.put(Control(3, "exit"))
    child.driver.run()
    assert child.loop.log[-1] == "close"


def test_a_grammar_is_compiled_beside_the_loop_and_once() -> None:
    built: list[str] = []

    class Counting(Compiler):
        def _build(self, structured: StructuredOutput):  # type: ignore[no-untyped-def]
            built.append(structured.spec)
            return super()._build(structured)

    compiler = Counting(Vocabulary.of(toy(CHATML), 300))
    grammar = StructuredOutput("regex", "[ab]c")
    assert compiler.pending(None) is None
    work = compiler.pending(grammar)
    assert work is not None
    assert built == []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert compiler.pending(grammar) is None
    assert isinstance(compiler.compile(grammar), Constraint)
    assert built == ["[ab]c"]

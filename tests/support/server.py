"""Stand-ins for the server's tests. Owns: a byte tokenizer and an engine that runs scripts in this process.

Rules: a request's output is decided by the test (`FakeEngine.script`) or echoes its prompt; nothing
depends on time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from hotprefix.engine.client import Health, Stream
from hotprefix.engine.messages import (
    Delta,
    EngineInfo,
    EngineLoad,
    EngineStats,
    FlushReport,
    Generate,
    KVSnapshot,
    Timing,
    Usage,
)
from hotprefix.engine.params import StructuredOutput
from hotprefix.engine.sampling.checker import Verdict
from hotprefix.engine.text.tools import ToolFormat, ToolParser
from hotprefix.errors import InputError
from hotprefix.kernel.plan import Finish
from hotprefix.server.app import create_app
from hotprefix.server.config import ServerConfig
from hotprefix.server.text import Tools

VOCAB = 300
CONTEXT = 4096
TURN = 256

INFO = EngineInfo(model="fake", max_model_len=CONTEXT, vocab_size=VOCAB, page_size=16, kv_tokens=CONTEXT)
STATS = EngineStats(
    running=1, waiting=2, total_pages=100, free_pages=40, owned_pages=10, evictable_pages=30,
    protected_pages=20, page_size=16, queried_tokens=1000, cached_device=600, cached_host=30,
    cached_storage=10, computed_tokens=360, generated_tokens=77, steps=9, retractions=1, evicted_pages=5,
)  # fmt: skip


LOAD = EngineLoad(
    incarnation=7, waiting=2, prefill_tokens=500, decodes=3, free=40, evictable=30, owned=10, protected=20,
    kv=None,
)  # fmt: skip


class BytesText:
    """Token = byte; 256 opens a turn. Special tokens are never read from text. Tools are told by their
    names."""

    hides_tool_marks = False

    def __init__(self) -> None:
        self.checked: list[StructuredOutput] = []

    def tool_parser(self, tools: Tools) -> ToolParser:
        return ToolParser(ToolFormat.HERMES, [tool["function"]["name"] for tool in tools])

    def forced_calls(self, tools: Tools, choice: str, *, parallel: bool) -> StructuredOutput | None:
        if choice in ("auto", "none"):
            return None
        if choice != "required" and choice.removeprefix("name:") not in [
            t["function"]["name"] for t in tools
        ]:
            raise InputError(f"no tool {choice}", param="tool_choice")
        return StructuredOutput("lark", f"{choice} {parallel}")

    def known_grammar(self, structured: StructuredOutput) -> Verdict | None:
        return None

    def judge_grammar(self, structured: StructuredOutput) -> Verdict:
        if structured.spec == "too hard":
            return Verdict("the grammar is too hard", 1.0)
        self.checked.append(structured)
        return Verdict(None, 0.01)

    def bound(self, max_tokens: int) -> None:
        pass

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self.token_bytes(token) for token in ids if token < 256).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b"<%d>" % token

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> list[int]:
        ids: list[int] = []
        for message in messages:
            content = message.get("content", "")
            text = content if isinstance(content, str) else "".join(part["text"] for part in content)
            ids += [TURN, *message["role"].encode(), *b":", *text.encode()]
        ids = [*"".join(tool["function"]["name"] for tool in tools).encode(), *ids]
        return [*ids, TURN] if add_generation_prompt else ids


Script = Callable[[Generate], Iterable[Delta]]


def words(*parts: str, finish: Finish = Finish.STOP, error: str | None = None, cached: int = 0) -> Script:
    """A script: one delta for each part (a token for each of its bytes), then the terminal one."""

    def deltas(request: Generate) -> Iterable[Delta]:
        made = 0
        for part in parts:
            made += len(part.encode())
            usage = Usage(len(request.prompt), made, cached_device=cached)
            yield Delta(request.id, part, tuple(part.encode()), usage)
        usage = Usage(len(request.prompt), made, cached_device=cached)
        yield Delta(request.id, "", (), usage, finish=finish, error=error, timing=Timing(0.5, 0.25, 1.0))

    return deltas


class FakeEngine:
    """Runs `script` for each request. hold: a request's deltas come only when `release` is called."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or words("Hello", " world")
        self.hold = False
        self.refuse: Exception | None = None
        self.ok = Health(True, "ready")
        self.flushed = FlushReport(freed=64, kept=0, running=0)
        self.seen: list[Generate] = []
        self.aborted: list[str] = []
        self.restarts = 0
        self.info = INFO
        self._held: list[tuple[Stream, Generate]] = []
        self.arrived = asyncio.Event()

    def health(self) -> Health:
        return self.ok

    async def submit(self, requests: Sequence[Generate]) -> Stream:
        if self.refuse is not None:
            raise self.refuse
        self.seen += requests
        stream = Stream(requests, self.aborted.extend)
        for request in requests:
            self._held.append((stream, request))
        self.arrived.set()
        if not self.hold:
            self.release()
        return stream

    def release(self) -> None:
        """Deliver everything, the requests' deltas interleaved."""
        held, self._held = self._held, []
        scripts = [(stream, iter(self.script(request))) for stream, request in held]
        while scripts:
            for pair in list(scripts):
                stream, deltas = pair
                delta = next(deltas, None)
                if delta is None:
                    scripts.remove(pair)
                else:
                    stream.put(delta)

    async def flush_cache(self) -> FlushReport:
        return self.flushed

    async def stats(self) -> EngineStats:
        return STATS

    async def load(self) -> EngineLoad:
        return LOAD

    async def kv_snapshot(self) -> KVSnapshot | None:
        return None


@asynccontextmanager
async def client(
    engine: FakeEngine, config: ServerConfig | None = None, headers: Mapping[str, str] | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a server over the engine, in this process."""
    app = create_app(engine, config or ServerConfig(), BytesText())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
        yield http


def events(text: str) -> list[Any]:
    """The values of an SSE body; "[DONE]" stays a string. Fails on anything that is not an event."""
    found: list[Any] = []
    assert text.endswith("\n\n")
    for block in text.removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **fields}

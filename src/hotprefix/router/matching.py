"""Requests to the keys of their pages, exactly as the engine computes them. Owns: `ModelReader`, for one
model, and `ExactMatcher`.

Rules:
1. Text becomes token ids by the server's own code, and ids become keys by the engine's own.
2. Reading never refuses and never raises: what cannot be read here may still be right for the worker. It is
   told by `exact` that the keys are not the engine's.
3. Fields that say nothing of the prompt are not looked at, so fields of other servers do no harm.
4. What is new and long, and bodies that are large, are worked on in threads, so that streams go on.
5. Of several prompts in one body the longest gives the keys. The tokens are those of all, pages that they
   share once.
6. A request that wants log-probabilities of its prompt computes all of it, so it has no keys.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

from hotprefix.errors import HotprefixError
from hotprefix.fleet.records import Keys
from hotprefix.kernel.cache.keys import root_key
from hotprefix.kernel.request import Namespace
from hotprefix.router.body_fields import choices, outputs, session, text_or_none
from hotprefix.router.key_memory import ChainedKeys
from hotprefix.router.prompt import Matcher, Prompt
from hotprefix.router.token_memory import RememberingTokenizer, TooMuchIsNew
from hotprefix.server import chat, completions
from hotprefix.server.bodies import bounded, check, load
from hotprefix.server.config import ServerConfig
from hotprefix.server.errors import ApiError
from hotprefix.server.guard import salt
from hotprefix.server.model_text import ModelText
from hotprefix.server.schemas import Completion, Conversation
from hotprefix.server.text import Text

log = logging.getLogger(__name__)

INLINE_BYTES = 256 * 1024
INLINE_MESSAGES = 200
INLINE_NEW = 4096
LARGE_BYTES = 1024 * 1024
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_OF_CHAT = frozenset(Conversation.model_fields) - {"model"}
_OF_COMPLETION = ("prompt", "add_special_tokens")


class ModelReader:
    """Reads the prompts of one model.

    text: the server's text side of the model.
    page_size: of the workers. fingerprint: what their namespaces begin with (`Namespace.model`).
    tokenizer: the one behind `text`, if it remembers.
    adapters: names of models that are this one with an adapter.
    """

    def __init__(
        self, text: Text, page_size: int, fingerprint: str, tokenizer: RememberingTokenizer | None = None,
        adapters: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self._text, self._page_size, self._fingerprint = text, page_size, fingerprint
        self._tokenizer, self._adapters = tokenizer, adapters
        self._keys = ChainedKeys(page_size)

    @classmethod
    def load(cls, path: Path, page_size: int, fingerprint: str, max_model_len: int | None = None) -> Self:
        """From a model's files. max_model_len: longer texts are not tokenized. Raises ModelLoadError."""
        tokenizer = RememberingTokenizer.load(path)
        text = ModelText(tokenizer)
        if max_model_len is not None:
            text.bound(max_model_len)
        return cls(text, page_size, fingerprint, tokenizer)

    def read(
        self, path: str, value: Mapping[str, Any], tenant: str | None, *, short: bool
    ) -> tuple[Keys, int]:
        """The keys of the prompt's complete pages, and its tokens. value: the body. short: do no more than
        takes a moment. Raises InputError or ApiError for what the server would refuse, and TooMuchIsNew."""
        tokenizer = self._tokenizer
        with tokenizer.in_short(INLINE_NEW) if short and tokenizer is not None else nullcontext():
            prompts = self._prompts(path, value)
        cache_salt = value.get("cache_salt")
        model = value.get("model")
        adapter = model if model in self._adapters else None
        name = salt(tenant, cache_salt if isinstance(cache_salt, str) else None)
        state = root_key(Namespace(self._fingerprint, adapter, None, name), self._page_size)
        if len(prompts) == 1:
            return self._keys.keys(state, _encoded(prompts[0])), len(prompts[0])
        found = [self._keys.keys(state, _encoded(ids)) for ids in prompts]
        pages = {key for keys in found for key in keys}
        shared = sum(map(len, found)) - len(pages)
        return max(found, key=len), sum(map(len, prompts)) - shared * self._page_size

    def _prompts(self, path: str, value: Mapping[str, Any]) -> Sequence[Sequence[int]]:
        if path == CHAT:
            fields = {name: value[name] for name in _OF_CHAT if name in value}
            return [chat.rendered(check(Conversation, fields), self._text)]
        fields = {name: value[name] for name in _OF_COMPLETION if name in value}
        return completions.prompts_of(check(Completion, fields), self._text)


def _encoded(ids: Sequence[int]) -> bytes:
    """As `kernel.tokens.encode`, in a half of the time. Raises struct.error if an id does not fit."""
    return struct.pack(f"<{len(ids)}i", *ids)


class ExactMatcher:
    """A `Matcher` for models whose tokenizer is here.

    reader_of: the reader of a model, by the name that the client gave; None = there is none.
    otherwise: reads what no reader can.
    config: limits of bodies.
    """

    def __init__(
        self, reader_of: Callable[[str | None], ModelReader | None], otherwise: Matcher,
        config: ServerConfig | None = None,
    ) -> None:  # fmt: skip
        self._reader_of, self._otherwise = reader_of, otherwise
        self._config = config or ServerConfig()
        self._between = ThreadPoolExecutor(1, "prompts")
        self._large = ThreadPoolExecutor(1, "large-prompts")

    def close(self) -> None:
        self._between.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)

    async def read(self, path: str, body: bytes, headers: Mapping[str, str], tenant: str | None) -> Prompt:
        """See `Matcher`."""
        if path not in (CHAT, COMPLETION):
            return await self._otherwise.read(path, body, headers, tenant)
        try:
            prompt = await self._read(path, body, headers, tenant)
        except (HotprefixError, ApiError, RecursionError, struct.error):
            prompt = None  # the worker will say what is wrong, if it is wrong for the worker
        except Exception:
            log.exception("a prompt could not be read: this is a fault of the router")
            prompt = None
        return await self._otherwise.read(path, body, headers, tenant) if prompt is None else prompt

    async def _read(
        self, path: str, body: bytes, headers: Mapping[str, str], tenant: str | None
    ) -> Prompt | None:
        if len(body) <= INLINE_BYTES:
            try:
                return self._exact(path, body, headers, tenant, short=True)
            except TooMuchIsNew:
                pass
        lane = self._between if len(body) <= LARGE_BYTES else self._large
        run = asyncio.get_running_loop().run_in_executor
        return await run(lane, lambda: self._exact(path, body, headers, tenant, short=False))

    def _exact(
        self, path: str, body: bytes, headers: Mapping[str, str], tenant: str | None, *, short: bool
    ) -> Prompt | None:
        """None if there is no reader. Raises TooMuchIsNew."""
        bounded(body, self._config)
        value = load(body, self._config)
        model = text_or_none(value.get("model"))
        reader = self._reader_of(model)
        if reader is None:
            return None
        messages = value.get("messages")
        if short and isinstance(messages, list) and len(messages) > INLINE_MESSAGES:
            raise TooMuchIsNew
        keys, tokens = reader.read(path, value, tenant, short=short)
        return Prompt(
            () if _computes_all(value) else keys, tokens, outputs(value), model, session(value, headers),
            value.get("stream") is True, choices(value), exact=True,
        )  # fmt: skip


def _computes_all(value: Mapping[str, Any]) -> bool:
    """Whether the engine takes nothing of the prompt from its cache (rule 6)."""
    echoes = value.get("echo") is True and value.get("logprobs") not in (None, False)
    return value.get("prompt_logprobs") is not None or echoes

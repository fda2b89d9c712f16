"""Which tokenizer reads a request. Owns: `Readers`, the readers of the models whose tokenizer files are here.

Rules:
1. A model is read by its own tokenizer, or not at all: the files' name must be what the workers say that they
   serve. For any other model there is no reader, and text pieces stand in (matching_text.py).
2. A reader is made once for a pool's namespace and page size, in a thread, because that takes a second. Until
   it is there, the same holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from hotprefix.engine.model.files import ModelFiles, resolve_model
from hotprefix.errors import ModelLoadError
from hotprefix.router.matching import ModelReader
from hotprefix.router.pools import Pool, Pools
from hotprefix.router.worker import Say
from hotprefix.server.errors import ApiError

_Key = tuple[str, str, int]


class Readers:
    """See the module's rules. Raises ModelLoadError if files of `tokenizers` cannot be found."""

    def __init__(self, tokenizers: Iterable[str], pools: Pools, say: Say) -> None:
        self._files: dict[str, ModelFiles] = {files.name: files for files in map(resolve_model, tokenizers)}
        self._pools, self._say = pools, say
        self._ready: dict[_Key, ModelReader | None] = {}
        self._loading: dict[_Key, asyncio.Task[None]] = {}

    async def begin(self) -> None:
        """Load those of the pools that there are."""
        for pool in list(self._pools.all.values()):
            self._of(pool)
        await asyncio.gather(*self._loading.values())

    async def close(self) -> None:
        """End every task."""
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)

    def of(self, model: str | None) -> ModelReader | None:
        """The reader for a request that names this model; None if there is none, or not yet."""
        if not self._files:
            return None
        try:
            return self._of(self._pools.of(model))
        except ApiError:
            return None

    def _of(self, pool: Pool) -> ModelReader | None:
        files = self._files.get(pool.model)
        if files is None:
            return None
        key = pool.model, pool.fingerprint, pool.page_size
        if key not in self._ready and key not in self._loading:
            task = self._loading[key] = asyncio.ensure_future(self._load(key, files))
            task.add_done_callback(lambda _: self._loading.pop(key))
        return self._ready.get(key)

    async def _load(self, key: _Key, files: ModelFiles) -> None:
        model, fingerprint, page_size = key
        try:
            reader = await asyncio.to_thread(ModelReader.load, files.path, page_size, fingerprint)
        except ModelLoadError as error:
            self._say(f"model {model}: its tokenizer does not load, so texts are compared by pieces: {error}")
            reader = None
        else:
            self._say(f"model {model}: prompts are read exactly, in pages of {page_size} tokens")
        self._ready[key] = reader

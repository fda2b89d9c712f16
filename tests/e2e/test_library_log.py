"""The engine as a library writes the records that it is asked for, or says that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotprefix.engine.config import EngineConfig
from hotprefix.engine.llm import LLM
from hotprefix.engine.params import SamplingParams
from hotprefix.errors import ConfigError
from hotprefix.records.open_recorder import open_recorder
from hotprefix.records.read_log import ReadReport, read_log


def test_a_library_engine_writes_the_log_that_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    config = EngineConfig(events=str(path), kv_tokens=256, threads=1)
    with pytest.raises(ConfigError, match="observer"):
        LLM(config)
    with LLM(config, observer=open_recorder(config)) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0.0))
    told = [record.k for record in read_log(path, ReadReport())]
    assert told[0] == "header"
    assert {"enqueue", "request", "first_token", "finish", "step"} <= set(told)

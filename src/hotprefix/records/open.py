"""From settings to a recorder. Owns: `open_recorder`.

Rule: reads no environment. A recorder always counts which prefixes are hot; log and KV events are asked
for.
"""

from __future__ import annotations

from pathlib import Path

from hotprefix.engine.config import EngineConfig
from hotprefix.records.fingerprint import load_key
from hotprefix.records.kvevents import Form, KVPublisher
from hotprefix.records.recorder import Recorder, RecordOptions


def open_recorder(config: EngineConfig) -> Recorder:
    """What an engine with these settings is watched by. Raises ConfigError (the key file)."""
    address, replay, form = config.kv_events, config.kv_events_replay, Form(config.kv_events_form)
    return Recorder(
        RecordOptions(
            key=load_key(Path(config.events_key_file) if config.events_key_file else None),
            events=Path(config.events) if config.events else None,
            make_publisher=(lambda: KVPublisher(address, replay, form=form)) if address else None,
            kv_tokens=config.kv_events_tokens,
        )
    )

"""From settings to a recorder. Owns: `open_recorder`, `needs_otel`.

Rules:
1. Nothing here reads the environment; the OpenTelemetry SDK reads its own variables.
2. A recorder always counts which prefixes are hot. Log, KV events and spans are there only if asked for.
3. If something that they need is missing, that is an error here, before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hotprefix.engine.config import EngineConfig
from hotprefix.errors import ConfigError
from hotprefix.records.fingerprint import load_key
from hotprefix.records.kvevents import KVPublisher, check_addresses
from hotprefix.records.kvwire import Form
from hotprefix.records.parts import check_place
from hotprefix.records.recorder import Recorder, RecordOptions

if TYPE_CHECKING:
    from hotprefix.records.spans import Spans


def open_recorder(config: EngineConfig) -> Recorder:
    """The recorder of an engine with these settings. Raises ConfigError if the log, the key file, the
    addresses or the spans cannot be had."""
    events = Path(config.events) if config.events else None
    if events is not None:
        check_place(events)
    address, replay = config.kv_events, config.kv_events_replay
    form, topic = Form(config.kv_events_form), config.kv_events_topic
    if address is not None:
        check_addresses(address, replay)
    return Recorder(
        RecordOptions(
            key=load_key(Path(config.events_key_file) if config.events_key_file else None),
            events=events,
            make_publisher=(lambda: KVPublisher(address, replay, form=form, topic=topic))
            if address
            else None,
            kv_tokens=config.kv_events_tokens,
            spans=_spans(config.otel) if config.otel is not None else None,
        )
    )


def _spans(url: str) -> Spans:
    with needs_otel(url):
        from hotprefix.records.spans import open_spans
    return open_spans(url)


@contextmanager
def needs_otel(url: str) -> Iterator[None]:
    """What is imported in this context needs the extra `otel`. Raises ConfigError if it is missing."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"otel={url!r} needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http: "
            "pip install 'hotprefix[otel]'",
            param="otel",
        ) from error

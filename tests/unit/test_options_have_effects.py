"""No option is without effect: a walk over every field of the configurations.

Of the kernel's fields, each changes what is planned or what becomes of requests, everything else being equal.
Of the engine's, each reaches the kernel's configuration or the part that is named here.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import pytest
import torch

from hotprefix.definitions import Slo
from hotprefix.engine import build
from hotprefix.engine.build import build_engine
from hotprefix.engine.config import EngineConfig
from hotprefix.engine.groups import kernel_config
from hotprefix.errors import ConfigError, ContextLengthExceeded, QueueFull
from hotprefix.kernel.config import (
    Eviction,
    Flight,
    KernelConfig,
    LayerGroup,
    Order,
    Prefetch,
    Publication,
    Refresh,
    TierConfig,
    Write,
)
from hotprefix.options import settings
from hotprefix.records import open_recorder as records
from hotprefix.server.config import ServerConfig
from tests.support.drive import Driver
from tests.support.fake import VOCAB
from tests.unit.test_groups_models import shaped

PAGE = 4
BASES = [[(11 * i + 17 * b) % VOCAB for i in range(60)] for b in range(4)]

# -- the kernel ---------------------------------------------------------------------------------------


def traffic(seed: int, alike: bool = False, **settings: Any) -> Any:
    """What came of random requests: sessions, priorities, failures, aborts, flushes, few pages, a slow store.
    alike: their prompts are one, and many of them are aborted."""
    r = random.Random(seed)
    d = Driver(
        **({"total_pages": 30, "page_size": PAGE, "max_running": 4, "max_batched_tokens": 32} | settings)
    )
    d.storage_delay, d.storage_seconds = 3, 2.0
    refused = []
    for number in range(70):
        what = r.choices(
            ["submit", "step", "abort", "fail", "flush"], [10, 8, 6 if alike else 0.6, 0.6, 0.6]
        )[0]
        name, prompt = f"r{number}", [*r.choice(BASES)[: r.randint(1, 60)], r.randrange(VOCAB)]
        prompt = BASES[0] if alike else prompt
        chosen = {"priority": r.randrange(3), "session": r.choice([None, "s", "t"]), "hold_s": 30.0}
        outputs, victim, steps = r.randint(1, 12), r.random(), r.randint(1, 4)
        if what == "submit":
            try:
                d.submit(name, prompt, outputs, None, **chosen)
            except (ContextLengthExceeded, QueueFull) as error:
                refused.append((name, str(error)))
        elif what == "abort":
            live = [one for one in d.prompts if one not in d.finish]
            if live:
                d.abort(live[int(victim * len(live))])
        elif what == "flush":
            d.kernel.flush(d.now)
        else:
            d.executor.fail_next = 3 if what == "fail" else 0
            for _ in range(steps):
                d.step()
    d.run()
    return d.plans, d.finish, d.cached, refused


TIERS = TierConfig(
    pages=60, storage=True, min_restore_pages=1, min_fetch_pages=1, compute_s_per_token=1.0,
    restore_s_per_page=0.001, fetch_s_per_page=0.001,
)  # fmt: skip
EXACT = {"flight": Flight.EXACT_FINISH, "publication": Publication.FINISH, "alike": True}
WINDOW = LayerGroup(20, 8)
# Field: what else is set, and two values of it that must not come to the same.
KERNEL: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "total_pages": ({}, 30, 40),
    "page_size": ({}, 4, 2),
    "max_batched_tokens": ({}, 32, 16),
    "max_running": ({}, 4, 2),
    "max_waiting": ({}, 0, 3),
    "prefix_cache": ({}, True, False),
    "publication": ({}, Publication.SCHEDULE, Publication.FINISH),
    "flight": ({"publication": Publication.STEP}, Flight.COALESCED, Flight.NONE),
    "order": ({}, Order.FCFS, Order.LPM),
    "eviction": ({}, Eviction.LRU, Eviction.LFU),
    "preemption": ({"order": Order.PRIORITY}, False, True),
    "max_overtakes": ({"order": Order.SPF}, 32, 1),
    "lookahead": ({}, 8, 0),
    "output_reserve": ({}, 0.25, 1.0),
    "max_elections": (EXACT, 3, 0),
    "max_step_failures": ({}, 2, 0),
    "refresh": ({}, Refresh.WINDOW, Refresh.OFF),
    "refresh_window": ({}, 128, 1),
    "refresh_every": ({}, 1, 5),
    "session_pages": ({}, 0, 10),
    "tiers": ({}, None, TIERS),
    "groups": ({}, (), (WINDOW,)),
}
TIER: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "pages": ({}, 60, 20),
    "storage": ({}, True, False),
    "write": ({}, Write.THROUGH, Write.BACK),
    "prefetch": ({}, Prefetch.TIMEOUT, Prefetch.BEST_EFFORT),
    "prefetch_timeout_s": ({}, 1.0, 10.0),
    "min_restore_pages": ({}, 1, 8),
    "min_fetch_pages": ({}, 1, 12),
    "fetch_window": ({"prefetch": Prefetch.WAIT_COMPLETE}, 32, 1),
    "compute_s_per_token": ({}, 1.0, 1e-9),
    "restore_s_per_page": ({}, 0.001, 1e6),
    "fetch_s_per_page": ({"prefetch": Prefetch.WAIT_COMPLETE}, 0.001, 1e6),
}


def names(kind: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_the_walks_leave_out_no_field() -> None:
    assert set(KERNEL) == names(KernelConfig)
    assert set(TIER) == names(TierConfig)
    assert set(ENGINE) | set(REACH_THE_KERNEL) == names(EngineConfig)
    assert not set(ENGINE) & set(REACH_THE_KERNEL)


@pytest.mark.parametrize("name", KERNEL)
def test_every_field_of_the_kernel_changes_what_happens(name: str) -> None:
    with_, one, other = KERNEL[name]
    differs = (traffic(s, **with_, **{name: one}) != traffic(s, **with_, **{name: other}) for s in range(40))
    assert any(differs)


@pytest.mark.parametrize("name", TIER)
def test_every_field_of_the_tiers_changes_what_happens(name: str) -> None:
    with_, one, other = TIER[name]
    tiers = [dataclasses.replace(TIERS, **with_, **{name: value}) for value in (one, other)]
    assert any(traffic(s, tiers=tiers[0]) != traffic(s, tiers=tiers[1]) for s in range(40))


# -- the engine ---------------------------------------------------------------------------------------

# Field: what else is set, and a value other than the default that must give another kernel configuration.
REACH_THE_KERNEL: dict[str, tuple[dict[str, Any], Any]] = {
    "kv_tokens": ({}, 1024),
    "page_size": ({}, 8),
    "prefix_cache": ({}, False),
    "publication": ({}, "finish"),
    "flight": ({}, "none"),
    "order": ({}, "lpm"),
    "eviction": ({}, "slru"),
    "preemption": ({"order": "priority"}, True),
    "max_batched_tokens": ({}, 512),
    "max_running": ({}, 3),
    "max_waiting": ({}, 5),
    "refresh": ({}, "off"),
    "refresh_window": ({}, 9),
    "refresh_every": ({}, 2),
    "lookahead": ({}, 0),
    "session_tokens": ({}, 256),
    "l2_tokens": ({}, 1024),
    "l3": ({"l2_tokens": 1024}, "file:///tmp/pages"),
    "write": ({"l2_tokens": 1024}, "back"),
    "prefetch": ({"l2_tokens": 1024, "l3": "file:///tmp/pages"}, "wait_complete"),
    "prefetch_timeout_s": ({"l2_tokens": 1024, "l3": "file:///tmp/pages"}, 9.0),
    "min_restore_tokens": ({"l2_tokens": 1024}, 256),
    "min_fetch_tokens": ({"l2_tokens": 1024, "l3": "file:///tmp/pages"}, 256),
}


class _LoadedError(Exception):
    """What the model would have been loaded with."""


def loads_with(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    costs: list[str] = []

    def load(*args: Any, progress: Any, **more: Any) -> Any:
        raise _LoadedError(str(args[0].name), args[1:], more, torch.get_num_threads(), costs)

    monkeypatch.setattr(build, "load_cost", costs.append)

    monkeypatch.setattr(build, "load_model", load)
    monkeypatch.setattr(
        build, "resolve_model", lambda model: type("Files", (), {"name": model, "path": model})
    )
    with pytest.raises(_LoadedError) as caught:
        build_engine(config)
    return caught.value.args


def described(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    class _Decoder:
        config, dtype, device, quantised_linears = shaped(None), torch.float32, "cpu", ()

    class _Loaded:
        decoder, fingerprint = _Decoder(), "f"

    return build._info(config, config.kernel(), "m", _Loaded(), None)  # type: ignore[arg-type]


def groups(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    return kernel_config(config, shaped(None, 512)).groups


def recorded(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a recorder is made with."""
    made: list[Any] = []
    monkeypatch.setattr(records, "check_addresses", lambda *given: made.append(given))
    monkeypatch.setattr(records, "check_place", made.append)
    monkeypatch.setattr(records, "load_key", lambda path: b"%a" % str(path))
    monkeypatch.setattr(records, "KVPublisher", lambda *given, **more: made.append((given, more)))
    monkeypatch.setattr(records, "_spans", lambda url: made.append(url))
    options = records.open_recorder(config)._options
    if options.make_publisher is not None:
        options.make_publisher()
    return made, options.key, options.events, options.kv_tokens


def objectives(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the loop over a loaded model is told to count by."""
    monkeypatch.setattr(build, "EngineLoop", lambda *_, slo, **more: slo)
    return build_engine(config)


PRESET = "llama-3.1-8b.1xh100.fp8"


def told(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What an engine tells of itself."""
    return build_engine(config).info


Reader = Callable[[EngineConfig, pytest.MonkeyPatch], Any]
KV = {"kv_events": "tcp://127.0.0.1:*"}
ENGINE: dict[str, tuple[dict[str, Any], Any, Reader]] = {
    "model": ({}, "other", loads_with),
    "dtype": ({}, "bfloat16", loads_with),
    "device": ({}, "cpu", loads_with),
    "decode_weights": ({}, "dense", loads_with),
    "threads": ({}, 1, loads_with),
    "max_model_len": ({}, 100, described),
    "window_tokens": ({}, 1024, groups),
    "events": ({}, "log.jsonl", recorded),
    "events_key_file": ({}, "key", recorded),
    "kv_events": ({}, "tcp://127.0.0.1:*", recorded),
    "kv_events_replay": (KV, "tcp://127.0.0.1:*", recorded),
    "kv_events_form": (KV, "arrays", recorded),
    "kv_events_topic": (KV, "kv", recorded),
    "kv_events_tokens": (KV, True, recorded),
    "otel": ({}, "http://127.0.0.1:4318", recorded),
    "cost": ({}, PRESET, loads_with),
    "capacity": ({}, 2.5, described),
    "paced": ({"paced": "smollm2-135m.cpu-1-thread"}, PRESET, told),
    "pace_factor": ({"paced": PRESET}, 2.5, told),
    "slo": ({"kv_tokens": 1024}, Slo(ttft_s=1.0), objectives),
}


@pytest.mark.parametrize("name", REACH_THE_KERNEL)
def test_every_policy_and_size_reaches_the_kernel(name: str) -> None:
    with_, value = REACH_THE_KERNEL[name]
    assert EngineConfig(**with_).kernel() != EngineConfig(**with_, **{name: value}).kernel()


@pytest.mark.parametrize("name", ENGINE)
def test_every_other_option_reaches_its_reader(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_, value, reader = ENGINE[name]
    threads = torch.get_num_threads()
    try:
        usual = reader(EngineConfig(**with_), monkeypatch)
        assert usual != reader(EngineConfig(**(with_ | {name: value})), monkeypatch)
    finally:
        torch.set_num_threads(threads)


NEEDS = {one.name: one.option.needs[0] for one in settings(EngineConfig) if one.option.needs}
POLICIES = {one.name: one.kind for one in settings(EngineConfig) if issubclass(one.kind, StrEnum)}


@pytest.mark.parametrize("name", NEEDS)
def test_an_option_without_what_it_needs_is_refused(name: str) -> None:
    value = {**{key: held[1] for key, held in {**REACH_THE_KERNEL, **ENGINE}.items()}}[name]
    says = f"{name}={value!r} does nothing without {NEEDS[name]}"
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
        EngineConfig(**{name: value})


def test_a_switch_can_be_thrown_alone() -> None:
    EngineConfig(refresh=Refresh.OFF, refresh_window=9, refresh_every=2)
    EngineConfig(prefix_cache=False, eviction=Eviction.SLRU, l2_tokens=1024, session_tokens=256)


# -- refused, because nothing would come of it ---------------------------------------------------------


def test_reuse_is_refused_for_an_engine_as_nothing_predicts_there() -> None:
    for value in (Eviction.REUSE, "reuse"):
        with pytest.raises(
            ConfigError, match=r"eviction='reuse' .* no part of the engine predicts.*give lru"
        ):
            EngineConfig(eviction=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_given_as_texts_or_members(name: str) -> None:
    kind = POLICIES[name]
    needs = {"write": {"l2_tokens": 1024}, "prefetch": {"l2_tokens": 1024, "l3": "file:///tmp/pages"}}
    for member in kind:
        if member is Eviction.REUSE:
            continue
        found = [EngineConfig(**needs.get(name, {}), **{name: value}) for value in (member, member.value)]
        assert found[0] == found[1]
        assert getattr(found[1], name) is member
    for wrong in ("lifo", kind.__name__, 5, None):
        with pytest.raises(ConfigError, match=rf"^{name}={wrong!r}: give one of {next(iter(kind))}, "):
            EngineConfig(**{name: wrong})


@pytest.mark.parametrize(
    "asked", [{"events": "log.jsonl"}, {"kv_events": "tcp://127.0.0.1:*"}, {"otel": "http://127.0.0.1:4318"}]
)
def test_records_without_an_observer_are_refused_before_a_model_is_looked_for(asked: dict[str, Any]) -> None:
    config = EngineConfig(model="no/such/model", **asked)
    with pytest.raises(ConfigError, match=rf"{next(iter(asked))}=.*observer=.*open_recorder"):
        build_engine(config)


def test_isolating_keys_needs_keys() -> None:
    with pytest.raises(ConfigError, match="isolate_keys: there are no keys"):
        ServerConfig(isolate_keys=True)

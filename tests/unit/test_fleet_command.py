"""`hotprefix fleet`: what its children are started with, and when one that died is started again."""

from __future__ import annotations

import asyncio
import inspect
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotprefix import cli
from hotprefix.commands.fleet import fleet
from hotprefix.errors import EngineDead, InputError
from hotprefix.localfleet import arguments
from hotprefix.localfleet.arguments import Engine, Typed, share
from hotprefix.localfleet.children import Child, Children
from hotprefix.localfleet.config import LocalFleetConfig
from hotprefix.localfleet.fleet import LocalFleet
from hotprefix.localfleet.lives import LONG_S, Lives
from tests.unit.test_serve_options import KEYS, WITH, another

OPTIONS = inspect.signature(fleet).parameters
USUAL = {name: each.default for name, each in OPTIONS.items()}
OF_THE_FLEET = {"workers", "restarts", "port"}
ENGINES = [Engine("worker-0", 1001), Engine("worker-1", 1002)]
PACED = {"paced": "llama-3.1-8b.1xh100.fp8"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What serve and route are started with."""
    found: list[Any] = []
    for name in ("hotprefix.server.serve.serve", "hotprefix.router.serve.route"):
        monkeypatch.setattr(name, lambda *given: found.append(given))
    monkeypatch.setattr("hotprefix.localfleet.run.run_fleet", lambda *given: found.append(given))
    return found


def run(started: list[Any], *commands: list[str]) -> list[Any]:
    started.clear()
    for command in commands:
        done = CliRunner().invoke(cli.app, command)
        assert done.exit_code == 0, (command, done.exception)
    return list(started)


def commands(given: dict[str, Any], key: Path) -> tuple[list[str], list[str]]:
    typed = Typed(given, 2, key)
    return typed.engine(ENGINES[0]), typed.router(8000, ENGINES)


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - OF_THE_FLEET))
def test_every_option_reaches_an_engine_or_the_router(name: str, started: list[Any], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    values = {"admin_key_file": KEYS, "max_connections": 7, "threads": 5, "policy": "affinity"}
    value = values.get(name) or another(name, USUAL[name])
    with_ = {**USUAL, **WITH.get(name, {})}
    before = run(started, *commands(with_, key))
    assert before != run(started, *commands({**with_, name: value}, key)), name


def test_options_of_no_one_are_not_offered() -> None:
    """What the fleet decides itself."""
    decided = {"kv_events", "kv_events_replay", "internal_key_file", "worker", "worker_file"}
    assert not decided & OPTIONS.keys()


def test_engines_listen_on_loopback_and_tell_the_router_what_they_cache(
    started: list[Any], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    given = {**USUAL, "host": "0.0.0.0", "events": Path("out/log.jsonl"), "allowed_host": ["a"]}
    (engine, server), (router, outside) = run(started, *commands(given, key))
    assert (server.host, server.port, server.allowed_hosts) == ("127.0.0.1", 1001, ())
    assert (outside.host, outside.port, outside.allowed_hosts) == ("0.0.0.0", 8000, ("a",))
    assert engine.kv_events == engine.kv_events_replay == "tcp://127.0.0.1:*"
    assert engine.events == "out/log-worker-0.jsonl"
    assert server.internal_digest is not None
    assert router.internal_key == "secret"
    assert [text.split(",")[0] for text in router.workers] == [each.url for each in ENGINES]
    assert server.key_digests == outside.key_digests == frozenset()


def test_with_keys_nobody_goes_past_the_router(started: list[Any], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    (_, server), (router, outside) = run(started, *commands({**USUAL, "api_key_file": KEYS}, key))
    assert len(server.key_digests) == len(outside.key_digests) == 1
    assert server.key_digests != outside.key_digests
    assert all(text.endswith(f",key-file={key}") for text in router.workers)


def test_engines_share_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "cores", lambda: 8)
    assert share(USUAL, 2) == {"threads": 4, "kv_tokens": 16384}
    assert share(USUAL, 16) == {"threads": 1, "kv_tokens": 8192}
    assert share({**USUAL, "page_size": 48}, 2)["kv_tokens"] == 48 * 341
    assert share({**USUAL, "threads": 3, "kv_tokens": 999}, 2) == {}
    assert share({**USUAL, **PACED}, 2) == {}


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--workers 0", "--workers 0: give a whole number >= 1"),
        ("--restarts -1", "--restarts -1: give a whole number >= 0"),
        ("--policy predict", "--policy predict: give one of"),
        ("--order fcsf", "--order fcsf: give one of"),
        ("--poll 0", "--poll 0.0: give seconds > 0"),
        ("--paced llama-3.1-8b.1xh100.fp8 --threads 2", "--threads 2 does nothing with paced"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(typed: str, says: str, started: list[Any]) -> None:
    error = CliRunner().invoke(cli.app, ["fleet", *typed.split()]).exception
    assert isinstance(error, InputError)
    assert str(error).startswith(says), str(error)
    assert not started


def test_pauses_grow_and_end() -> None:
    lives = Lives(8)
    pauses = []
    for _ in range(9):
        lives.begins(0.0)
        pauses.append(lives.ended(LONG_S - 1))
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, None]


def test_a_long_life_ends_the_row() -> None:
    lives = Lives(2)
    found = []
    for took in (1.0, 1.0, LONG_S, 1.0, 1.0):
        lives.begins(100.0)
        found.append(lives.ended(100.0 + took))
    assert found == [0.0, 1.0, 0.0, 1.0, None]
    assert Lives(0).ended(1.0) is None


async def test_a_child_that_ends_again_and_again_is_given_up(tmp_path: Path) -> None:
    said: list[str] = []
    children = Children(tmp_path, 1, said.append)
    child = children.start("one", ["trace", "published"])
    await child.over.wait()
    assert said[-2:] == [
        "one: ended with status 0; starts again",
        "one: ended with status 0 too often, and is not started again",
    ]
    assert children.why is None
    await children.close()


async def test_a_child_that_refuses_its_options_ends_the_fleet(tmp_path: Path) -> None:
    children = Children(tmp_path, 5, lambda line: None)
    child = children.start("one", ["route"])
    await children.failed.wait()
    assert isinstance(children.why, InputError)
    assert "there is no worker" in str(children.why)
    await child.over.wait()
    await children.close()


async def test_a_fleet_without_engines_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its folder and key are for this user only, and go with it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    async with LocalFleet(LocalFleetConfig(1, 0), USUAL, lambda line: None) as fleet:
        (folder,) = tmp_path.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
        monkeypatch.setattr(fleet.typed, "engine", lambda engine, **other: ["trace", "published"])
        with pytest.raises(EngineDead, match="every engine died too often"):
            await _up_for_ever(fleet)
    assert not list(tmp_path.iterdir())


async def test_the_last_engines_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalFleet(LocalFleetConfig(3), {**USUAL, **PACED}, lambda line: None) as fleet:
        started: list[tuple[str, Any]] = []

        def start(name: str, command: list[str]) -> Child:
            started.append((name, "--pace-factor=2.0" in command))
            child = Child(name, command, Lives(0))
            child.settled.set()
            return child

        monkeypatch.setattr(fleet.children, "start", start)
        await fleet.start_engines({"pace_factor": 2.0})
        assert started == [("worker-0", False), ("worker-1", False), ("worker-2", True)]
        assert len({engine.port for engine in fleet.engines}) == 3


async def _up_for_ever(fleet: LocalFleet) -> None:
    await fleet.start_engines()
    await fleet.going(asyncio.Event().wait())

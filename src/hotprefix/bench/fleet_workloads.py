"""What a fleet is asked in the bench. Owns: the five workloads as plain data.

Rules: a workload is a set of lines; a line asks one prompt after another, each some time after the answer to
the one before. `seed` decides the shape (arrivals, choices), which is the same for all arms of a run; `salt`
decides the texts, which are fresh for each arm and run, so that nothing cached or remembered helps. The
answers in a conversation's history are scripted, so every arm gets the same work. Units: tokens, seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from hotprefix.bench.bench_prompts import Ids, Material
from hotprefix.bench.workloads import Submission


class FleetName(StrEnum):
    """The workloads, in the order in which they run."""

    BURST = "burst"
    DOCUMENT = "document"
    SESSIONS = "sessions"
    MIXED = "mixed"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. think_s: from the answer before it, or from the line's start."""

    think_s: float
    prompt: Ids


@dataclass(frozen=True, slots=True)
class Line:
    """One client. start_s: from the workload's start."""

    start_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class FleetWorkload:
    """outputs: of each request. kills: a worker is killed once half of the lines have had a first token."""

    name: FleetName
    title: str
    about: str
    lines: tuple[Line, ...]
    outputs: int
    kills: bool = False

    @property
    def submissions(self) -> tuple[Submission, ...]:
        """Its requests, as `request_costs.required` takes them."""
        return tuple(
            Submission(f"{at}/{turn}", "all", each.prompt, self.outputs, False)
            for at, line in enumerate(self.lines)
            for turn, each in enumerate(line.turns)
        )


@dataclass(frozen=True, slots=True)
class FleetScale:
    """How large a run is. rate: requests a second of document and mixed."""

    groups: int = 4
    copies: int = 8
    prompt: int = 532
    questions: int = 24
    document: int = 1200
    sessions: int = 12
    turns: int = 6
    requests: int = 40
    prefixes: int = 10
    streams: int = 16
    outputs: int = 16
    long: int = 128
    rate: float = 4.0
    think_s: float = 0.5


FULL = FleetScale()
QUICK = FleetScale(
    groups=2, copies=4, questions=8, document=400, sessions=4, turns=3, requests=12, prefixes=3, streams=8,
    outputs=4, long=48, rate=20.0, think_s=0.05,
)  # fmt: skip
QUESTION = 24


def build(name: FleetName, material: Material, scale: FleetScale, seed: str, salt: str) -> FleetWorkload:
    """One workload at a scale."""
    return _MAKERS[name](material, scale, random.Random(f"{name}/{seed}"), f"{name} {salt}")


def _burst(material: Material, scale: FleetScale, rng: random.Random, salt: str) -> FleetWorkload:
    groups = [_prompt(material, f"{salt} {n}", 0, scale.prompt) for n in range(scale.groups)]
    prompts = groups * scale.copies
    rng.shuffle(prompts)  # in turn would suit, or hurt, a router that counts
    return FleetWorkload(
        FleetName.BURST, "Burst: identical cold prompts at once",
        f"{scale.groups} prompts of {scale.prompt} tokens, {scale.copies} times each, all together.",
        tuple(_one(n * 1e-4, each) for n, each in enumerate(prompts)), scale.outputs,
    )  # fmt: skip


def _document(material: Material, scale: FleetScale, rng: random.Random, salt: str) -> FleetWorkload:
    prompts = [_prompt(material, salt, n, scale.document + QUESTION) for n in range(scale.questions)]
    return FleetWorkload(
        FleetName.DOCUMENT, "Document: different questions about one document",
        f"{scale.questions} questions about a document of {scale.document} tokens, {scale.rate:g} a second.",
        _arriving(prompts, scale.rate, rng), scale.outputs,
    )  # fmt: skip


def _sessions(material: Material, scale: FleetScale, rng: random.Random, salt: str) -> FleetWorkload:
    lines = []
    for number in range(scale.sessions):
        turns: list[Turn] = []
        for turn in range(scale.turns):
            think = rng.expovariate(1 / scale.think_s) if turn else 0.0
            turns.append(Turn(think, material.document(f"{salt} {number}", 90 + 140 * turn)))
        lines.append(Line(rng.uniform(0, scale.think_s), tuple(turns)))
    return FleetWorkload(
        FleetName.SESSIONS, "Sessions: growing conversations",
        f"{scale.sessions} conversations of {scale.turns} turns, each 140 tokens longer than the one before.",
        tuple(lines), scale.outputs,
    )  # fmt: skip


def _mixed(material: Material, scale: FleetScale, rng: random.Random, salt: str) -> FleetWorkload:
    weights = [1 / (rank + 1) for rank in range(scale.prefixes)]
    prompts = []
    for number in range(scale.requests):
        hot, cold = rng.choices(range(scale.prefixes), weights)[0], rng.random() < 0.3
        space = f"{salt} cold {number}" if cold else f"{salt} hot {hot}"
        prompts.append(_prompt(material, space, number, 400 if cold else 500 + QUESTION))
    return FleetWorkload(
        FleetName.MIXED, "Mixed: hot prefixes and cold prompts",
        f"{scale.requests} requests, {scale.rate:g} a second: {scale.prefixes} prefixes of 500 tokens, the "
        "first the hottest, and three in ten that share nothing.",
        _arriving(prompts, scale.rate, rng), scale.outputs,
    )  # fmt: skip


def _killed(material: Material, scale: FleetScale, rng: random.Random, salt: str) -> FleetWorkload:
    prompts = [_prompt(material, f"{salt} {n}", n, 200) for n in range(scale.streams)]
    return FleetWorkload(
        FleetName.KILLED, "Killed: a worker dies under its streams",
        f"{scale.streams} streams of {scale.long} tokens; the busiest worker is killed once half of them "
        "have begun.",
        tuple(_one(n * 1e-3, each) for n, each in enumerate(prompts)), scale.long, kills=True,
    )  # fmt: skip


_MAKERS: dict[FleetName, Callable[[Material, FleetScale, random.Random, str], FleetWorkload]] = {
    FleetName.BURST: _burst,
    FleetName.DOCUMENT: _document,
    FleetName.SESSIONS: _sessions,
    FleetName.MIXED: _mixed,
    FleetName.KILLED: _killed,
}


def _one(start_s: float, prompt: Ids) -> Line:
    return Line(start_s, (Turn(0.0, prompt),))


def _arriving(prompts: list[Ids], rate: float, rng: random.Random) -> tuple[Line, ...]:
    """Poisson arrivals."""
    at, lines = 0.0, []
    for prompt in prompts:
        lines.append(_one(at, prompt))
        at += rng.expovariate(rate)
    return tuple(lines)


def _prompt(material: Material, namespace: str, number: int, length: int) -> Ids:
    document = material.document(namespace, length - QUESTION)
    return document + material.question(namespace, number, QUESTION)

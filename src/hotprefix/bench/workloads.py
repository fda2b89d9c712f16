"""The six live workloads as plain data. Owns: what is submitted, when, and which requests count as followers.

Rules: a workload is a tuple of waves. Within a wave every submission without `after` is made at one barrier,
before any step; one with `after` is made once the request that it names has that many outputs. The next wave
starts when the last has ended. Lengths in tokens follow the published run: prompts of 902; 98 to 904; 927;
532; 493; 975; outputs of 16 or 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from hotprefix.bench.bench_prompts import Ids, Material

DOCUMENT = 880  # tokens of the overlap document: 55 pages of 16, of the 904 of a full-overlap prompt
PROBES = ((0, 98), (25, 241), (50, 459), (75, 681), (100, 904))  # (% shared, prompt tokens)
CHURN_PAGES = 341


class Name(StrEnum):
    """The workloads, in the order in which they run."""

    OVERLAP = "overlap"
    FAN_OUT = "fan-out"
    BURST = "burst"
    FOLLOW = "follow"
    LATE_PAIR = "late-pair"
    CHURN = "churn"


@dataclass(frozen=True, slots=True)
class After:
    """When to submit: once `request` has given `outputs` tokens."""

    request: str
    outputs: int


@dataclass(frozen=True, slots=True)
class Submission:
    """One request.

    group: the row of the report in which it counts.
    follower: its prompt, or a part of it, was submitted before, so the request could reuse it.
    """

    id: str
    group: str
    prompt: Ids
    outputs: int
    follower: bool
    after: After | None = None


Wave = tuple[Submission, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Waves of requests. pages: the cache size that it asks for, in pages of 16 tokens; None = the
    bench's."""

    name: Name
    title: str
    about: str
    waves: tuple[Wave, ...]
    pages: int | None = None

    @property
    def submissions(self) -> tuple[Submission, ...]:
        return tuple(s for wave in self.waves for s in wave)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.group for s in self.submissions))


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a run is.

    levels: concurrency of burst and follow.
    fan_levels: concurrency of fan-out.
    long: outputs of the workloads that generate.
    """

    levels: tuple[int, ...] = (2, 4, 8)
    fan_levels: tuple[int, ...] = (1, 2, 4, 8)
    long: int = 128
    short: int = 16
    churn_prompts: int = 8
    churn_prompt: int = 975
    churn_pages: int = CHURN_PAGES


FULL = Scale()
QUICK = Scale(
    levels=(8,), fan_levels=(2,), long=8, short=4, churn_prompts=3, churn_prompt=400, churn_pages=56
)


def overlap(material: Material, outputs: int) -> Workload:
    """A seed request, then one probe after another, each sharing 0 to 100 % of the seed's document."""
    seed = Submission("overlap/seed", "seed", _prompt(material, "overlap", 0, DOCUMENT, 902), outputs, False)
    probes = []
    for number, (percent, length) in enumerate(PROBES, 1):
        shared = DOCUMENT * percent // 100
        space = "overlap" if shared else "overlap-other"
        prompt = _prompt(material, space, number, shared or length - 22, length)
        probes.append(Submission(f"overlap/{percent}", f"{percent} %", prompt, outputs, percent > 0))
    return Workload(
        Name.OVERLAP,
        "Overlap: how much a shared prefix saves",
        "One request warms a document; probes that share 0 to 100 % of it follow, each alone.",
        ((seed,), *((p,) for p in probes)),
    )


def fan_out(material: Material, levels: Iterable[int], outputs: int, warm_outputs: int) -> Workload:
    """A warm document, then waves of different questions about it. 927 tokens, 900 of them shared."""
    waves: list[Wave] = [(_fan(material, "warm", 0, warm_outputs, False),)]
    asked = 1
    for level in levels:
        numbers = range(asked, asked + level)
        waves.append(tuple(_fan(material, f"x{level}", n, outputs, True) for n in numbers))
        asked += level
    return Workload(
        Name.FAN_OUT,
        "Fan-out: different questions about one warm document",
        "One request warms a document of 900 tokens; then waves of different questions arrive at once.",
        tuple(waves),
    )


def _fan(material: Material, group: str, number: int, outputs: int, follower: bool) -> Submission:
    prompt = _prompt(material, "fan-out", number, 900, 927)
    return Submission(f"fan-out/{group}/{number}", group, prompt, outputs, follower)


def burst(
    material: Material, levels: Iterable[int], outputs: int, *, prompt: int = 532, rounds: int = 1
) -> Workload:
    """For each level that many identical cold prompts at once, each level with a document of its own. rounds:
    how often the same burst is repeated; from the second time on it is warm."""
    waves: list[Wave] = []
    for level in levels:
        ids = _prompt(material, f"burst-{level}", 0, prompt - 24, prompt)
        for turn in range(rounds):
            group = f"x{level}" if turn == 0 else f"x{level} warm"
            waves.append(
                tuple(
                    Submission(f"burst/{group}/{i}", group, ids, outputs, i + turn > 0) for i in range(level)
                )
            )
    return Workload(
        Name.BURST,
        "Burst: identical cold prompts at once",
        f"Identical prompts of {prompt} tokens arrive together; nothing of them is in the cache.",
        tuple(waves),
    )


def follow(material: Material, levels: Iterable[int], outputs: int, *, prompt: int = 493) -> Workload:
    """For each level, one request and, after its first output token, the same prompt level - 1 times."""
    return Workload(
        Name.FOLLOW,
        "Follow: the same prompt while the first request still generates",
        f"A prompt of {prompt} tokens; followers arrive after the first request's first output token.",
        tuple(_led(material, "follow", f"x{n}", n, outputs, prompt, 1) for n in levels),
    )


def late_pair(material: Material, outputs: int, *, prompt: int = 532) -> Workload:
    """A request, and an identical one when the first has given a quarter of its outputs."""
    at = max(1, outputs // 4)
    return Workload(
        Name.LATE_PAIR,
        "Late pair: one more request in the first one's decode phase",
        f"The same prompt of {prompt} tokens again after {at} of the first request's {outputs} outputs.",
        (_led(material, "late-pair", "pair", 2, outputs, prompt, at),),
    )


def _led(material: Material, name: str, group: str, n: int, outputs: int, prompt: int, at: int) -> Wave:
    ids = _prompt(material, f"{name}-{n}", 0, prompt - 24, prompt)
    lead = Submission(f"{name}/{group}/0", group, ids, outputs, False)
    rest = (
        Submission(f"{name}/{group}/{i}", group, ids, outputs, True, After(lead.id, at)) for i in range(1, n)
    )
    return (lead, *rest)


def churn(material: Material, prompts: int, outputs: int, pages: int, *, prompt: int = 975) -> Workload:
    """Two cycles, one request at a time, over prompts that together are larger than the cache."""
    ids = [_prompt(material, f"churn-{i}", 0, prompt - 24, prompt) for i in range(prompts)]
    waves = [
        (Submission(f"churn/{cycle}/{i}", f"cycle {cycle}", ids[i], outputs, cycle > 1),)
        for cycle in (1, 2)
        for i in range(prompts)
    ]
    return Workload(
        Name.CHURN,
        "Churn: two cycles over more than the cache holds",
        f"{prompts} prompts of {prompt} tokens, twice in the same order, with {pages} pages of cache.",
        tuple(waves),
        pages=pages,
    )


def _prompt(material: Material, namespace: str, number: int, document: int, length: int) -> Ids:
    return material.document(namespace, document) + material.question(namespace, number, length - document)


def build(names: Iterable[Name], material: Material, scale: Scale = FULL) -> tuple[Workload, ...]:
    """The named workloads at a scale, in the given order."""
    makers: dict[Name, Callable[[], Workload]] = {
        Name.OVERLAP: lambda: overlap(material, scale.short),
        Name.FAN_OUT: lambda: fan_out(material, scale.fan_levels, scale.long, scale.short),
        Name.BURST: lambda: burst(material, scale.levels, scale.long),
        Name.FOLLOW: lambda: follow(material, scale.levels, scale.long),
        Name.LATE_PAIR: lambda: late_pair(material, scale.long),
        Name.CHURN: lambda: churn(
            material, scale.churn_prompts, scale.short, scale.churn_pages, prompt=scale.churn_prompt
        ),
    }
    return tuple(makers[name]() for name in names)

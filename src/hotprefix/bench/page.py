"""The bench's HTML report. Owns: which parts of a `Summary` are shown, in which charts and tables.

Rules: the report is one self-contained file. Counts and timings never share a table. The baseline is the
first row of each group and the mark across each bar. If the arms meet the same traffic (burst, follow, late
pair), a panel is a group and its bars are arms; otherwise a panel is an arm and its bars are groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hotprefix.bench.bench_summary import ArmResult, Figure, GroupResult, Setup, Summary, WorkloadResult
from hotprefix.bench.figure_cells import Cell, change, factor, spread
from hotprefix.report.figure_text import seconds, whole
from hotprefix.report.html_page import render_page
from hotprefix.report.svg import Bar, bar_panel, extent

_MAX_ARMS_PER_PANEL_OF_GROUPS = 3
_TONES = {None: "a", "none": "a", "exact-finish": "b", "exact-prefill": "c", "coalesced": "d"}
_COUNT_HEADS = (
    "arm", "requests", "prompt tokens", "restored", "per follower", "computed", "required", "factor",
    "same outputs",
)  # fmt: skip
_TIME_HEADS = (
    "arm", "mean TTFT", "change", "max TTFT", "change", "slowest completion", "change", "makespan",
)  # fmt: skip
_GLOSSARY = (
    ("arm", "publication + flight: when computed pages become visible, and which request computes a shared "
     "prompt."),
    ("restored, per follower", "prompt tokens taken from the prefix cache; mean over the followers."),
    ("computed", "prompt positions run through the model, counted at the executor."),
    ("required", "what perfect sharing without a cache limit computes, each follower's last part included."),
    ("factor", "duplication factor: computed / required; 1.00 is perfect."),
    ("same outputs", "requests whose tokens equal the baseline's; in fp32 all should."),
    ("TTFT", "time to first token, from a request's own submission."),
    ("slowest completion", "longest submission-to-last-token time of a request in the group."),
    ("makespan", "from the group's start barrier to its last token."),
    ("change", "of the mean against the baseline; coloured if it exceeds both deviations together."),
    ("dots, whiskers, mark", "single runs; mean ± sample standard deviation; the baseline's mean."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Row:
    kind: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class _Metric:
    title: str
    pick: Callable[[ArmResult], Figure]


_TTFT = _Metric("Mean time to first token", lambda a: a.timings.mean_ttft_s)
_SLOWEST = _Metric("Slowest completion", lambda a: a.timings.slowest_completion_s)


def render(summary: Summary) -> str:
    """The report as one HTML document."""
    return render_page(
        "bench.html",
        title="hotprefix bench",
        lead=_lead(summary.setup),
        cards=[_card(w) for w in summary.workloads],
        workloads=[_section(w) for w in summary.workloads],
        setup=setup_rows(summary.setup),
        glossary=_GLOSSARY,
    )


def _lead(setup: Setup) -> str:
    runs = "a single run" if setup.runs == 1 else f"{setup.runs} interleaved runs"
    quick = " Quick mode: small sizes, meant to see that everything works." if setup.quick else ""
    return (
        f"Live experiments on {setup.model} ({setup.dtype}, {setup.device}), {runs} per arm, greedy, "
        "end of sequence ignored. Token counts follow from policy alone; times are this machine's."
        f"{quick}{busy_machine(setup)}"
    )


def busy_machine(setup: Setup) -> str:
    """A sentence if the machine did other work."""
    if setup.load_before is None or setup.load_before <= setup.cpus / 2:
        return ""
    return (
        f" The machine was busy with other work (load {setup.load_before:.1f} on {setup.cpus} CPUs): "
        "trust the counts, not the times."
    )


def _base(group: GroupResult, workload: WorkloadResult) -> ArmResult:
    return next(a for a in group.arms if a.arm == workload.baseline)


def _card(w: WorkloadResult) -> dict[str, object]:
    group = w.groups[-1]
    base, ours = _base(group, w), group.arms[-1]
    before, after = base.timings.mean_ttft_s, ours.timings.mean_ttft_s
    return {
        "anchor": w.workload,
        "title": f"{w.workload}, {group.group}",
        "before": seconds(before.mean),
        "after": seconds(after.mean),
        "change": change(after, before),
        "about": (
            f"mean TTFT, {base.arm} → {ours.arm}; duplication factor "
            f"{factor(base.counts.duplication_factor)} → {factor(ours.counts.duplication_factor)}; "
            f"restored per follower {whole(base.counts.restored_per_follower)} → "
            f"{whole(ours.counts.restored_per_follower)}"
        ),
    }


def _section(w: WorkloadResult) -> dict[str, object]:
    by_group = len(w.groups[0].arms) > _MAX_ARMS_PER_PANEL_OF_GROUPS
    panels = _panels_of_groups if by_group else _panels_of_arms
    key = [{"tone": t, "text": f"flight {f}"} for f, t in _TONES.items() if f] if by_group else []
    return {
        "anchor": w.workload,
        "title": w.title,
        "about": w.about,
        "note": f"Baseline: {w.baseline}. Cache: {w.cache_pages:,} pages.",
        "key": key,
        "charts": [{"title": m.title, "panels": panels(w, m)} for m in (_TTFT, _SLOWEST)],
        "tables": [
            _table("Token counts (decided by policy, equal in every run)", _COUNT_HEADS, w, _count_cells),
            _table("Times (mean ± sample standard deviation)", _TIME_HEADS, w, _time_cells),
        ],
    }


def _bar(label: str, arm: ArmResult, figure: Figure) -> Bar:
    return Bar(label, figure.mean, spread(figure), figure.sd, figure.runs, _TONES[arm.flight])


def _panels_of_groups(w: WorkloadResult, metric: _Metric) -> list[dict[str, object]]:
    out: list[dict[str, object]] = []
    for group in w.groups:
        bars = [_bar(a.arm, a, metric.pick(a)) for a in group.arms]
        base = metric.pick(_base(group, w)).mean
        name = f"{metric.title}, {group.group}, by arm"
        svg = bar_panel(name, bars, top=extent(bars), reference=base)
        out.append({"title": group.group, "svg": Markup(svg)})
    return out


def _panels_of_arms(w: WorkloadResult, metric: _Metric) -> list[dict[str, object]]:
    """One panel for each arm. They are compared with each other, so they share one scale."""
    arms = w.groups[0].arms
    panels = [
        [_bar(g.group, g.arms[at], metric.pick(g.arms[at])) for g in w.groups] for at in range(len(arms))
    ]
    top = max(extent(bars) for bars in panels)
    return [
        {"title": a.arm, "svg": Markup(bar_panel(f"{metric.title}, {a.arm}, by group", bars, top=top))}
        for a, bars in zip(arms, panels, strict=True)
    ]


def _table(
    title: str,
    heads: Sequence[str],
    w: WorkloadResult,
    cells: Callable[[ArmResult, ArmResult], tuple[Cell, ...]],
) -> dict[str, object]:
    rows = []
    for group in w.groups:
        base = _base(group, w)
        rows.append(_Row("group", (Cell(group.group), *(Cell(""),) * (len(heads) - 1))))
        for arm in group.arms:
            rows.append(_Row("base" if arm is base else "", (Cell(arm.arm), *cells(arm, base))))
    return {"title": title, "heads": heads, "rows": rows}


def _count_cells(arm: ArmResult, _base: ArmResult) -> tuple[Cell, ...]:
    c = arm.counts
    texts = (
        whole(c.requests), whole(c.prompt_tokens), _runs(c.restored_tokens),
        whole(c.restored_per_follower), _runs(c.computed_tokens), whole(c.required_tokens),
        factor(c.duplication_factor), f"{c.same_outputs} of {c.requests}",
    )  # fmt: skip
    return tuple(Cell(t) for t in texts)


def _runs(values: Sequence[int]) -> str:
    """One figure if every run gave the same, otherwise the figures of all runs."""
    return " / ".join(whole(v) for v in (values[:1] if len(set(values)) == 1 else values))


def _time_cells(arm: ArmResult, base: ArmResult) -> tuple[Cell, ...]:
    ours, theirs = arm.timings, base.timings
    return (
        Cell(spread(ours.mean_ttft_s)), change(ours.mean_ttft_s, theirs.mean_ttft_s),
        Cell(spread(ours.max_ttft_s)), change(ours.max_ttft_s, theirs.max_ttft_s),
        Cell(spread(ours.slowest_completion_s)),
        change(ours.slowest_completion_s, theirs.slowest_completion_s),
        Cell(spread(ours.makespan_s)),
    )  # fmt: skip


def setup_rows(s: Setup) -> list[tuple[str, str]]:
    """What was measured, name by name."""
    load = "not known" if s.load_before is None else f"{s.load_before:.2f}"
    return [
        ("hotprefix", s.hotprefix),
        ("model", f"{s.model}, {s.dtype}, {s.device}"),
        ("machine", f"{s.machine}, {s.cpus} CPUs, load before the first run {load}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in s.versions.items())),
        ("engine", f"pages of {s.page_size} tokens, at most {s.max_batched_tokens:,} tokens a step"),
        ("runs", f"{s.runs} per arm, arms interleaved; the whole bench took {s.wall_s:,.0f} s"),
        ("started", s.started),
    ]

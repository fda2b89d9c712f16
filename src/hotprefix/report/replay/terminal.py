"""The replay's result on a terminal. Owns: the verdicts and the main figures as rich tables.

Rules: everything is written to the console given (stderr in the CLI), so that stdout stays machine-readable.
"""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hotprefix.lab.experiment.result import ExperimentResult
from hotprefix.lab.verdict import Outcome
from hotprefix.report.replay.lookup import Lookup
from hotprefix.report.replay.words import OUTCOMES, change, judged, title, value

_METRICS = (
    "net_l1_hit_loss_share", "reuse_share", "ttft_mean_s", "ttft_p95_s", "cold.ttft_p95_s", "slo_share",
)  # fmt: skip
_STYLES = {
    Outcome.SUPPORTED: "green", Outcome.REFUTED: "red", Outcome.INCONCLUSIVE: "yellow",
    Outcome.AS_EXPECTED: "cyan",
}  # fmt: skip
_TONES = {"good": "green", "bad": "red", "": "dim"}


def show(result: ExperimentResult, console: Console) -> None:
    """Print the figures, then the verdicts, so that these are what stays on the screen."""
    lookup = Lookup(result)
    for condition in result.conditions:
        table = Table(title=f"{result.name}: {condition.name}", title_justify="left")
        table.add_column("arm", no_wrap=True)
        for metric in _METRICS:
            table.add_column(title(metric), justify="right")
        for arm in result.arms:
            if lookup.ran(condition.name, arm.name):
                figures = [lookup.figure(condition.name, arm.name, metric) for metric in _METRICS]
                cells = [
                    value(f.metric, f.value, beyond=f.beyond, not_measured=f.not_measured)
                    + (f"\n[{_TONES[f.tone]}]{escape(change(f))}[/]" if change(f) else "")
                    for f in figures
                ]
                table.add_row(escape(arm.name), *cells)
        console.print(table)
    for verdict in result.verdicts:
        one = verdict.hypothesis
        console.print(
            f"[{_STYLES[verdict.outcome]}]{OUTCOMES[verdict.outcome]}[/]  [bold]{escape(one.id)}[/]  "
            f"{escape(one.claim)}\n    {escape(' '.join([f'{verdict.reason}.', judged(verdict)]))}"
        )
    for problem in result.problems:
        console.print(
            f"[red]{problem.kind}[/]  {escape(f'{problem.condition}, {problem.arm}, seed {problem.seed}')}: "
            f"{escape(problem.message)}"
        )

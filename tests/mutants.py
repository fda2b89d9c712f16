"""Would the tests notice? Owns: small changes to a source file, and which of them no test notices.

Run once per release (docs/mutants.md has the score): `python -m tests.mutants --sample 100 --jobs 2`. Each
mutant is one change (a comparison's border, a sign, a constant, `and` for `or`, `min` for `max`, a call left
out) in a copy of the sources. It is *killed* if a test fails, *hung* if the tests take three times as long as
without it, and *survived* otherwise: then a test is missing, or the change makes no difference to anybody.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
SOURCES = "src/hotprefix/kernel"
# In the order in which they are tried: what is quick to fail comes first.
TESTS = (
    "unit/test_pages.py", "unit/test_tree.py", "unit/test_order.py", "unit/test_flight.py",
    "unit/test_waiting_queue.py", "unit/test_final_sources.py", "unit/test_figures_of_odd_requests.py",
    "unit/test_predictions.py", "unit/test_eviction_keys.py", "unit/test_sessions.py",
    "unit/test_refresh.py", "unit/test_kernel_*.py",
    "unit/test_tiers.py", "unit/test_cost_return_times.py", "unit/test_sim*.py",
    "unit/test_records_derive.py", "property/*.py", "parity/*.py",
)  # fmt: skip

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change. at: its place among all changes of the file."""

    file: str
    line: int
    what: str
    at: int


class Changes(ast.NodeTransformer):
    """Walks a module; makes the change numbered `wanted` and remembers all that there are."""

    def __init__(self, wanted: int = -1) -> None:
        self.wanted = wanted
        self.found: list[tuple[int, str]] = []

    def _now(self, node: ast.stmt | ast.expr, what: str) -> bool:
        self.found.append((node.lineno, what))
        return len(self.found) - 1 == self.wanted

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        for i, op in enumerate(node.ops):
            other = COMPARISONS[type(op)]
            if self._now(node, f"{type(op).__name__} -> {other.__name__}"):
                node.ops[i] = other()
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        other = OPERATORS.get(type(node.op))
        if other is not None and self._now(node, f"{type(node.op).__name__} -> {other.__name__}"):
            node.op = other()
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        other = OPERATORS.get(type(node.op))
        if other is not None and self._now(node, f"{type(node.op).__name__}= -> {other.__name__}="):
            node.op = other()
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        if self._now(node, f"{type(node.op).__name__} -> {type(other).__name__}"):
            node.op = other
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not | ast.USub) and self._now(node, f"no {type(node.op).__name__}"):
            return self.generic_visit(node.operand)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is int and self._now(node, f"{node.value} -> {node.value + 1}"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        if type(node.value) is bool and self._now(node, f"{node.value} -> {not node.value}"):
            return ast.copy_location(ast.Constant(not node.value), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            other = NAMES[node.func.id]
            if self._now(node, f"{node.func.id} -> {other}"):
                node.func.id = other
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant):
            return node
        if isinstance(node.value, ast.Call) and self._now(node, "the call is left out"):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node


def mutants_of(file: Path) -> Iterator[Mutant]:
    changes = Changes()
    changes.visit(ast.parse(file.read_text()))
    for at, (line, what) in enumerate(changes.found):
        yield Mutant(str(file.relative_to(ROOT)), line, what, at)


class Place:
    """A copy of the sources in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(ROOT / "src", folder / "src")

    def fails(self, limit: float | None) -> str:
        """killed, hung or survived. limit: seconds until the tests hang; None = never."""
        environment = os.environ | {
            "PYTHONPATH": str(self._folder / "src"), "HOTPREFIX_INTERPRETED": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        tests = [str(file) for glob in TESTS for file in sorted((ROOT / "tests").glob(glob))]
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header",
            "--hypothesis-profile=mutants", *tests,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return "hung"
        return "survived" if done.returncode == 0 else "killed"

    def tries(self, mutant: Mutant, limit: float) -> str:
        source = ROOT / mutant.file
        target = self._folder / mutant.file
        target.write_text(
            ast.unparse(ast.fix_missing_locations(Changes(mutant.at).visit(ast.parse(source.read_text()))))
        )
        try:
            return self.fails(limit)
        finally:
            shutil.copyfile(source, target)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help=f"sources to change (default: all of {SOURCES})")
    parser.add_argument("--sample", type=int, default=100, help="mutants to try, drawn at random")
    parser.add_argument("--skip", type=int, default=0, help="how many of the sample were tried before")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    given = parser.parse_args()
    files = [file.resolve() for file in given.files] or sorted((ROOT / SOURCES).rglob("*.py"))
    every = [mutant for file in files for mutant in mutants_of(file)]
    chosen = random.Random(given.seed).sample(every, min(given.sample, len(every)))[given.skip :]
    with tempfile.TemporaryDirectory() as folder:
        places: SimpleQueue[Place] = SimpleQueue()
        for job in range(given.jobs):
            places.put(Place(Path(folder) / str(job)))
        place = places.get()
        begun = time.monotonic()
        if place.fails(None) != "survived":
            sys.exit("the tests fail without any change: nothing can be told")
        limit = 3 * (time.monotonic() - begun)
        places.put(place)

        def tried(mutant: Mutant) -> str:
            place = places.get()
            try:
                return place.tries(mutant, limit)
            finally:
                places.put(place)

        score: Counter[str] = Counter()
        with ThreadPoolExecutor(given.jobs) as pool:
            for mutant, result in zip(chosen, pool.map(tried, chosen), strict=True):
                score[result] += 1
                print(f"{result:9} {mutant.file}:{mutant.line}: {mutant.what}", flush=True)
    noticed = score["killed"] + score["hung"]
    share = noticed / max(1, len(chosen))
    print(f"{noticed} of {len(chosen)} noticed ({share:.0%}), of {len(every)} that there are: {dict(score)}")


if __name__ == "__main__":
    main()

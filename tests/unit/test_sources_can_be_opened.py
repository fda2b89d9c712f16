"""Whatever a comment or a page names can be opened: files here, rules of docs/rules.md, decisions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRIVATE = re.compile(
    r"[Hh]anded\s+cases?|\bfound-\d|\b[Ii]ssue \d+\b|\bfinding \d+|\bthe spec\b|"
    r"seed: (?:single flight|hot prefixes)|\bthe seed's (?:shape|section)|"
    r"(?<![\w/])(?:kernel|engine|lab|agents|evidence)\.md"
)
RULE = re.compile(r"\brules? (\d+(?:(?:, | and )\d+)*)\b")
DECISION = re.compile(r"\(?[Dd]ecisions? (\d+)\b")
NAMED = re.compile(r"(?<![\w/.-])((?:docs|tests|bench|src)/[\w./*-]+\.(?:md|py|toml|json|png|c|h))")
INSIDE = re.compile(r"`((?:kernel|cost|engine|fleet|records|lab|server|bench|report|commands)/[\w/-]+\.py)`")


def pages(*suffixes: str) -> Iterator[Path]:
    for folder in ("src", "tests", "bench", "docs"):
        yield from (
            f for f in sorted((ROOT / folder).rglob("*")) if f.suffix in suffixes and f != Path(__file__)
        )
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile"))


def places(pattern: re.Pattern[str], *suffixes: str) -> list[tuple[str, str]]:
    """(file:line, what the pattern's first group, or the whole, says) for each match."""
    found = []
    for page in pages(*suffixes):
        text = page.read_text(encoding="utf-8")
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append((f"{page.relative_to(ROOT)}:{line}", match.group(match.lastindex or 0)))
    return found


def test_no_document_outside_the_repository_is_named() -> None:
    assert places(PRIVATE, ".py", ".md", ".c", ".h", ".toml") == []


def test_every_rule_that_is_named_exists() -> None:
    numbers = re.findall(r"^(\d+)\. ", (ROOT / "docs/rules.md").read_text(), re.MULTILINE)
    assert [int(n) for n in numbers] == list(range(1, len(numbers) + 1))
    named = {n for place, text in places(RULE, ".py", ".md") for n in re.findall(r"\d+", text)}
    assert named, "no rule is named anywhere: the pattern is wrong"
    assert named <= set(numbers)


def test_every_decision_that_is_named_exists() -> None:
    there = {int(f.name[:4]) for f in (ROOT / "docs/decisions").glob("[0-9]*.md")}
    assert {int(text) for _, text in places(DECISION, ".py", ".md")} <= there


@pytest.mark.parametrize(("pattern", "below"), [(NAMED, ROOT), (INSIDE, ROOT / "src/hotprefix")])
def test_every_file_that_is_named_exists(pattern: re.Pattern[str], below: Path) -> None:
    named = places(pattern, ".py", ".md")
    assert named
    assert [
        (place, text) for place, text in named if not list(below.glob(text)) and not list(ROOT.glob(text))
    ] == []


def test_links_of_pages_lead_somewhere() -> None:
    gone = []
    for page in pages(".md"):
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in link and not (page.parent / link).exists():
                gone.append((str(page.relative_to(ROOT)), link))
    assert gone == []

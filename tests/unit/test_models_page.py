"""docs/models.md is true: each row of its table is tried with a tiny model made for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import CASES
from tiny_models import Sequencer, executor_for, one_thread, run

from hotprefix.engine.model.files import ModelFiles
from hotprefix.engine.model.loader import load_model
from hotprefix.engine.model.torch_ops import TorchOps
from hotprefix.engine.text.tokenizer import Tokenizer
from hotprefix.errors import ModelLoadError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PROMPT_TOKENS, OUTPUTS, TOLERANCE = 37, 12, 2e-4


def rows() -> dict[tuple[str, str], str]:
    """(what, case) -> outcome, of every row of the page's table."""
    table = PAGE.read_text("utf-8").split("## The table")[1].split("\n## ")[0]
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row] for row in found[1:]]
    return {(what, case): outcome for what, case, outcome in cells}


ROWS = rows()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def test_every_row_has_its_case_and_every_case_its_row() -> None:
    assert ROWS.keys() == CASES.keys()
    kinds = r'loads|loads, with a warning: "[^"]+"|refused: "[^"]+"'
    assert [outcome for outcome in ROWS.values() if not re.fullmatch(kinds, outcome)] == []


@pytest.mark.parametrize(("what", "case"), ROWS, ids=[f"{what}: {case}" for what, case in ROWS])
def test_row(what: str, case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outcome = ROWS[what, case]
    files, reference = CASES[what, case](tmp_path / "model")
    words = "".join(re.findall(r'"([^"]+)"', outcome))
    if outcome.startswith("refused"):
        with pytest.raises(ModelLoadError, match=re.escape(words)):
            load(what, files, tmp_path)
        return
    if callable(reference) and not isinstance(reference, torch.nn.Module):
        reference()
        return
    with caplog.at_level("WARNING", "hotprefix"):
        assert_equal_to(reference, load(what, files, tmp_path))
    told = [r.getMessage() for r in caplog.records if r.name.startswith("hotprefix")]
    assert [words in message for message in told] == ([True] if words else [])


def load(what: str, files: ModelFiles, folder: Path) -> Any:
    if what == "tokenizer":
        return Tokenizer.load(files.path)
    return load_model(files, "float32", "cpu", TorchOps(), cache_dir=folder / "cache")


def assert_equal_to(model: Any, loaded: Any) -> None:
    """The two models give equal greedy tokens, and equal logits at each of them."""
    vocabulary = model.config.vocab_size
    prompt = torch.randint(2, vocabulary, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(2))
    expected = model.generate(prompt[None], max_new_tokens=OUTPUTS, do_sample=False, eos_token_id=None)
    executor, sampler = executor_for(loaded, 64, 4)
    got = run(executor, Sequencer("a", 0, prompt.tolist(), range(64), 4), OUTPUTS, chunk=11)
    assert got == expected[0, PROMPT_TOKENS:].tolist()
    with torch.inference_mode():
        logits = model(expected[:, :-1]).logits[0, PROMPT_TOKENS - 1 :]
    torch.testing.assert_close(torch.cat(sampler.logits), logits, atol=TOLERANCE, rtol=0)

"""The cost models that ship. Owns: their names, and `load_cost`, which takes a name or a file.

Rules: a preset is a file as `hotprefix calibrate` writes it. Its figures were measured by that command or
fitted to published figures; its `source` says which, and docs/cost-model.md says how. Names:
model.hardware[.number format].
"""

from __future__ import annotations

import os.path
from importlib.resources import files
from pathlib import Path

from hotprefix.cost.model import CostModel
from hotprefix.errors import InputError

_FOLDER = files("hotprefix.cost") / "models"
_SUFFIX = ".json"


def preset_names() -> tuple[str, ...]:
    """The names of all presets, sorted."""
    found = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX)))


def load_cost(name_or_path: str) -> CostModel:
    """A preset by its name, or a file that `calibrate` wrote. Raises InputError."""
    if name_or_path in preset_names():
        return CostModel.parse((_FOLDER / f"{name_or_path}{_SUFFIX}").read_text("utf-8"), name_or_path)
    path = Path(name_or_path)
    if not os.path.exists(path):
        raise InputError(
            f"cost {name_or_path!r}: neither a file nor a preset; presets: {', '.join(preset_names())}",
            param="cost",
        )
    return CostModel.load(path)

"""Tests run the sources as they are, not a compiled copy of them; HOTPREFIX_INTERPRETED=0 tests the copy.

Hypothesis gives the same examples on every run and never looks at the clock: on a machine that is busy with
something else an example may take any time. The profile `mutants` (tests/mutants.py) does not look for the
smallest example that fails.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

os.environ.setdefault("HOTPREFIX_INTERPRETED", "1")

settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.register_profile(
    "mutants", settings.get_profile("repeatable"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("repeatable")

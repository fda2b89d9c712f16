"""Hypothesis settings of the property tests: the same examples on every run, no clock."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "property",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("property")

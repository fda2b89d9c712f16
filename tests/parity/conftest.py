"""The parity scripts use the property tests' settings: the same examples on every run, no clock."""

from tests.property import conftest as conftest

"""The compared policies. Owns: the arms of a bench, which of them a workload runs, and its baseline.

Rules: if a workload's requests meet in flight (burst, follow, late pair), every pair of publication and
flight runs against `finish` + `none`. If they come one after another on a warm document, the pairs make no
difference (the golden tests show equal counts for all of them), so those workloads compare a cache with no
cache, unless every arm is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotprefix.bench.workloads import Name
from hotprefix.kernel.config import Flight, Publication


@dataclass(frozen=True, slots=True)
class Arm:
    """One publication x flight pair, or plain paged memory without a prefix cache."""

    publication: Publication
    flight: Flight
    prefix_cache: bool = True

    @property
    def name(self) -> str:
        return f"{self.publication}+{self.flight}" if self.prefix_cache else "no-cache"


NO_CACHE = Arm(Publication.FINISH, Flight.NONE, prefix_cache=False)
INDEPENDENT = Arm(Publication.FINISH, Flight.NONE)
DEFAULT = Arm(Publication.SCHEDULE, Flight.COALESCED)
PAIRS = tuple(
    Arm(publication, flight)
    for publication in (Publication.FINISH, Publication.STEP, Publication.SCHEDULE)
    for flight in Flight
)
_QUICK = (
    INDEPENDENT,
    Arm(Publication.FINISH, Flight.EXACT_FINISH),
    Arm(Publication.FINISH, Flight.EXACT_PREFILL),
    DEFAULT,
)
_MEETING = (Name.BURST, Name.FOLLOW, Name.LATE_PAIR)


def baseline(name: Name) -> Arm:
    """The arm that a workload's other arms are compared with."""
    return INDEPENDENT if name in _MEETING else NO_CACHE


def arms(name: Name, *, quick: bool, every: bool = False) -> tuple[Arm, ...]:
    """The arms of a workload, its baseline first."""
    if name in _MEETING:
        return _QUICK if quick and not every else PAIRS
    return (NO_CACHE, *(PAIRS if every else (INDEPENDENT, DEFAULT)))

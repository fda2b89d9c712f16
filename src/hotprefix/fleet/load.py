"""How loaded a worker is. Owns: `components`, the load as a vector of named components.

Rules:
1. Each component is normalised by what the worker can do, so that different workers compare: 1 is as much as
   it should have. A worker's load is its largest component.
2. What is not known is None in the vector.
"""

from __future__ import annotations

from hotprefix.fleet.bookings import Work
from hotprefix.fleet.members import Member

Components = tuple[float, float, float | None, float, float]


def components(member: Member, work: Work, wait: float, horizon_s: float) -> Components:
    """The worker's load now, in the order of `Load`'s fields. wait: seconds of prefill work that stand there.

    prefill: that by `horizon_s`; if the worker's capacity is calibrated, at least the seconds in which it
    serves as many requests. decode: rows. pages: as reported, and those that were added since.
    """
    profile, report = member.profile, member.report
    if profile.capacity is not None:
        wait = max(wait, len(work.prefilling) / profile.capacity)
    rows = (len(work.all) + work.foreign_decodes) / profile.max_running
    pages: float | None = None
    if report is not None:
        pages = (report.owned + report.protected + work.pages) / profile.total_pages
    return wait / horizon_s, rows, pages, work.restore_s / horizon_s, work.hand_off_s / horizon_s


def largest(loads: Components) -> float:
    """The load as one number."""
    prefill, decode, pages, restore, hand_off = loads
    most = max(max(prefill, decode), max(restore, hand_off))
    return most if pages is None else max(most, pages)

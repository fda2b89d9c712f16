"""How loaded a worker is. Owns: `load_of`, the load as a vector of named components.

Rules:
1. Each component is normalised by what the worker can do, so that different workers compare: 1 is as much as
   it should have. A worker's load is its largest component.
2. What is not known is None in the vector.
"""

from __future__ import annotations

from hotprefix.fleet.bookings import Work
from hotprefix.fleet.config import FleetConfig
from hotprefix.fleet.members import Member
from hotprefix.fleet.records import Load


def load_of(member: Member, work: Work, wait: float, config: FleetConfig, now: float) -> Load:
    """The worker's load now. wait: seconds of prefill work that stand there.

    prefill: that by `horizon_s`; if the worker's capacity is calibrated, at least the seconds in which it
    serves as many requests. pages: as reported, and those that were added since. decode: rows.
    """
    profile, report = member.profile, member.known(now, config.report_ttl_s)
    if profile.capacity is not None:
        wait = max(wait, len(work.prefilling) / profile.capacity)
    pages = None
    if report is not None:
        pages = (report.owned + report.protected + work.pages) / profile.total_pages
    rows = (len(work.all) + work.foreign_decodes) / profile.max_running
    horizon = config.horizon_s
    return Load(wait / horizon, rows, pages, work.restore_s / horizon, work.hand_off_s / horizon)

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


def load_of(member: Member, work: Work, config: FleetConfig, now: float) -> Load:
    """The worker's load now.

    prefill: seconds of outstanding work by `horizon_s`; if its capacity is calibrated, at least the seconds
    in which it serves as many requests.
    """
    profile, report = member.profile, member.known(now, config.report_ttl_s)
    prefill = work.wait(now)
    if profile.capacity is not None:
        prefill = max(prefill, len(work.prefilling) / profile.capacity)
    pages = None if report is None else (report.owned + report.protected) / profile.total_pages
    return Load(
        prefill / config.horizon_s,
        len(work.all) / profile.max_running,
        pages,
        work.restore_s / config.horizon_s,
        work.hand_off_s / config.horizon_s,
    )

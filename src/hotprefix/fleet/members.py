"""The workers of a fleet. Owns: `Member`, what is known of one worker, and `Members`, all that belong to it.

Rules:
1. A worker's life has a number, its incarnation. One that begins again (a report names another life, its
   events' numbers start again, or it leaves and joins) gets the next number; what belonged to the life before
   is dropped.
2. A member's bit in the index's masks is its own until it has left and the index has dropped its entries.
3. No report is not a report of 0: `report` is None until the first one comes, and again when it is too old.
"""

from __future__ import annotations

from hotprefix.errors import ConfigError, ProtocolError
from hotprefix.fleet.records import Profile, WorkerReport
from hotprefix.kernel.config import Role


class Member:
    """One worker.

    bit: its position in the index's masks. prefills, decodes: what its role allows.
    told: the name that the worker itself gave this life; None = it has not told one.
    chosen: the turn in which it was last chosen; of equal workers the one chosen longest ago comes first.
    """

    __slots__ = (
        "bit", "chosen", "decodes", "draining", "incarnation", "mask", "name", "prefills", "profile",
        "report", "told",
    )  # fmt: skip

    def __init__(self, name: str, bit: int, profile: Profile, incarnation: int) -> None:
        self.name, self.bit, self.mask, self.profile = name, bit, 1 << bit, profile
        self.incarnation = incarnation
        self.prefills = profile.role is not Role.DECODE
        self.decodes = profile.role is not Role.PREFILL
        self.draining = False
        self.chosen = 0
        self.told: int | None = None
        self.report: WorkerReport | None = None

    def known(self, now: float, ttl: float) -> WorkerReport | None:
        """The last report, unless it is too old."""
        report = self.report
        return report if report is not None and now - report.made <= ttl else None


class Members:
    """See the module's rules. Methods raise ProtocolError for a worker that is not a member."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._free: list[int] = []
        self._bits = 0
        self._lives = 0
        self.all: dict[str, Member] = {}

    def join(self, name: str, profile: Profile) -> Member:
        """Take a worker in. Raises ConfigError if its page size is not the fleet's, and ProtocolError if it
        is a member already."""
        if profile.page_size != self._page_size:
            raise ConfigError(
                f"worker {name!r} has pages of {profile.page_size} tokens, the fleet's keys are for pages of "
                f"{self._page_size}: give both the same",
                param="page_size",
            )
        if name in self.all:
            raise ProtocolError(f"worker {name!r} is a member already")
        if self._free:
            bit = self._free.pop()
        else:
            bit, self._bits = self._bits, self._bits + 1
        member = self.all[name] = Member(name, bit, profile, self._next_life())
        return member

    def __getitem__(self, name: str) -> Member:
        member = self.all.get(name)
        if member is None:
            raise ProtocolError(f"worker {name!r} is not a member")
        return member

    def begin_again(self, member: Member) -> None:
        """The worker is another life from now on. Its owner drops what belonged to the life before."""
        member.incarnation, member.report = self._next_life(), None

    def leave(self, member: Member) -> None:
        """The worker is gone and its entries are dropped, so its bit may be given to another."""
        del self.all[member.name]
        self._free.append(member.bit)

    def _next_life(self) -> int:
        self._lives += 1
        return self._lives

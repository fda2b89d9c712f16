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
from hotprefix.fleet.config import FleetConfig
from hotprefix.fleet.correction import Errors, Ratio
from hotprefix.fleet.event_order import EventOrder
from hotprefix.fleet.records import Profile, Role, Shelf, WorkerReport


class Member:
    """One worker.

    bit: its position in the index's masks. prefills, decodes: what its role allows.
    since: when this life was first heard of. told: the number that the worker itself gave it, if it did.
    order: its events. token_s: what a token of prefill costs in a full step.
    queue, compute: corrections of its predictions. errors: how far these were off.
    chosen: the turn in which it was last chosen; of equal workers the one chosen longest ago comes first.
    """

    __slots__ = (
        "bit", "chosen", "compute", "decodes", "draining", "errors", "incarnation", "mask", "name", "order",
        "prefills", "profile", "queue", "report", "since", "token_s", "told",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        bit: int,
        profile: Profile,
        incarnation: int,
        order: EventOrder,
        window: int,
        now: float,
    ) -> None:
        self.name, self.bit, self.mask, self.profile = name, bit, 1 << bit, profile
        self.incarnation, self.order, self.since = incarnation, order, now
        self.prefills = profile.role is not Role.DECODE
        self.decodes = profile.role is not Role.PREFILL
        budget = profile.max_batched_tokens
        self.token_s = profile.prices.step_s(budget, budget * (budget + 1) // 2, 0, 0) / budget
        self.queue, self.compute = Ratio(window), Ratio(window)
        self.errors = Errors()
        self.draining = False
        self.chosen = 0
        self.told: int | None = None
        self.report: WorkerReport | None = None


class Members:
    """See the module's rules. store: the mask of the shared L3; 0 as long as there is none. bits: how many
    bits the masks have. Methods raise ProtocolError for a worker that is not a member."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self.store = 0
        self._free: list[int] = []
        self.bits = 0
        self._lives = 0
        self.all: dict[str, Member] = {}

    def join(self, name: str, profile: Profile, now: float) -> Member:
        """Take a worker in. Raises ConfigError if its page size is not the fleet's, and ProtocolError if it
        is a member already."""
        if profile.page_size != self._config.page_size:
            raise ConfigError(
                f"worker {name!r} has pages of {profile.page_size} tokens, the fleet's keys are for pages of "
                f"{self._config.page_size}: give both the same",
                param="page_size",
            )
        if name in self.all:
            raise ProtocolError(f"worker {name!r} is a member already")
        order, window = EventOrder(self._config.held), self._config.window
        member = self.all[name] = Member(name, self._bit(), profile, self._next_life(), order, window, now)
        return member

    def __getitem__(self, name: str) -> Member:
        member = self.all.get(name)
        if member is None:
            raise ProtocolError(f"worker {name!r} is not a member")
        return member

    def begin_again(self, member: Member, now: float) -> None:
        """The worker has another life from now on. The caller drops what belonged to the life before."""
        member.incarnation, member.since = self._next_life(), now
        member.report, member.told = None, None

    def leave(self, member: Member) -> None:
        """The worker is gone and its entries are dropped, so its bit may be given to another."""
        del self.all[member.name]
        self._free.append(member.bit)

    def holder(self, member: Member, shelf: Shelf) -> int:
        """The mask under which the index keeps the worker's pages of a shelf: its own, or that of the shared
        store, which stays when workers leave."""
        if shelf != Shelf.L3 or not member.profile.shared_l3:
            return member.mask
        if not self.store:
            self.store = 1 << self._bit()
        return self.store

    def _bit(self) -> int:
        if self._free:
            return self._free.pop()
        self.bits += 1
        return self.bits - 1

    def _next_life(self) -> int:
        self._lives += 1
        return self._lives

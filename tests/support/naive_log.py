"""An event log read the plain way, token by token. Owns: `NaiveLog`.

Rules: it sees the log's records as dictionaries and nothing else, and uses no code of the project. It keeps
its own account of which page of L1 holds which prefix, of which token of which request was had how, and fails
where a record contradicts that account; it never reads the sums that records carry, but from what they tell
of pages and positions makes its own. Requests without limits on reuse or sharing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass
class Asked:
    """A request. pages: fingerprints of prompt and answer. hit: (page, publication) of each page that L1 held
    of its prompt on arrival. reached: by position, whether it was had before. target: known tokens at the
    last admission; world: between which flushes that was. asked: record number at which it began to wait for
    a fetch."""

    prompt: int
    pages: list[str]
    arrived: float
    hit: list[tuple[int, int]] = field(default_factory=list)
    matched: int = 0
    number: int = 0
    asked: int | None = None
    target: int = 0
    reached: int = 0
    world: int = 0
    figures: Counter[str] = field(default_factory=Counter)
    ran: bool = False
    reason: str | None = None
    admitted: list[float] = field(default_factory=list)
    first_token: float | None = None
    ended: float | None = None


class NaiveLog:
    """records: of one run, the header first. figures: what the kernel's counters of these names must say."""

    def __init__(self, records: Iterable[Row], *, cache: bool = True, same_step: bool = True) -> None:
        self.records = list(records)
        self.cache, self.same_step = cache, same_step
        self.page = self.records[0]["page_size"]
        self.requests: dict[str, Asked] = {}
        self.figures: Counter[str] = Counter()
        self.windows: dict[int, Counter[str]] = {}
        self._worlds: list[dict[str, tuple[int, int]]] = [{}]  # a flush begins a new one
        self._planned: dict[str, tuple[int, int]] = {}
        self._names: dict[int, tuple[int, str]] = {}
        self._publication = 0
        self._landed: dict[int, int] = {}
        self._restored: dict[str, tuple[int, int]] = {}
        self._step_begun = 0
        self._answers = {
            r["request"]: r.get("answer") or [] for r in self.records if r["k"] in ("finish", "abort")
        }
        for number, record in enumerate(self.records):
            handler = getattr(self, "_" + record["k"], None)
            if handler is not None:
                handler(record, number)

    # -- requests ---------------------------------------------------------------------------------

    def _request(self, r: Row, number: int) -> None:
        pages = r["pages"]
        assert len(pages) == r["prompt_tokens"] // self.page
        pages = pages + self._answers.get(r["request"], [])
        self.requests[r["request"]] = Asked(r["prompt_tokens"], pages, r["arrived"], number=number)

    def _reject(self, r: Row, number: int) -> None:
        del self.requests[r["request"]]
        self.figures["rejected"] += 1

    def _leading(self, one: Asked, tokens: int) -> list[tuple[int, int]]:
        """What L1 holds of the first so many tokens but one."""
        found = []
        for name in one.pages[: (tokens - 1) // self.page] if self.cache else []:
            if name not in self._worlds[-1]:
                break
            found.append(self._worlds[-1][name])
        return found

    def _enqueue(self, r: Row, number: int) -> None:
        one = self.requests[r["request"]]
        one.hit = self._leading(one, one.prompt)
        one.matched = len(one.hit) * self.page
        one.target = one.prompt
        assert r["matched"] == one.matched, (r, one.matched)
        self.figures["submitted"] += 1

    def _fetch_start(self, r: Row, number: int) -> None:
        self._fetch_join(r, number)

    def _fetch_join(self, r: Row, number: int) -> None:
        self.requests[r["request"]].asked = number

    def _fetch_done(self, r: Row, number: int) -> None:
        self._landed[r["fetch"]] = number

    def _admit(self, r: Row, number: int) -> None:
        one = self.requests[r["request"]]
        one.admitted.append(r["t"])
        one.world = len(self._worlds) - 1
        assert r["matched"] == len(self._leading(one, one.target)) * self.page, r
        assert r["matched_at_enqueue"] == one.matched
        assert r["again"] == (len(one.admitted) > 1)

    def _restore_start(self, r: Row, number: int) -> None:
        one = self.requests[r["request"]]
        for at, fetch in enumerate(r["fetches"], r["first"]):
            self._restored[one.pages[at]] = (number, fetch)

    def _retract(self, r: Row, number: int) -> None:
        one = self.requests[r["request"]]
        if r["lost"] >= one.target:  # it was decoding: one token is known beyond what had been computed
            one.target, one.reached = r["lost"] + 1, r["lost"]
        self.figures["retractions"] += 1

    # -- pages ------------------------------------------------------------------------------------

    def _publish(self, r: Row, number: int) -> None:
        one = self.requests[r["request"]]
        assert one.world == len(self._worlds) - 1, "one that ran when the cache was flushed publishes nothing"
        into = self._planned if r["planned"] else self._worlds[-1]
        for at, page in enumerate(r["l1"], r["first"]):
            name = one.pages[at]
            assert name not in self._worlds[-1], "a prefix has one page"
            assert name not in self._planned
            self._publication += 1
            into[name] = (page, self._publication)
            self._names[page] = (one.world, name)
        if not r["planned"]:
            self.figures["indexed_pages"] += len(r["l1"])

    def _evict(self, r: Row, number: int) -> None:
        for page in r["l1"]:
            world, name = self._names.pop(page)
            assert self._worlds[world].pop(name)[0] == page
        self.figures["evicted_pages"] += len(r["l1"])

    def _flush(self, r: Row, number: int) -> None:
        """What is left belongs to requests that run now."""
        left = sum(len(world) for world in self._worlds)
        assert left + len(self._planned) == r["protected"]
        self._worlds.append({})
        self.figures["flushed_pages"] += r["freed"]

    # -- steps ------------------------------------------------------------------------------------

    def _prefill(self, r: Row, number: int) -> None:
        one = self.requests[r["request"]]
        if not one.ran:
            one.ran = True
            self.figures["prompt_tokens"] += one.prompt
            if self.cache:
                self.figures["lookups"] += 1
                self.figures["queried_tokens"] += one.prompt
        had = r["start"] - sum(stop - start for start, stop, _, _ in r["taken"])
        for start, stop, source, same in r["taken"]:
            assert start == had < stop, r
            had = stop
            for position in range(start, stop):
                self._take(one, position, source, same)
        assert had == r["start"] < r["stop"] <= one.target
        for position in range(r["start"], r["stop"]):
            self._compute(one, position)
        one.reached = max(one.reached, r["stop"])
        window = self.windows.setdefault(int(r["t"] // 30), Counter())
        window["uncached"] += max(0, min(r["stop"], one.prompt) - r["start"])

    def _take(self, one: Asked, position: int, source: str, same: bool) -> None:
        """A token comes from the cache."""
        at = position // self.page
        name = one.pages[at]
        page = self._worlds[one.world].get(name) or self._planned.get(name)
        assert page is not None, "what is taken is there"
        assert same == (at < len(one.hit) and one.hit[at] == page), (position, one.hit, page)
        begun, fetch = self._restored.get(name, (-1, 0))
        if name in self._planned or self.same_step:
            copied = name in self._planned and begun >= self._step_begun
            assert (source != "device") == copied, (source, position)
        if source != "device":
            came = self._landed.get(fetch)
            waited = came is not None and one.asked is not None and one.asked < came
            assert source == ("storage" if waited else "host"), (source, fetch, one.asked, came)
        if position < one.reached:
            return
        self._count(
            one, {"device": "cached_device", "host": "cached_host", "storage": "cached_storage"}[source]
        )
        if position < one.matched:
            lost = {"device": "regained", "host": "restored_host", "storage": "restored_storage"}[source]
            self._count(one, "retained" if same else lost)
        one.reached = position + 1

    def _compute(self, one: Asked, position: int) -> None:
        inside = position < one.prompt
        self._count(one, "prompt" if inside else "outputs")
        if position < one.reached:
            self._count(one, "again_prompt" if inside else "again_outputs")
        elif position < one.matched:
            self._count(one, "recomputed")

    def _count(self, one: Asked, name: str) -> None:
        if name.startswith("cached") and not any(
            one.figures[f"cached_{t}"] for t in ("device", "host", "storage")
        ):
            self.figures["hits"] += 1
        one.figures[name] += 1

    def _step(self, r: Row, number: int) -> None:
        self._step_begun = number + 1
        self.figures["steps"] += 1
        if r["ok"]:
            self.figures["decoded"] += r["decode_tokens"]
            for name, page in self._planned.items():
                self._worlds[self._names[page[0]][0]][name] = page
            self.figures["indexed_pages"] += len(self._planned)
        else:
            self.figures["failed_steps"] += 1
        self._planned = {}

    def _stall(self, r: Row, number: int) -> None:
        self.figures["stalls"] += 1

    def _first_token(self, r: Row, number: int) -> None:
        self.requests[r["request"]].first_token = r["t"]

    def _finish(self, r: Row, number: int) -> None:
        one = self.requests[r["request"]]
        one.reason, one.ended = r["reason"], r["t"]
        ends = {"abort": "aborted", "error": "failed"}
        self.figures[ends.get(r["reason"], "finished")] += 1

    _abort = _finish

    # -- what it comes to -------------------------------------------------------------------------

    def counters(self) -> Counter[str]:
        """Fields of the kernel's counters, as the log tells them."""
        sums: Counter[str] = Counter()
        for one in self.requests.values():
            sums.update(one.figures)
        found = Counter({k: v for k, v in self.figures.items() if k != "decoded"})
        found["cached_tokens"] = sums["cached_device"] + sums["cached_host"] + sums["cached_storage"]
        found["cached_host_tokens"], found["cached_storage_tokens"] = (
            sums["cached_host"],
            sums["cached_storage"],
        )
        found["computed_prompt_tokens"] = sums["prompt"]
        found["computed_output_tokens"] = sums["outputs"] + self.figures["decoded"]
        found["recomputed_tokens"] = sums["again_prompt"] + sums["again_outputs"]
        found["recomputed_prompt_tokens"] = sums["again_prompt"]
        found["retained_tokens"] = sums["retained"]
        found["lost_regained_tokens"], found["lost_recomputed_tokens"] = sums["regained"], sums["recomputed"]
        found["lost_host_tokens"], found["lost_storage_tokens"] = (
            sums["restored_host"],
            sums["restored_storage"],
        )
        found["lost_waiting_tokens"] = sum(
            sums[part] for part in ("regained", "recomputed", "restored_host", "restored_storage")
        )
        return found

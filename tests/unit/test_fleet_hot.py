"""Which prefixes are hot, and who has them, by prompts that are counted by hand."""

from __future__ import annotations

from random import Random

from hotprefix.fleet.config import FleetConfig
from hotprefix.fleet.fleet import Fleet
from hotprefix.fleet.hot import PAGES, REQUESTS, HotPrefix
from hotprefix.fleet.records import Keys, Shelf, Stage
from tests.support.fleet import finish, profile, prompt, report, request, routed


def fleet(**profiles: object) -> Fleet:
    made = Fleet(FleetConfig(page_size=16))
    for name in ("a", "b"):
        made.join(name, profile(**profiles), 0.0)
        made.report(name, report(0.0), 0.0)
    return made


def ask(made: Fleet, id: str, keys: Keys, now: float) -> str:
    worker = routed(made, request(id, keys), now).worker
    finish(made, id, now)
    return worker


def test_prompts_are_counted_by_the_stretches_that_they_share() -> None:
    made, system = fleet(), prompt("sys", 4)
    one, two = system + prompt("one", 2), system + prompt("two", 3)
    fork = prompt("fork", 3)
    forked = [fork + prompt("left", 2), fork + prompt("rigt", 2)]
    for number, keys in enumerate([one, two, one, system, prompt("lone", 5), (), *forked]):
        ask(made, str(number), keys, float(number))
    found = [each[:5] for each in made.hottest()]
    assert found == [(system[-1], -1, 0, 4, 4), (fork[-1], -1, 0, 3, 2), (one[-1], 0, 4, 6, 2)]
    assert [each.key for each in made.hottest(1)] == [system[-1]]


def test_it_agrees_with_counting_every_prefix() -> None:
    draw = Random(1)
    made = fleet()
    prompts = []
    for number in range(200):
        keys, at = [], 1
        for _ in range(draw.randrange(6)):
            at = at * 3 + draw.randrange(2)  # chained: a key says what is before it
            keys += [at << 8, (at << 8) + 1]
        prompts.append(tuple(keys))
        ask(made, str(number), prompts[-1], float(number))
    found = made.hottest(1000)
    naive = {}
    for keys in prompts:
        for key in keys:
            naive[key] = sum(key in other for other in prompts)
    counts = {}
    for each in found:
        (owner,) = {keys[: each.stop] for keys in prompts if each.key in keys}
        counts |= dict.fromkeys(owner[each.start :], each.requests)
        above = found[each.parent] if each.parent >= 0 else HotPrefix(0, -1, 0, 0, 1 << 30, {})
        assert (above.stop, above.requests > each.requests) == (each.start, True)
    assert counts == {key: count for key, count in naive.items() if count >= 2}
    assert [each.requests for each in found] == sorted((each.requests for each in found), reverse=True)


def test_holders_are_told_presumed_or_computing() -> None:
    made, keys = fleet(events=True), prompt("sys", 4)
    worker = routed(made, request("1", keys), 0.0).worker
    routed(made, request("2", keys), 0.0)

    def holders() -> dict[str, str]:
        (hot,) = made.hottest()
        return hot.holders

    assert holders() == {worker: "computing"}
    made.progress("1", Stage.FIRST_TOKEN, 1.0)
    assert holders() == {worker: "presumed"}
    made.cached("a", Shelf.L2, 1.0, stored=keys)
    assert holders()["a"] == "l2"
    made.cached("a", Shelf.L1, 1.0, stored=keys)
    made.cached("b", Shelf.L3, 1.0, stored=keys[:3])
    assert holders()["a"] == "l1"
    assert holders().get("b") in (None, "presumed"), "it lacks the last page"
    made.cached("a", Shelf.L1, 1.0, removed=keys[3:])
    made.cached("a", Shelf.L2, 1.0, removed=keys[3:])
    assert "l1" not in holders().values()


def test_the_shared_store_s_pages_are_everybody_s() -> None:
    made, keys = fleet(events=True, shared_l3=True), prompt("sys", 2)
    for id in "12":
        ask(made, id, keys, 0.0)
    made.cached("a", Shelf.L3, 1.0, stored=keys)
    made.leave("a", 2.0)
    (hot,) = made.hottest()
    assert hot.holders["b"] in ("l3", "presumed")
    made.join("c", profile(events=True, shared_l3=True), 3.0)
    assert made.hottest()[0].holders["c"] == "l3"


def test_only_the_last_requests_and_their_first_pages_count() -> None:
    made = fleet()
    for number in range(REQUESTS + 5):
        ask(made, str(number), prompt("old" if number < 5 else "new", PAGES + 10), float(number))
    (hot,) = made.hottest()
    assert (hot.stop, hot.requests) == (PAGES, REQUESTS)

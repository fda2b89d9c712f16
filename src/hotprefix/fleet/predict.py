"""When a request's first token would come, and at whose cost. Owns: `Predictor`.

Rules:
1. first = max(queue, restore, pull) + compute + hand-off + decode wait: what overlaps does not add up.
2. The worker's own prices and corrections are used. What is not known is left out of the sum and told
   (`Place.displacement` is None); it never makes a place better than a known one would be on average.
3. Restoring or pulling is used only where the first token comes sooner with it than by computing.
4. A term that is switched off adds nothing.
5. Requests share steps: the tokens of several prompts, and the decodes, are computed in one. So a request
   that computes little waits for a whole step itself, and makes others wait for its own tokens only.
   Example: a step takes 10 ms and 10 us a token, 2,048 tokens at most. Of 64 requests with 16 tokens each,
   the first token of each comes 10.2 ms after its turn; together they are half a step of work, 15 ms, not
   650 ms.
6. Work delays the requests that come while the queue is not empty. How many will come is not known. While a
   request waits, about as many come as stand before it (Little's law), and others come behind these, so
   `behind_weight` times that number is taken, and on an idle worker `CHANCE`, for one may come meanwhile. So
   an idle worker computes a prefix a second time if that is much quicker, and the longer the queues are, the
   dearer such a copy is.
"""

from __future__ import annotations

from typing import Final

from hotprefix.fleet.config import FleetConfig, Term
from hotprefix.fleet.records import Profile, RouteRequest
from hotprefix.fleet.view import Place

CHANCE: Final = 0.125


class Predictor:
    """Fills in the predicted parts of places. wanted: how likely a displaced page is asked for again."""

    def __init__(self, config: FleetConfig) -> None:
        on = config.terms
        self._queue, self._restore, self._pull = Term.QUEUE in on, Term.RESTORE in on, Term.PULL in on
        self._delay = config.delay_weight if Term.DELAY in on else 0.0
        self._behind = config.behind_weight if Term.BEHIND in on else 0.0
        self._displacement = config.displacement_weight if Term.DISPLACEMENT in on else 0.0
        self.wanted = 1.0

    def predict(self, place: Place, request: RouteRequest, peer: Place, now: float) -> None:
        """The parts of one place. peer: the place from which most could be pulled."""
        member, work = place.member, place.work
        profile = member.profile
        queue = 0.0
        if self._queue:
            queue = max(place.wait, work.row_wait(profile.max_running)) * member.queue.value
        place.queue = max(queue, place.there_at - now) if place.flight else queue
        place.compute = self._compute(place, request.prompt, request.prompt - place.matched)
        if place.decoder is not place:
            self._hand_over(place, request)
        if place.l2 or place.l3:
            self._or_recompute(place, request, queue)
        if self._pull and peer.resident > place.resident and profile.pull is not None:
            self._or_pull(place, request, peer)
        self._first(place)
        self._costs(place, request)

    def displacement_cost(self, seconds: float) -> float:
        """What so many seconds of computing again count."""
        return self._displacement * seconds

    def _hand_over(self, place: Place, request: RouteRequest) -> None:
        """Pages flow while they are computed; what is left at the end is the last chunk's."""
        decoder = place.decoder
        profile = decoder.member.profile
        if profile.hand_off is not None:
            tokens = min(request.prompt - place.matched, place.member.profile.max_batched_tokens)
            place.hand_off = decoder.work.hand_off_s + profile.hand_off.seconds(
                tokens * profile.kv_token_bytes
            )
        place.decode_wait = decoder.work.row_wait(profile.max_running)

    def _first(self, place: Place) -> None:
        ready = max(max(place.queue, place.restore), place.pull)
        place.first = ready + place.compute + place.hand_off + place.decode_wait

    def _compute(self, place: Place, prompt: int, tokens: int) -> float:
        """Seconds to compute the prompt's last `tokens`, in chunks, beside the worker's decodes."""
        work, profile = place.work, place.member.profile
        prices = profile.prices
        decodes, context = work.decoding + work.foreign_decodes, work.context
        chunk = max(1, profile.max_batched_tokens - decodes)
        full, rest = divmod(tokens, chunk)
        start, end = prompt - tokens, prompt - rest
        seconds = 0.0
        if full:
            attended = (end - start) * start + (end - start) * (end - start + 1) // 2
            seconds = full * prices.step_s(chunk, attended // full, decodes, context)
        if rest:
            seconds += prices.step_s(rest, rest * end + rest * (rest + 1) // 2, decodes, context)
        steps = full + (1 if rest else 0)
        seconds += steps * prices.scheduler_s(decodes + 1, len(work.prefilling))
        return seconds * place.member.compute.value

    def own_work(self, place: Place, request: RouteRequest) -> float:
        """What the request adds to the worker's steps, in seconds (rule 5): its compute, less the part of its
        last step that is the step's own and that others fill."""
        work, profile = place.work, place.member.profile
        decodes = work.decoding + work.foreign_decodes
        chunk = max(1, profile.max_batched_tokens - decodes)
        rest = (request.prompt - place.reused) % chunk
        if not rest:
            return place.compute
        prices = profile.prices
        step = prices.step_s(0, 0, decodes, work.context)
        step += prices.scheduler_s(decodes + 1, len(work.prefilling))
        return place.compute - (1.0 - rest / chunk) * step * place.member.compute.value

    def _or_recompute(self, place: Place, request: RouteRequest, queue: float) -> None:
        """Pages of L2 and L3 are restored, or computed if that is quicker. Pages in flight lie behind
        them."""
        profile = place.member.profile
        restore = self._restore_s(place, profile) if self._restore else 0.0
        alone = self._compute(place, request.prompt, request.prompt - place.l1)
        if max(place.queue, restore) + place.compute <= queue + alone:
            place.restore = restore
            return
        place.pages = place.l1 // profile.page_size
        place.l2 = place.l3 = place.flight = 0
        place.leans, place.queue, place.compute = None, queue, alone

    def _restore_s(self, place: Place, profile: Profile) -> float:
        size = profile.kv_token_bytes
        seconds = place.work.restore_s
        if profile.fetch is not None:
            seconds += profile.fetch.seconds(place.l3 * size)
        if profile.restore is not None:
            seconds += profile.restore.seconds((place.l2 + place.l3) * size)
        return seconds

    def _or_pull(self, place: Place, request: RouteRequest, peer: Place) -> None:
        """Pages that a peer has and this worker lacks are pulled, if that is quicker than computing them."""
        profile = place.member.profile
        link = profile.pull
        tokens = min(peer.resident * profile.page_size, request.prompt - 1) - place.matched
        if link is None or tokens <= 0:
            return
        pull = link.seconds(tokens * profile.kv_token_bytes)
        compute = self._compute(place, request.prompt, request.prompt - place.matched - tokens)
        ready = max(place.queue, place.restore)
        if max(ready, pull) + compute < ready + place.compute:
            place.peer, place.pulled, place.pull, place.compute = peer, tokens, pull, compute
            place.pages = peer.resident

    def _costs(self, place: Place, request: RouteRequest) -> None:
        """What the choice costs others: those that decode there go slower while it is computed, pages that
        must go for it may have to be computed again, and those that come behind wait for both (rule 6)."""
        member, work = place.member, place.work
        seconds = (request.prompt - place.reused) * member.token_s
        place.delay = seconds * (work.decoding + work.foreign_decodes)
        report = member.report
        if report is not None:
            page_size = member.profile.page_size
            needed = -(-(request.prompt + request.outputs) // page_size) - place.pages
            evicted = max(0, needed - max(0, report.free - work.pages))
            place.displacement = evicted * page_size * member.token_s * self.wanted
            seconds += place.displacement
        place.behind = seconds * (len(work.prefilling) + CHANCE)
        place.cost = place.first + self._delay * place.delay + self._behind * place.behind
        if place.displacement is not None:
            place.cost += self.displacement_cost(place.displacement)

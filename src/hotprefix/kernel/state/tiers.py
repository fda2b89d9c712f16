"""What the tiers below L1 mean for a request. Owns: when its pages are copied down, and when copied back.

Rules:
1. `through` copies to L2 what is published, `selective` what is used a second time, `back` what L1 is about
   to lose.
2. An admission restores what L1 lacks if that is predicted to be quicker than computing it; never only
   because L2 has it (rule 39).
3. cache/host.py decides which copies a plan carries, prefetch.py what is fetched from L3.
4. Each restored page is remembered with its step, so that the source of a page is known for every request
   that takes it in that step (sources.py).
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from hotprefix.kernel.cache.host import HostTier, Landed
from hotprefix.kernel.cache.tier import Tier
from hotprefix.kernel.config import Eviction, TierConfig, Write
from hotprefix.kernel.sources import Source, Taken
from hotprefix.kernel.state.estimates import Estimates
from hotprefix.kernel.state.prefetch import Prefetcher
from hotprefix.kernel.state.sequence import Sequence
from hotprefix.kernel.state.tables import Tables


class Copied(NamedTuple):
    """How an L1 page came from L2.

    step: the step that carries the copy.
    published: L1's publication of the page; a later one means that the page holds something else by now.
    landed: how it came to L2 from L3; None if it was copied to L2 from L1.
    """

    step: int
    published: int
    landed: Landed | None


class LowerTiers:
    """L2 below one L1, and L3 if it is configured.

    host: L2.
    prefetch: the fetches from L3; None without an L3.
    estimates: how long copies, fetches and prefill take.
    """

    def __init__(self, config: TierConfig, l1: Tier, tables: Tables) -> None:
        self._config = config
        self._tables = tables
        self._page = l1.page_size
        self._pool = l1.pool
        self._copied: dict[int, Copied] = {}
        self._last_copy = 0
        self.estimates = Estimates(
            config.compute_s_per_token, config.restore_s_per_page, config.fetch_s_per_page
        )
        tier = Tier(config.pages, l1.page_size, Eviction.LRU, lambda pages: None)
        host = self.host = HostTier(tier, config.storage)
        if config.write is Write.BACK:
            l1.tree.before_evict = lambda leaf, pages: host.save_evicted(leaf)
        self.prefetch: Prefetcher | None = None
        if config.storage:
            self.prefetch = Prefetcher(
                tables, host, self.estimates, config.prefetch, config.prefetch_timeout_s,
                config.min_fetch_pages, config.fetch_window,
            )  # fmt: skip

    def admitted(self, seq: Sequence, resident: int, step: int) -> int:
        """Restore what an admitted sequence lacks. resident: how many pages of L1 it was admitted with, all
        of them real. Returns how many pages are restored."""
        if self._config.write is Write.SELECTIVE and resident:
            self._save(seq, resident)
        restored = self._restore(seq, step)
        if self.prefetch is not None:
            self.prefetch.leave(seq)
        return restored

    def published(self, seq: Sequence) -> None:
        """See to copies after the sequence has published pages."""
        if self._config.write is Write.THROUGH:
            self._save(seq, seq.shared)

    def leaves(self, seq: Sequence) -> None:
        """See to copies of a sequence that has published all that it will, before it gives up its pages. In
        L3 they count as just used."""
        self.published(seq)
        if self.prefetch is not None and seq.shared:
            self.host.used(seq.request.namespace, seq.key(0, seq.shared * self._page))

    def _save(self, seq: Sequence, pages: int) -> None:
        """Have the sequence's first `pages` pages copied to L2, as far as they were not before."""
        if pages > seq.saved and not seq.private:
            self.host.save(seq.request.namespace, seq.key(0, pages * self._page), seq.table[:pages])
            seq.saved = pages

    def _restore(self, seq: Sequence, step: int) -> int:
        """Give the sequence pages for what L2 has beyond its match, to be filled before this step's forward
        pass. A request whose step failed before computes instead, because the copy may be what fails. Returns
        how many pages are restored."""
        host, page, first = self.host, self._page, seq.shared
        if seq.failures or seq.computed != first * page:
            return 0
        match = host.match(seq.request.namespace, seq.target_key, seq.reuse_limit // page)
        last = match.pages if match else 0
        if last - first < self._config.min_restore_pages:
            return 0
        if not self.estimates.choose_restore(last - first, page):
            return 0
        pin = host.hold(seq.request.namespace, seq.target_key, last)
        if not self._tables.grow(seq, last * page):
            host.drop(pin)
            return 0
        self.estimates.begun(last - first, page)
        targets = seq.table[first:last]
        sources = host.restore(pin, first, targets)
        seq.computed = last * page
        self._tables.plan_ahead(seq, seq.computed)
        published = self._pool.published
        for target, source in zip(targets, sources, strict=True):
            self._copied[target] = Copied(step, published[target], host.landed(source))
        self._last_copy = step
        self.took(seq, first * page, step)
        return last - first

    # -- where pages come from --------------------------------------------------------------------

    def took(self, seq: Sequence, start: int, step: int) -> None:
        """Note the source of the pages that a sequence takes in this step, from token `start` to the position
        that it computes next."""
        since = step if seq.held is None else seq.held
        if self._last_copy < since:
            seq.taken.append(Taken(start, seq.computed, Source.DEVICE))
            return
        page, first, last = self._page, start // self._page, seq.computed // self._page
        sources = [self._source(at, since, seq.asked) for at in seq.table[first:last]]
        for source, run in groupby(sources):
            first += len(list(run))
            seq.taken.append(Taken(start, first * page, source))
            start = first * page

    def _source(self, page: int, since: int, asked: int | None) -> Source:
        """The source of an L1 page for a request. since: the first step whose copies count as the request's,
        because it waited for them. asked: see `Sequence`."""
        copy = self._copied.get(page)
        if copy is None or copy.step < since or copy.published != self._pool.published[page]:
            return Source.DEVICE
        if copy.landed is None or asked is None or copy.landed.published <= asked:
            return Source.HOST
        return Source.STORAGE

    def brought_by(self, page: int) -> int:
        """The number of the fetch that brought a page, just restored, from L3; 0 if none did."""
        landed = self._copied[page].landed
        return 0 if landed is None else landed.fetch

"""What the tiers below L1 mean for a request. Owns: when its pages are copied down, and when copied back.

Rules (kernel.md, *Tiers*): `through` copies what is published, `selective` what is used a second time, `back`
what L1 is about to lose. An admission restores what L1 lacks where that is predicted to be quicker than
computing it, by presence alone never. Which copies a plan carries is `cache/host.py`'s, what is fetched from
L3 is `prefetch.py`'s.
"""

from __future__ import annotations

from hotprefix.kernel.cache.host import HostTier
from hotprefix.kernel.cache.tables import Tables
from hotprefix.kernel.cache.tier import Tier
from hotprefix.kernel.config import Eviction, TierConfig, Write
from hotprefix.kernel.sched.estimates import Estimates
from hotprefix.kernel.sched.prefetch import Prefetcher
from hotprefix.kernel.sequence import Sequence


class LowerTiers:
    """L2 over one L1, and L3 where it is configured. host: L2. prefetch: None without L3. estimates: what
    links and prefill were seen to take."""

    def __init__(self, config: TierConfig, l1: Tier, tables: Tables) -> None:
        self._config = config
        self._tables = tables
        self._page = l1.page_size
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

    def admitted(self, seq: Sequence, resident: int) -> None:
        """A sequence has been admitted with that many pages of L1's, all of them real."""
        if self._config.write is Write.SELECTIVE and resident:
            self._save(seq, resident)
        self._restore(seq)
        if self.prefetch is not None:
            self.prefetch.leave(seq)

    def published(self, seq: Sequence) -> None:
        """What the sequence shares has changed."""
        if self._config.write is Write.THROUGH:
            self._save(seq, seq.shared)

    def leaves(self, seq: Sequence) -> None:
        """A sequence has published all it will and is about to give up its pages."""
        self.published(seq)
        if self.prefetch is not None and seq.shared:
            self.host.used(seq.request.namespace, seq.key(0, seq.shared * self._page))

    def _save(self, seq: Sequence, pages: int) -> None:
        """See to a copy of the sequence's first `pages` pages in L2."""
        if pages > seq.saved and not seq.private:
            self.host.save(seq.request.namespace, seq.key(0, pages * self._page), seq.table[:pages])
            seq.saved = pages

    def _restore(self, seq: Sequence) -> None:
        """Own pages for what L2 has beyond the match, filled before this step's forward pass. A request
        whose step failed before computes instead: the copy may be what fails."""
        host, page, first = self.host, self._page, seq.shared
        if seq.failures or seq.computed != first * page:
            return
        match = host.match(seq.request.namespace, seq.target_key, seq.reuse_limit // page)
        last = match.pages if match else 0
        if last - first < self._config.min_restore_pages:
            return
        if not self.estimates.choose_restore(last - first, page):
            return
        pin = host.hold(seq.request.namespace, seq.target_key, last)
        if not self._tables.grow(seq, last * page):
            host.drop(pin)
            return
        host.restore(pin, first, seq.table[first:last])
        seq.computed = last * page
        self._tables.plan_ahead(seq, seq.computed)
        low, high = seq.from_storage
        stored = max(0, min(high, last) - max(low, first)) * page
        seq.adopted_storage += stored
        seq.adopted_host += (last - first) * page - stored
        seq.adopted += (last - first) * page

"""L2's memory: every byte of every layer, in the plan's order."""

from __future__ import annotations

import pytest
import torch

from hotprefix.engine.hostpool import HostPool
from hotprefix.engine.kvpool import KVPool
from hotprefix.kernel.plan import Copy, StepPlan, StorePage

PAGES, HOST, PAGE, LAYERS = 12, 9, 4, 3


def make_pool(dtype: torch.dtype, device: str = "cpu") -> KVPool:
    """Every number differs from its neighbours'."""

    def layers(first: int) -> tuple[torch.Tensor, ...]:
        made = []
        for n in range(first, first + LAYERS):
            numbers = torch.arange(PAGES * PAGE * 2 * 5) + 487 * n
            made.append((numbers % 251).view(PAGES * PAGE, 2, 5).to(dtype).to(device))
        return tuple(made)

    return KVPool(PAGES, PAGE, layers(0), layers(LAYERS))


def rows(pool: KVPool, page: int) -> list[torch.Tensor]:
    tensors = (*pool.keys, *pool.values)
    return [tensor[page * PAGE : (page + 1) * PAGE].clone() for tensor in tensors]


@pytest.mark.parametrize("other_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_come_back_as_they_went(dtype: torch.dtype, other_device: bool) -> None:
    pool = make_pool(dtype, "cuda" if other_device and torch.cuda.is_available() else "cpu")
    host = HostPool(pool, HOST)
    if other_device:
        host._device_units = None  # the way that another device's pages take
    assert host.page_bytes == pool.page_bytes
    before = {page: rows(pool, page) for page in range(PAGES)}
    host.carry(StepPlan(1, saves=(Copy(3, 8), Copy(11, 0), Copy(5, 2))))
    seconds = host.carry(StepPlan(2, restores=(Copy(8, 7), Copy(2, 0), Copy(0, 3))))
    assert seconds > 0
    came_from = {7: 3, 0: 5, 3: 11}
    for page in range(PAGES):
        expected = before[came_from.get(page, page)]
        assert all(torch.equal(a, b) for a, b in zip(rows(pool, page), expected, strict=True))
    assert (host.links.saved_bytes, host.links.restored_bytes) == (3 * host.page_bytes, 3 * host.page_bytes)


def test_a_page_is_stored_before_it_is_saved_over_and_restored_after_that() -> None:
    pool = make_pool(torch.float32)
    put: list[tuple[bytes, bytes | None, bytes]] = []
    host = HostPool(pool, HOST, lambda key, parent, payload: put.append((key, parent, payload)))
    host.carry(StepPlan(1, saves=(Copy(3, 8),)))
    old = host.read(8)
    host.carry(
        StepPlan(2, stores=(StorePage(b"k", 8, b"above"),), saves=(Copy(4, 8),), restores=(Copy(8, 9),)),
    )
    assert put == [(b"k", b"above", old)]
    assert host.read(8) != old
    assert all(torch.equal(a, b) for a, b in zip(rows(pool, 9), rows(pool, 4), strict=True))


def test_a_payload_reads_back_and_reaches_l1() -> None:
    pool = make_pool(torch.bfloat16)
    host = HostPool(pool, HOST)
    host.carry(StepPlan(1, saves=(Copy(3, 8),)))
    payload, wanted = host.read(8), rows(pool, 3)
    host.write(1, payload)
    assert host.read(1) == payload
    host.carry(StepPlan(2, restores=(Copy(1, 6),)))
    assert all(torch.equal(a, b) for a, b in zip(rows(pool, 6), wanted, strict=True))
    with pytest.raises(ValueError, match="shape"):
        host.write(1, payload[:-1])

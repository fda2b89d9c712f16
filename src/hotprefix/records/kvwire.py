"""The wire form of KV events. Owns: what a batch is as plain values (msgpack's), from and to page events.

Rules:
1. The form is vLLM's, down to the order of the keys. A batch is an array `[ts, events, data_parallel_rank]`.
   An event is a map with `type` (`maps`, as vLLM 0.32 sends it), or an array of the same values that begins
   with the type (`arrays`, as earlier vLLM did).
2. A field that has no value is null, never left out.
3. The reader takes both forms, ignores keys and places that it does not know, and takes block hashes as
   numbers or bytes.
4. Pages whose KV depends on more than model and tokens say so in `extra_keys`, one entry for each page. So a
   reader that hashes token ids keeps them apart from equal tokens of other namespaces.

Example: `[12.5, [{"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU", "group_idx": 0}], 0]`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from hotprefix.errors import InputError

RANK: Final = 0
GROUP: Final = 0
ATTENTION: Final = "full_attention"

BlockHash = int | bytes
Extra = tuple[Any, ...] | None


class Form(StrEnum):
    """How an event is written."""

    MAPS = "maps"
    ARRAYS = "arrays"


class Medium(StrEnum):
    """Where pages lie. GPU: the device, also if that is a CPU. CPU: host memory. STORAGE: an external
    store."""

    GPU = "GPU"
    CPU = "CPU"
    STORAGE = "STORAGE"


@dataclass(frozen=True, slots=True)
class Stored:
    """Pages that became resident, in chain order.

    hashes: one for each page.
    parent: the hash of the page before them; None if they begin a prompt.
    tokens: the ids of all pages; empty if they are not told.
    page_size: tokens per page.
    extra: for each page what else its KV depends on (None: nothing); empty if the writer does not say.
    adapter: the name of a LoRA adapter. adapter_id: its number, which earlier vLLM told instead.
    medium: where they lie.
    group: which of the model's groups of layers they are of.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    tokens: tuple[int, ...]
    page_size: int
    extra: tuple[Extra, ...] = ()
    adapter: str | None = None
    medium: str | None = Medium.GPU
    group: int = GROUP
    adapter_id: int | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """Pages that are resident no longer."""

    hashes: tuple[BlockHash, ...]
    medium: str | None = Medium.GPU
    group: int = GROUP


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is resident."""


PageEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Events that are sent together. ts: Unix time, seconds. rank: of the data-parallel engine; None = not
    told."""

    ts: float
    events: tuple[PageEvent, ...]
    rank: int | None = RANK


def to_wire(batch: Batch, form: Form = Form.MAPS) -> list[Any]:
    """A batch as plain values, for msgpack."""
    maps = [_map(event) for event in batch.events]
    events = maps if form is Form.MAPS else [list(event.values()) for event in maps]
    return [batch.ts, events, batch.rank]


def _map(event: PageEvent) -> dict[str, Any]:
    match event:
        case Stored():
            return {
                "type": "BlockStored",
                "block_hashes": event.hashes,
                "parent_block_hash": event.parent,
                "token_ids": event.tokens,
                "block_size": event.page_size,
                "lora_id": event.adapter_id,
                "medium": event.medium,
                "lora_name": event.adapter,
                "extra_keys": event.extra or (None,) * len(event.hashes),
                "group_idx": event.group,
                "kv_cache_spec_kind": ATTENTION,
            }
        case Removed():
            return {
                "type": "BlockRemoved",
                "block_hashes": event.hashes,
                "medium": event.medium,
                "group_idx": event.group,
            }
        case Cleared():
            return {"type": "AllBlocksCleared"}


_STORED: Final = tuple(_map(Stored((), None, (), 1)))
_REMOVED: Final = tuple(_map(Removed(())))


def from_wire(value: Any) -> Batch:
    """The batch in decoded msgpack. Raises InputError, which names what is wrong."""
    if not isinstance(value, list) or len(value) < 2 or not isinstance(value[1], list):
        raise InputError(f"KV events: a {type(value).__name__} is no batch: [ts, events, rank] is expected")
    return Batch(float(value[0]), tuple(map(_event, value[1])), value[2] if len(value) > 2 else None)


def _event(value: Any) -> PageEvent:
    kind, fields = _fields(value)
    try:
        match kind:
            case "BlockStored":
                return _stored(fields)
            case "BlockRemoved":
                group = fields.get("group_idx") or GROUP
                return Removed(tuple(fields["block_hashes"]), fields.get("medium"), group)
            case "AllBlocksCleared":
                return Cleared()
    except KeyError as error:
        raise InputError(f"KV events: {kind} lacks {error}") from None
    raise InputError(f"KV events: type {kind!r}: there are BlockStored, BlockRemoved and AllBlocksCleared")


def _fields(value: Any) -> tuple[str, Mapping[str, Any]]:
    """The type, and the fields by name."""
    if isinstance(value, dict):
        return str(value.get("type")), value
    if not isinstance(value, list) or not value:
        raise InputError(f"KV events: a {type(value).__name__} is no event: a map or an array is expected")
    names: Sequence[str] = _STORED if value[0] == "BlockStored" else _REMOVED
    return str(value[0]), dict(zip(names, value, strict=False))


def _stored(fields: Mapping[str, Any]) -> Stored:
    return Stored(
        hashes=tuple(fields["block_hashes"]),
        parent=fields["parent_block_hash"],
        tokens=tuple(fields["token_ids"]),
        page_size=fields["block_size"],
        extra=tuple(None if keys is None else tuple(keys) for keys in fields.get("extra_keys") or ()),
        adapter=fields.get("lora_name"),
        medium=fields.get("medium"),
        group=fields.get("group_idx") or GROUP,
        adapter_id=fields.get("lora_id"),
    )

"""What subscribers of KV events declare. Owns: decoders `VLLM` (maps, as now) and `SGLANG` (arrays, as SGLang
and earlier vLLM), strict about field names, order and types.
"""

import msgspec


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]


VLLM = msgspec.msgpack.Decoder(_Batch)
SGLANG = msgspec.msgpack.Decoder(_ArrayBatch)

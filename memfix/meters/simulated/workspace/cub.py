"""The temporary storage of CUB's device algorithms, as torch calls them on Hopper.

Every algorithm lays out its buffers one after the other, each rounded up to 256 bytes, plus 255 bytes to align the
whole. The number of buffers follows from the tile of one block, which CUB tunes by item size and GPU (CCCL 3).
"""

from __future__ import annotations

from ..gpus import GPU
from .rules import NoRule, ceil_div, round_up

_ALIGNMENT = 256
_SHARED_MEMORY = 48 * 1024
_WARP = 32
_OFFSET_BYTES = 8  # torch counts items in int64
_MOST_ITEMS = 2**31 - 1

_RADIX_DIGITS, _RADIX_BITS = 256, 8
_PORTION_LIMIT = 2**28 - 1  # a longer sort is cut into portions, because the look-back counters are limited
# (key bytes, value bytes) -> threads and items of one tile, for items of four bytes
_NARROW_KEY_TILES = {(1, 8): (384, 18), (2, 8): (512, 23), (1, 0): (512, 19), (2, 0): (512, 19)}

_SCAN_BY_KEY_TILE = {4: 4032, 8: 2464}
_SELECT_TILE = {4: 6528, 8: 4224}
_UNIQUE_BY_KEY_TILE = {4: 7168, 8: 4480}
_REDUCE_TILE = 4096
_REDUCE_BLOCKS = 5 * 8  # per multiprocessor: CUB launches five times the eight blocks that run at a time


def radix_sort(gpu: GPU, num_items: int, key_bytes: int, value_bytes: int, bits: int | None = None) -> int:
    """``DeviceRadixSort`` of pairs, or of keys alone if ``value_bytes`` is 0, by the lowest ``bits`` of the key."""
    _tuned_for(gpu, num_items)
    widest = max(key_bytes, value_bytes)
    if num_items <= _scaled_tile(256, 19, widest):
        return 1  # one block sorts in shared memory; CUB requests one byte, since a null pointer means a size query
    tile = _scaled_tile(*_sort_tile(key_bytes, value_bytes), widest)
    portion = _PORTION_LIMIT // tile * tile
    num_portions = ceil_div(num_items, portion)
    num_passes = ceil_div(key_bytes * 8 if bits is None else bits, _RADIX_BITS)
    other_copy = num_items if num_passes > 1 else 0
    return _laid_out(
        num_portions * num_passes * _RADIX_DIGITS * _OFFSET_BYTES,
        ceil_div(min(num_items, portion), tile) * _RADIX_DIGITS * 4,
        other_copy * key_bytes,
        other_copy * value_bytes,
        num_portions * num_passes * 4,
    )


def segmented_radix_sort(gpu: GPU, num_items: int, key_bytes: int, value_bytes: int) -> int:
    """``DeviceSegmentedRadixSort``, which needs a second copy of keys and values."""
    _tuned_for(gpu, num_items)
    return _laid_out(num_items * key_bytes, num_items * value_bytes)


def scan(gpu: GPU, num_items: int, item_bytes: int, *, native_type: bool = True) -> int:
    """``DeviceScan`` with an operator of torch's own. ``native_type``: not torch's half and complex types."""
    _tuned_for(gpu, num_items)
    num_tiles = ceil_div(num_items, 128 * max(1, min(60 // item_bytes, 30)))
    if native_type:
        return _laid_out(_tile_states(num_tiles, max(4, 2 * item_bytes)))
    states = num_tiles + _WARP
    return _laid_out(_laid_out(states * 4, states * item_bytes, states * item_bytes))


def scan_by_key(gpu: GPU, num_items: int, item_bytes: int) -> int:
    """``DeviceScan::InclusiveSumByKey`` with keys and values of the same size."""
    _tuned_for(gpu, num_items)
    num_tiles = ceil_div(num_items, _SCAN_BY_KEY_TILE[item_bytes])
    return _laid_out((num_tiles + _WARP) * 16, (num_tiles + 1) * item_bytes)


def select(gpu: GPU, num_items: int, item_bytes: int) -> int:
    """``DeviceSelect::Unique``, or ``Flagged`` of positions."""
    _tuned_for(gpu, num_items)
    return _laid_out(_tile_states(ceil_div(num_items, _SELECT_TILE[item_bytes]), 8))


def unique_by_key(gpu: GPU, num_items: int, key_bytes: int) -> int:
    """``DeviceSelect::UniqueByKey`` with int32 values."""
    _tuned_for(gpu, num_items)
    return _laid_out(_tile_states(ceil_div(num_items, _UNIQUE_BY_KEY_TILE[key_bytes]), 16))


def reduce(gpu: GPU, num_items: int, item_bytes: int) -> int:
    """``DeviceReduce::Sum``."""
    _tuned_for(gpu, num_items)
    if num_items <= _REDUCE_TILE:
        return 1
    return _laid_out(gpu.multiprocessors * _REDUCE_BLOCKS * item_bytes)


# ---------------------------------------------------------------- tiles and layout
def _sort_tile(key_bytes: int, value_bytes: int) -> tuple[int, int]:
    if key_bytes == 8:
        return 384, 24 if value_bytes == 8 else 30
    if key_bytes == 4 and value_bytes:
        return 384, 29 if value_bytes == 8 else 17
    if (key_bytes, value_bytes) in _NARROW_KEY_TILES:
        return _NARROW_KEY_TILES[key_bytes, value_bytes]
    raise NoRule(f"a CUB sort of {key_bytes}-byte keys with {value_bytes}-byte values")


def _scaled_tile(threads: int, items: int, item_bytes: int) -> int:
    """Items per tile. ``items`` per thread is for four-byte items; for wider ones it is scaled to fit registers."""
    items = max(1, items * 4 // max(4, item_bytes))
    return items * min(threads, round_up(_SHARED_MEMORY // (item_bytes * items), _WARP))


def _tile_states(num_tiles: int, bytes_per_tile: int) -> int:
    return _laid_out((num_tiles + _WARP) * bytes_per_tile)


def _laid_out(*parts: int) -> int:
    return sum(round_up(part, _ALIGNMENT) for part in parts) + _ALIGNMENT - 1


def _tuned_for(gpu: GPU, num_items: int) -> None:
    if gpu.capability[0] != 9:
        raise NoRule(f"CUB's tiles on a GPU of capability {gpu.capability[0]}.{gpu.capability[1]}")
    if num_items > _MOST_ITEMS:
        raise NoRule(f"a CUB algorithm over {num_items:,} items, which torch cuts in pieces")

"""Scaled dot product attention: FlashAttention 2, the memory-efficient kernels of CUTLASS, and cuDNN.

Legend: B batch, H heads, L query length, S key length, D width of a head. Torch's fused kernels work on ``BLHD``;
the operators called ``_scaled_dot_product_*`` are given ``BHLD`` and transpose first.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..gpus import GPU
from .rules import Call, NoRule, ceil_div, copies_unless_contiguous, none_needed, round_up, rule, size_of

none_needed("_fused_sdp_choice")

_FLOAT = 4
_SEED_AND_OFFSET = 16


def _as_BLHD(call: Call, *names: str) -> Iterator[torch.Tensor]:
    """Arguments of a call in the layout ``BLHD``."""
    is_BHLD = "scaled_dot_product" in str(call.operator)
    return (call[name].transpose(1, 2) if is_BHLD else call[name] for name in names)


# ---------------------------------------------------------------- FlashAttention 2
@rule("_scaled_dot_product_flash_attention")
def _flash(call: Call) -> list[int]:
    if call["return_debug_mask"]:
        raise NoRule("flash attention that returns its dropout mask")
    query, key = _as_BLHD(call, "query", "key")
    B, L, H, D = query.shape
    S, H_key = key.shape[1:3]
    if call["dropout_p"]:
        return [_SEED_AND_OFFSET]
    return _flash_splits(call.gpu, *_groups_as_queries(B, L, H, H_key), S, D)


@rule("_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace")
def _flash_directly(call: Call) -> list[int]:
    query, key = call["query"], call["key"]
    if call["return_debug_mask"] or query.dtype not in (torch.float16, torch.bfloat16):
        raise NoRule("flash attention that returns its dropout mask, or in 8 bits")
    if call.has("block_table") and call["block_table"] is not None:
        raise NoRule("flash attention over a paged cache")
    if call["dropout_p"]:
        return [_SEED_AND_OFFSET]
    windows = [call[name] for name in ("window_size_left", "window_size_right") if call.has(name)]
    has_window = any(window is not None and window >= 0 for window in windows)
    cumulative = call["cum_seq_q"]
    if cumulative is None:
        B, L, H, D = query.shape
        S, H_key = key.shape[1:3]
        B, L, H = (B, L, H) if has_window else _groups_as_queries(B, L, H, H_key)
        return _flash_splits(call.gpu, B, L, H, S, D)
    # with variable lengths, keys are split only if each sequence has one query and several heads share a key
    H, D = query.shape[1:]
    H_key = key.shape[1]
    if call["max_q"] != 1 or H_key == H or has_window:
        return []
    return _flash_splits(call.gpu, cumulative.numel() - 1, H // H_key, H_key, call["max_k"], D)


def _groups_as_queries(B: int, L: int, H: int, H_key: int) -> tuple[int, int, int]:
    """``B, L, H`` as the kernel sees them: one query of several heads that share a key runs as several queries."""
    return (B, H // H_key, H_key) if L == 1 and H_key < H else (B, L, H)


def _flash_splits(gpu: GPU, B: int, L: int, H: int, S: int, D: int) -> list[int]:
    """The partial results if keys are split, which happens if blocks of queries alone leave multiprocessors idle."""
    keys_per_block = 256 if D <= 64 else 128 if D <= 128 else 64
    num_splits = _num_splits(B * H * ceil_div(L, 64), 2 * gpu.multiprocessors, ceil_div(S, keys_per_block))
    if num_splits <= 1:
        return []
    rows = num_splits * B * H * L
    return [rows * _FLOAT, rows * _flash_width(D) * _FLOAT]


def _num_splits(num_blocks: int, num_places: int, num_key_blocks: int) -> int:
    """The fewest splits with nearly the best utilisation of the GPU."""
    if num_blocks >= _as_float(_as_float(0.8) * num_places):
        return 1
    filled: dict[int, float] = {}
    for splits in range(1, min(128, num_places, num_key_blocks) + 1):
        # skip a number of splits that does not reduce the blocks per split
        if splits > 1 and ceil_div(num_key_blocks, splits) == ceil_div(num_key_blocks, splits - 1):
            continue
        waves = _as_float(num_blocks * splits / num_places)
        filled[splits] = _as_float(waves / math.ceil(waves))
    enough = 0.85 * max(filled.values(), default=0.0)
    return next((splits for splits, part in filled.items() if part >= enough), 1)


def _as_float(number: float) -> float:
    """Round to float32, in which torch compares."""
    return ctypes.c_float(number).value


def _flash_width(D: int) -> int:
    return round_up(D, 32 if D <= 128 else 64)


@rule("_scaled_dot_product_flash_attention_backward", "_flash_attention_backward")
def _flash_backward(call: Call) -> list[int]:
    """dQ is accumulated in float32; dK and dV are made for every query head."""
    query, key = _as_BLHD(call, "query", "key")
    copies = copies_unless_contiguous(*_as_BLHD(call, "grad_out", "out"))
    cumulative = call["cum_seq_q"]
    H, D = query.shape[-2:]
    if cumulative is None:
        B = query.shape[0]
        num_rows = B * round_up(query.shape[1], 128)
    else:
        B = cumulative.numel() - 1
        num_rows = query.shape[0] + 128 * B
    row_sums = num_rows * H * _FLOAT
    query_sums = num_rows * H * _flash_width(D) * _FLOAT
    if _is_deterministic():
        query_sums *= ceil_div(call.gpu.multiprocessors, B * H)
    of_every_head = []
    if key.shape[-2] != H:
        num_keys = key.numel() // (key.shape[-2] * D)
        of_every_head = [num_keys * H * D * query.element_size()] * 2
    return [*copies, row_sums, query_sums, *of_every_head]


def _is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


# ---------------------------------------------------------------- memory-efficient
@rule("_scaled_dot_product_efficient_attention", "_efficient_attention_forward")
def _efficient(call: Call) -> list[int]:
    """Heads wider than 128 do not fit into registers, so the output is accumulated in a float32 buffer."""
    query, value = _as_BLHD(call, "query", "value")
    B, L, H, D = query.shape
    D_value = value.shape[3]
    if query.dtype == torch.float32 or max(D, D_value) <= 128:
        return []
    return [B * L * H * D_value * _FLOAT]


@rule("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward")
def _efficient_backward(call: Call) -> list[int]:
    query, key, value = _as_BLHD(call, "query", "key", "value")
    B, L, H, D = query.shape
    S, D_value = key.shape[1], value.shape[3]
    num_batches, num_queries, num_keys = B, L, S
    if call.has("cu_seqlens_q") and call["cu_seqlens_q"] is not None:
        num_batches, num_queries = call["cu_seqlens_q"].numel() - 1, call["max_seqlen_q"]
        num_keys = call["max_seqlen_k"]
    if call.has("num_splits_key") and call["num_splits_key"] is not None:
        raise NoRule("efficient attention backward with a number of splits given")
    if B > 65_535:
        raise NoRule("efficient attention backward of more than 65,535 sequences, which is run in parts")
    sixteen_bits = query.dtype != torch.float32
    tile = _efficient_tile(call.gpu, max(D, D_value), sixteen_bits=sixteen_bits, dropout=bool(call["dropout_p"]))
    num_splits = tile.num_splits(num_batches * H, num_keys)
    workspace = num_batches * H * tile.bytes_per_head(num_queries, D, D_value, num_splits)
    copies = copies_unless_contiguous(*_as_BLHD(call, "grad_out_"))
    row_sums = B * H * L * _FLOAT
    if sixteen_bits:
        return [*copies, row_sums, workspace]
    # in float32 the product of gradient and output is summed over each row first, and the sums are transposed
    product = [B * L * H * D_value * _FLOAT, row_sums]
    return [*copies, row_sums, *(product if sum(product) > workspace else [workspace])]


@dataclass(frozen=True)
class _Tile:
    """The tile of one kernel: queries and keys per block, and whether dK and dV are accumulated outside registers."""

    queries: int
    keys: int
    adds_keys_in_memory: bool

    def num_splits(self, num_heads: int, num_keys: int) -> int:
        num_splits = ceil_div(num_keys, self.keys)
        if num_heads >= 256 and num_keys <= 2 * self.keys:
            num_splits = 1
        if self.adds_keys_in_memory:
            num_splits = min(num_splits, 200 // num_heads)
        return 1 if _is_deterministic() else max(num_splits, 1)

    def bytes_per_head(self, num_queries: int, D: int, D_value: int, num_splits: int) -> int:
        header = 16  # a lock and a counter
        num_tiles = ceil_div(num_queries, self.queries) * ceil_div(D, self.keys)
        size = num_tiles * (header + self.queries * self.keys * _FLOAT)
        if self.adds_keys_in_memory:
            width = round_up(D, self.queries) + round_up(D_value, self.queries)
            size += num_splits * self.keys * width * _FLOAT
        return round_up(size, 16)


def _efficient_tile(gpu: GPU, width: int, *, sixteen_bits: bool, dropout: bool) -> _Tile:
    """The tile of the first kernel in torch's list that supports the width and has enough shared memory."""
    if gpu.capability < (8, 0):
        raise NoRule(f"efficient attention backward on {gpu.name}, older than compute capability 8.0")
    if width <= 64:
        return _Tile(64, 64, adds_keys_in_memory=False)
    has_little_shared_memory = gpu.shared_memory_bytes < 160 * 1024
    if has_little_shared_memory:
        if sixteen_bits and width <= 96 and not dropout and gpu.capability in ((8, 6), (8, 9)):
            return _Tile(128, 64, adds_keys_in_memory=False)
        raise NoRule(f"efficient attention backward with heads {width} wide on {gpu.name}: its kernel is not known")
    if not sixteen_bits:
        return _Tile(128, 64, adds_keys_in_memory=False)  # float32 gradients are accumulated in the result itself
    if width <= 128:
        return _Tile(128, 128, adds_keys_in_memory=False)
    return _Tile(128, 64, adds_keys_in_memory=True)


# ---------------------------------------------------------------- cuDNN
@rule("_scaled_dot_product_cudnn_attention", "_cudnn_attention_forward")
def _cudnn(call: Call) -> list[int]:
    _raise_unless_measured(call)
    if call["query"].shape[2] == 1:
        raise NoRule("attention of one query by cuDNN, which splits the keys as it sees fit")
    return [256]


@rule("_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward")
def _cudnn_backward(call: Call) -> list[int]:
    """cuDNN accumulates dQ in float32, keeps a sum for every row, and makes dK and dV for every query head."""
    _raise_unless_measured(call)
    query, key, grad = call["query"], call["key"], call["grad_out"]
    B, H, L, D = query.shape
    copies = [size_of(grad)] if grad.stride(-1) != 1 else []
    plan = B * H * L * D * _FLOAT + B * H * L * _FLOAT + 256
    if key.shape[1] != H:
        plan += 2 * B * H * key.shape[2] * D * query.element_size()
    return [*copies, plan]


def _raise_unless_measured(call: Call) -> None:
    """Raise ``NoRule`` outside the measured range: cuDNN does not document its workspace."""
    query, key, value = (call[name] for name in ("query", "key", "value"))
    measured = (
        call.gpu.capability == (9, 0)
        and query.dim() == 4
        and query.shape[3] == value.shape[3]
        and key.shape[1] == value.shape[1]
    )
    if not measured:
        raise NoRule(f"workspace of {call.operator} beyond the shapes that were measured")

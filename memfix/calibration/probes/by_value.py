"""Operators whose results, and buffers, depend on values: masks, unique values, histograms, alignments."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from .registry import Step, bf16, f32, i32, i64, leaf, probe

_SIZES = (1, 100, 5000, 300_007, 5_000_011)


def _mask(device: str, *shape: int, share: float) -> torch.Tensor:
    return torch.rand(shape, device=device) < share


# ---------------------------------------------------------------- masks
@probe(size=_SIZES, share=(0.0, 0.5, 1.0), dtype=(torch.bool, f32, i64, bf16))
def _nonzero(device: str, size: int, share: float, dtype: torch.dtype) -> Step:
    mask = _mask(device, size, share=share).to(dtype)
    return lambda: mask.nonzero()


@probe(shape=((30, 70), (4, 5, 600), (2, 3, 4, 700)), layout=("contiguous", "transposed"))
def _nonzero_of_many_axes(device: str, shape: tuple[int, ...], layout: str) -> Step:
    mask = _mask(device, *shape, share=0.3)
    mask = mask if layout == "contiguous" else mask.transpose(0, 1)
    return lambda: mask.nonzero()


@probe(size=_SIZES, share=(0.0, 0.5, 1.0), dtype=(f32, bf16))
def _masked_select(device: str, size: int, share: float, dtype: torch.dtype) -> Step:
    tensor, mask = torch.rand(size, device=device).to(dtype), _mask(device, size, share=share)
    return lambda: tensor.masked_select(mask)


@probe(share=(0.0, 0.2, 1.0), how=("first", "both", "second", "beside ids"))
def _index_by_mask(device: str, share: float, how: str) -> Step:
    tensor, ids = torch.rand(500, 300, 7, device=device), torch.arange(40, device=device)
    rows, columns, both = (_mask(device, *shape, share=share) for shape in ((500,), (300,), (500, 300)))
    chosen = {"first": (rows,), "both": (both,), "second": (slice(None), columns), "beside ids": (ids, ...)}[how]
    values = torch.rand(7, device=device)

    def step() -> None:
        tensor[chosen]
        if how != "beside ids":
            tensor[chosen] = values[:1]

    return step


@probe(share=(0.0, 0.3, 1.0), rows=(50, 20_011))
def _gradient_of_an_index_by_mask(device: str, share: float, rows: int) -> Step:
    tensor, mask = leaf(device, rows, 33), _mask(device, rows, share=share)
    return lambda: tensor[mask].sum().backward()


# ---------------------------------------------------------------- distinct values
@probe(size=_SIZES, kinds=(1, 7, 100_000), dtype=(i64, i32, f32), wanted=("values", "inverse", "counts", "all"))
def _unique(device: str, size: int, kinds: int, dtype: torch.dtype, wanted: str) -> Step:
    tensor = torch.randint(0, kinds, (size,), device=device).to(dtype)
    inverse, counts = wanted in ("inverse", "all"), wanted in ("counts", "all")
    return lambda: (
        tensor.unique(return_inverse=inverse, return_counts=counts),
        tensor.unique_consecutive(return_inverse=inverse, return_counts=counts),
    )


@probe(size=_SIZES, kinds=(1, 7, 100_000), dtype=(i64, i32), weights=(None, f32))
def _bincount(device: str, size: int, kinds: int, dtype: torch.dtype, weights: torch.dtype | None) -> Step:
    tensor = torch.randint(0, kinds, (size,), device=device).to(dtype)
    weight = None if weights is None else torch.rand(size, device=device, dtype=weights)
    return lambda: (tensor.bincount(weight), tensor.bincount(weight, minlength=100))


@probe(shape=((50,), (300, 77)), num_tests=(100, 4001))
def _isin_many(device: str, shape: tuple[int, ...], num_tests: int) -> Step:
    tensor = torch.randint(0, 50, shape, device=device)
    return partial(torch.isin, tensor, torch.arange(num_tests, device=device))


# ---------------------------------------------------------------- alignments, factorisations
@probe(lengths=("full", "short"), targets=("padded", "joined"), time=(50, 300), reduction=("mean", "none"))
def _ctc_loss(device: str, lengths: str, targets: str, time: int, reduction: str) -> Step:
    scores = leaf(device, time, 8, 40)
    short = torch.arange(8, device=device) * (lengths == "short")
    input_lengths, target_lengths = time - short, 20 - short
    labels = torch.randint(1, 40, (8, 20))
    if targets == "joined":
        labels = torch.cat([row[:length] for row, length in zip(labels, target_lengths, strict=True)])
    labels = labels.to(device)

    def step() -> None:
        scores.grad = None
        log_probabilities = scores.log_softmax(-1)
        loss = F.ctc_loss(log_probabilities, labels, input_lengths, target_lengths, reduction=reduction)
        loss.sum().backward()

    return step


@probe(shape=((50, 50), (300, 300), (1100, 1100), (4, 60, 60), (3, 700, 700)), columns=(1, 33))
def _factorised(device: str, shape: tuple[int, ...], columns: int) -> Step:
    root = torch.randn(shape, device=device)
    matrix = root @ root.mT + shape[-1] * torch.eye(shape[-1], device=device)
    right = torch.randn(*shape[:-1], columns, device=device)

    def step() -> None:
        factor, _ = torch.linalg.cholesky_ex(matrix)
        torch.linalg.solve_triangular(factor, right, upper=False)
        torch.cholesky_solve(right, factor)

    return step


@probe(dtype=(f32, bf16), sizes=((64, 128, 256), (512, 64, 64)))
def _grouped_product(device: str, dtype: torch.dtype, sizes: tuple[int, int, int]) -> Step:
    tokens, width, columns = sizes
    x, weight = torch.randn(tokens, width, device=device, dtype=dtype), leaf(device, 4, width, columns, dtype=dtype)
    ends = torch.tensor([tokens // 4, tokens // 2, tokens // 2, tokens], device=device, dtype=i32)
    x.requires_grad_()

    def step() -> None:
        torch._grouped_mm(x, weight, offs=ends).square().sum().backward()

    return step

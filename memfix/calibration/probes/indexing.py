"""Reading and writing by index, by mask and by id, on both sides of every threshold in the rules."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from .registry import Step, bf16, f32, f64, i32, i64, leaf, probe


def _ids(device: str, *shape: int, below: int, dtype: torch.dtype = i64) -> torch.Tensor:
    return torch.randint(0, below, shape, device=device).to(dtype)


# ---------------------------------------------------------------- x[i, j]
@probe(dtype=(i64, i32), layout=("alike", "crossed", "transposed"))
def _index(device: str, dtype: torch.dtype, layout: str) -> Step:
    tensor = torch.rand(500, 300, 7, device=device)
    rows = _ids(device, 40, 1 if layout == "crossed" else 50, below=500)
    columns = _ids(device, *{"alike": (40, 50), "crossed": (1, 50), "transposed": (50, 40)}[layout], below=300)
    columns = columns.t() if layout == "transposed" else columns
    rows, columns = (rows, columns) if dtype == i64 else (rows.int().contiguous(), columns.int().contiguous())
    return lambda: (tensor[rows], tensor[rows, columns], tensor[:, columns])


@probe(count=(2304, 2305, 100_003), rows=(256, 257))
def _add_by_index(device: str, count: int, rows: int) -> Step:
    tensor, ids = torch.zeros(rows, 5, device=device), _ids(device, count, below=rows)
    values = torch.rand(count, 5, device=device)
    return partial(tensor.index_put_, (ids,), values, accumulate=True)


@probe(accumulate=(True, False), layout=("contiguous", "transposed", "expanded values", "apart", "second", "int32"))
def _index_put(device: str, accumulate: bool, layout: str) -> Step:
    tensor = torch.zeros(300, 200, 70, device=device)
    rows, planes = _ids(device, 4000, below=300), _ids(device, 4000, below=70)
    indices: list[torch.Tensor | None] = [rows]
    values = torch.rand(4000, 200, 70, device=device)
    if layout == "transposed":
        tensor = torch.zeros(300, 70, 200, device=device).transpose(1, 2)
    elif layout == "expanded values":
        values = torch.rand(70, device=device)
    elif layout == "apart":
        indices, values = [rows, None, planes], torch.rand(4000, 200, device=device)
    elif layout == "second":
        indices, values = [None, _ids(device, 4000, below=200)], torch.rand(300, 4000, 70, device=device)
    elif layout == "int32":
        indices = [rows.int()]

    put = torch.ops.aten.index_put_ if accumulate else torch.ops.aten.index_put

    def step() -> None:
        put(tensor, indices, values, accumulate)

    return step


@probe()
def _gradient_of_a_crossed_index(device: str) -> Step:
    tensor = torch.rand(100, 60, 11, device=device, requires_grad=True)
    rows, columns = _ids(device, 1000, 1, below=100), _ids(device, 1, 50, below=60)
    return lambda: tensor[rows, columns].sum().backward()


# ---------------------------------------------------------------- along an axis
@probe(dim=(0, 1), layout=("contiguous", "transposed"))
def _along_an_axis(device: str, dim: int, layout: str) -> Step:
    tensor = torch.rand(600, 600, device=device, dtype=bf16)
    tensor = tensor if layout == "contiguous" else tensor.t()
    ids, places = _ids(device, 600, below=600), _ids(device, 600, 600, below=600)
    return lambda: (
        tensor.index_select(dim, ids),
        tensor.gather(dim, places),
        tensor.scatter(dim, places, tensor),
        tensor.scatter_add(dim, places, tensor),
        tensor.index_add(dim, ids, tensor),
        tensor.index_copy(dim, ids, tensor),
        tensor.index_fill(dim, ids, 1.0),
        tensor.take(places),
    )


@probe(reduce=("sum", "mean", "amax"), include_self=(True, False))
def _reduce_by_index(device: str, reduce: str, include_self: bool) -> Step:
    tensor, source = torch.rand(500, 300, device=device), torch.rand(900, 300, device=device)
    ids = _ids(device, 900, below=500)
    places = ids[:, None].expand(900, 300)

    def step() -> None:
        tensor.scatter_reduce(0, places, source, reduce, include_self=include_self)
        for dtype in (i64, i32) if reduce != "sum" else ():
            tensor.index_reduce(0, ids.to(dtype), source, reduce, include_self=include_self)

    return step


@probe(mask=("row", "transposed"), source=("contiguous", "transposed"))
def _masked_scatter(device: str, mask: str, source: str) -> Step:
    tensor = torch.zeros(700, 700, device=device)
    where = torch.rand(1 if mask == "row" else 700, 700, device=device) > 0.5
    where = where.t() if mask == "transposed" else where
    values = torch.rand(700, 700, device=device)
    values = values if source == "contiguous" else values.t()
    return partial(tensor.masked_scatter_, where, values)


@probe(dtype=(i64, i32))
def _put_and_repeat(device: str, dtype: torch.dtype) -> Step:
    count = 100_003
    tensor, ids = torch.zeros(count, device=device), torch.randperm(count, device=device)
    repeats = torch.ones(count, dtype=dtype, device=device)
    return lambda: (
        tensor.put_(ids, tensor.clone(), accumulate=True),
        torch.repeat_interleave(repeats, output_size=count),
    )


# ---------------------------------------------------------------- embeddings
@probe(count=(3073, 40_000), vocabulary=(10, 1300, 50_000), width=(1, 256))
def _embedding(device: str, count: int, vocabulary: int, width: int) -> Step:
    dtype = f32 if count % 2 else bf16
    weight = torch.rand(vocabulary, width, device=device, dtype=dtype, requires_grad=True)
    ids = _ids(device, count, below=vocabulary)
    upstream = torch.rand(count, width, device=device, dtype=dtype)
    return lambda: F.embedding(ids, weight).backward(upstream)


probe("embedding_by_frequency", count=(100, 70_001), dtype=(i64, i32))(
    lambda device, count, dtype: partial(
        lambda weight, ids: F.embedding(ids, weight, scale_grad_by_freq=True).sum().backward(),
        leaf(device, 100, 9, dtype=f64, draw=torch.rand),
        _ids(device, count, below=100, dtype=dtype),
    )
)
probe("embedding_of_transposed_ids")(
    lambda device: partial(
        lambda weight, ids: F.embedding(ids, weight).sum().backward(),
        leaf(device, 1000, 16, draw=torch.rand),
        _ids(device, 256, 12, below=1000).t(),
    )
)


@probe(mode=("sum", "max"), vocabulary=(100, 30_000))
def _embedding_bag(device: str, mode: str, vocabulary: int) -> Step:
    weight, ids = leaf(device, vocabulary, 24, draw=torch.rand), _ids(device, 50_000, below=vocabulary)
    offsets = torch.arange(0, 50_000, 8, device=device)
    return lambda: F.embedding_bag(ids, weight, offsets, mode=mode).sum().backward()


@probe(count=(10, 200, 5000))
def _embedding_renorm(device: str, count: int) -> Step:
    weight, ids = torch.rand(1000, 16, device=device), _ids(device, count, below=1000)
    return partial(torch.embedding_renorm_, weight, ids, 1.0, 2.0)

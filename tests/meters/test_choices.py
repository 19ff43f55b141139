"""A step that counts, sorts or groups by what a router chose can be measured, in whichever way it does so."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import memfix
from memfix.errors import MeasurementError
from memfix.meters.simulated.assumptions import EVEN, READ_ORDER
from memfix.meters.simulated.choices import assumed_indices, chooses, chosen_indices
from memfix.meters.simulated.gpus import get_gpu
from memfix.meters.simulated.workspace.rules import Call

aten = torch.ops.aten
TOKENS, WIDTH, EXPERTS = 2048, 16, 8


def _one_hot(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(TOKENS, EXPERTS, device=ids.device)


def _counters(ids: torch.Tensor) -> torch.Tensor:
    return torch.zeros(EXPERTS, dtype=torch.long, device=ids.device)


def _written(ids: torch.Tensor) -> torch.Tensor:
    chosen = _one_hot(ids)
    chosen[torch.arange(TOKENS, device=ids.device)[:, None], ids] = 1
    return chosen.sum(0)


COUNTS: dict[str, Any] = {
    "one_hot": lambda ids: F.one_hot(ids, EXPERTS).sum((0, 1)),
    "scatter": lambda ids: _one_hot(ids).scatter(1, ids, 1).long().sum(0),
    "scatter_ of a float": lambda ids: _one_hot(ids).scatter_(1, ids, 1.0).sum(0),
    "scatter_ of a tensor": lambda ids: _one_hot(ids).scatter_(1, ids, torch.ones_like(ids).float()).sum(0).int(),
    "scatter_ and a comparison": lambda ids: (_one_hot(ids).scatter_(1, ids, 1) > 0).sum(0),
    "scatter_add": lambda ids: _counters(ids).scatter_add(0, ids.flatten(), torch.ones_like(ids).flatten()),
    "index_add_": lambda ids: _counters(ids).index_add_(0, ids.flatten(), torch.ones_like(ids).flatten()),
    "index_put_": _written,
    "histc": lambda ids: torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1),
    "comparisons": lambda ids: torch.stack([(ids == number).sum() for number in range(EXPERTS)]),
    "a comparison with all": lambda ids: (ids[..., None] == torch.arange(EXPERTS, device=ids.device)).sum((0, 1)),
    "unique": lambda ids: ids.unique(return_counts=True)[1],
    "searchsorted": lambda ids: torch.searchsorted(
        ids.flatten().sort().values, torch.arange(EXPERTS + 1, device=ids.device)
    ).diff(),
}


def _route(scores: torch.Tensor) -> torch.Tensor:
    return scores.topk(2).indices


def _mixture(count: Any) -> Any:
    """Build a step in which each expert compares its tokens with each other, so that its share decides the peak."""

    def build(device: str) -> Any:
        x, gate = torch.empty(TOKENS, WIDTH, device=device), torch.empty(WIDTH, EXPERTS, device=device)

        def step() -> None:
            ids = _route(x @ gate)
            sizes = [int(size) for size in count(ids).tolist()]
            for part in x[ids.flatten().argsort() // 2].split(sizes):
                (part @ part.T).sum()

        return step

    return build


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_tokens_of_each_expert_are_counted_in_any_way(count: Any) -> None:
    build = _mixture(count)
    reading = memfix.peak(build)
    even, worst = (memfix.peak(build, assume={"_route": how}).peak_bytes for how in ("even", "worst"))
    assert not reading.exact
    assert any(note.startswith(EVEN) for note in reading.notes)
    assert reading.at_least == reading.peak_bytes == even
    assert even < worst <= reading.at_most


def test_a_mask_of_more_elements_than_are_kept_is_counted_in_even_shares() -> None:
    def build(device: str) -> Any:
        x = torch.empty(2**16, 64, device=device)

        def step() -> None:
            ids = x.argmax(1, keepdim=True)
            chosen = torch.zeros_like(x).scatter(1, ids, 1.0)
            x[ids.flatten().argsort()].split(chosen.long().sum(0).tolist())

        return step

    assert memfix.peak(build).exact


def test_shares_that_a_loop_reads_are_bounded() -> None:
    """As each expert takes its rows by offsets that were copied to the CPU."""

    def build(device: str) -> Any:
        x, gate = torch.empty(TOKENS, WIDTH, device=device), torch.empty(WIDTH, EXPERTS, device=device)

        def step() -> None:
            ids = _route(x @ gate).flatten()
            ends = torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).long().cpu().cumsum(0)
            rows, begin = x[ids.argsort() // 2], 0
            for end in ends:
                part = rows[begin:end]
                (part @ part.T).sum()
                begin = end

        return step

    reading = memfix.peak(build)
    even, worst = (memfix.peak(build, assume={"_route": how}).peak_bytes for how in ("even", "worst"))
    assert (reading.peak_bytes, reading.at_least, reading.at_most) == (even, even, worst)


def test_what_no_choice_mends_raises_the_first_error() -> None:
    def build(device: str) -> Any:
        x = torch.empty(10, 20, device=device)

        def step() -> None:
            x.topk(2)
            x.unique()

        return step

    with pytest.raises(
        MeasurementError, match=r"needs the values of a tensor \(aten._unique2.default\) at .*which are unknown"
    ):
        memfix.peak(build)


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (aten.topk.default, (3,)),
        (aten.topk.default, (3, 0)),
        (aten.sort.default, ()),
        (aten.sort.stable, (1,)),
        (aten.max.dim, (1,)),
        (aten.max.dim, (1, True)),
        (aten.kthvalue.default, (2, 0)),
        (aten.argmin.default, (-2,)),
        (aten.argmax.default, ()),
    ],
)
@pytest.mark.parametrize("how", ["even", "worst", "last"])
def test_assumed_indices_are_ones_that_the_operator_could_choose(operator: Any, args: Any, how: Any) -> None:
    x = torch.randn(4, 5, 6)
    kwargs: dict[str, Any] = {}
    if operator is aten.sort.stable:
        args, kwargs = (), {"stable": True, "dim": args[0]}
    call = Call(get_gpu("H200"), operator, (x, *args), kwargs, operator(x, *args, **kwargs))
    assert chooses(operator)
    indices, truth = assumed_indices(call, how), chosen_indices(call)
    assert (indices.shape, indices.dtype, indices.is_contiguous()) == (truth.shape, torch.int64, True)
    dim = None if operator is aten.argmax.default else call["dim"]
    choices = range(x.numel() if dim is None else x.shape[dim])
    assert set(indices.flatten().tolist()) <= {*choices}
    if dim is not None and indices.dim() == x.dim():
        together = indices.movedim(dim, -1).flatten(0, -2)
        assert all(len(set(row)) == len(row) for row in together.tolist())
    if how == "even":
        counts = indices.flatten().bincount(minlength=len(choices)) if dim is not None else torch.ones(1)
        assert counts.max() - counts.min() <= 1


def test_an_order_that_python_reads_leaves_an_estimate_even_if_a_few_orders_agree() -> None:
    def build(device: str) -> Any:
        scores, x = torch.empty(8, device=device), torch.empty(8, 100, device=device)

        def step() -> torch.Tensor:
            order = torch.argsort(scores, descending=True).tolist()
            neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(order))  # 7 in each order that is tried
            return x[:neighbours].clone()

        return step

    reading = memfix.peak(build)
    assert READ_ORDER in reading.notes
    assert not reading.exact

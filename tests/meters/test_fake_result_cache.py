"""Cached results are those that FakeTensorMode makes."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import memfix
from memfix.meters.base import Reading
from memfix.meters.simulated import fake_result_cache
from memfix.meters.simulated.environment import simulated_gpu
from memfix.meters.simulated.fake_result_cache import NOT_HANDLED, FakeResultCache
from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.hide_dispatch_modes import hide_python_key
from memfix.meters.simulated.workspace.rules import tensors_in


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_result_cache, "_recipes", {})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that FakeTensorMode is asked for."""
    operators: list[str] = []
    dispatch = FakeTensorMode.dispatch

    def noted(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        operators.append(str(func))
        return dispatch(mode, func, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", noted)
    return operators


def train_step(device: str) -> Callable[[], None]:
    x = torch.empty(6, 4, 8, device=device, requires_grad=True)
    w = torch.empty(8, 5, device=device, requires_grad=True)

    def step() -> None:
        parts = [part @ w for part in x.unbind(0)]
        out = torch.stack(parts).softmax(-1).transpose(0, 1)[:, 1:].to(torch.bfloat16)
        out.sum().backward()
        x.grad = w.grad = None

    return step


def measured(build: Callable[[str], Callable[[], object]] = train_step) -> Reading:
    return memfix.peak(build)


def test_cached_results_change_no_byte_and_no_event() -> None:
    first, second = measured(), measured()
    assert first == second
    assert first.timeline == second.timeline


def test_cached_results_are_not_computed_again(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    new = FakeResultCache.new

    def noted(cache: FakeResultCache, operator: Any, *call: Any) -> Any:
        asked.append(str(operator))
        return new(cache, operator, *call)

    monkeypatch.setattr(FakeResultCache, "new", noted)
    measured()
    num_first = len(asked)
    measured()
    assert num_first > 10
    assert len(asked) == num_first


def test_real_tensors_of_one_shape_are_converted_once(asked: list[str]) -> None:
    with simulated_gpu(H200, hides_modes=True):
        weights = [torch.full((3, 4), float(number)) for number in range(9)]
        moved = [weight.to("cuda") for weight in (*weights, torch.nn.Parameter(weights[0]), weights[0].t())]
    assert not any(isinstance(weight, FakeTensor) for weight in weights)
    assert asked.count("aten._to_copy.default") == 3  # of a tensor, of a parameter, of a transposed tensor
    assert [tensor.shape for tensor in moved] == [(3, 4)] * 10 + [(4, 3)]
    assert {tensor.device.type for tensor in moved} == {"cuda"}
    assert len({tensor.untyped_storage()._cdata for tensor in moved}) == len(moved)


def test_a_deep_copy_belongs_to_the_same_simulation(asked: list[str]) -> None:
    with simulated_gpu(H200, hides_modes=True):
        model = torch.nn.Linear(100, 100, device="cuda")
        copied = copy.deepcopy(model)
        asked.clear()
        copied.weight.detach()
    assert copied.weight.fake_mode is model.weight.fake_mode  # type: ignore[attr-defined]
    assert asked == []


@pytest.mark.parametrize("number", [1, 1.0, True])
def test_numbers_that_are_equal_give_each_its_own_dtype(number: float) -> None:
    with simulated_gpu(H200, hides_modes=True):
        counts = torch.empty(3, dtype=torch.uint8, device="cuda")
        found = [(counts * n).dtype for n in (1, 1.0, True, number)]
    assert found[:3] == [torch.uint8, torch.float32, torch.uint8]
    assert found[3] == (torch.float32 if isinstance(number, float) else torch.uint8)


def test_views_begin_where_their_own_argument_does() -> None:
    with simulated_gpu(H200, hides_modes=True):
        x = torch.empty(4, 6, device="cuda")
        rows = [x[i] for i in range(4)]
        halves = [row[3:] for row in rows]
        strided = [half.as_strided((2,), (1,)) for half in halves]
        storage = x.untyped_storage()._cdata
        assert [row.storage_offset() for row in rows] == [0, 6, 12, 18]
        assert [half.storage_offset() for half in halves] == [3, 9, 15, 21]
        assert [view.storage_offset() for view in strided] == [3, 9, 15, 21]
        assert {view.untyped_storage()._cdata for view in (*rows, *halves, *strided)} == {storage}


def test_what_gives_an_argument_another_shape_does_so_every_time() -> None:
    with simulated_gpu(H200, hides_modes=True):
        a = torch.empty(10, device="cuda")
        for _ in range(2):
            out = torch.empty(0, device="cuda")
            torch.add(a, a, out=out)
            assert out.shape == (10,)
            squeezed = torch.empty(1, 3, device="cuda")
            squeezed.squeeze_()
            assert squeezed.shape == (3,)


def test_numbers_of_an_elementwise_operator_need_no_new_result(asked: list[str]) -> None:
    with simulated_gpu(H200, hides_modes=True):
        weights, gradients = ([torch.empty(3, 4, device="cuda") for _ in range(5)] for _ in range(2))
        for step in (1, 2, 3):
            weights[0] * (0.5 * step)
            torch._foreach_addcdiv_(weights, gradients, gradients, [0.1 * step] * 5)
        torch.arange(0.0, 3.0, device="cuda")
        assert torch.arange(0.0, 4.0, device="cuda").shape == (4,), "there numbers decide the shape"
        for order in (1, 2, 3):  # by it a norm takes a workspace or none
            torch._foreach_norm(weights, order)
    of_norms = [key for key in fake_result_cache._recipes if key[0] is torch.ops.aten._foreach_norm.Scalar]  # type: ignore[index]
    assert len(of_norms) == 3
    assert "aten._foreach_addcdiv_.ScalarList" not in asked
    assert asked.count("aten.mul.Tensor") <= 1


def test_no_two_calls_share_a_recipe_by_which_their_workspaces_are_remembered() -> None:
    with simulated_gpu(H200, hides_modes=True):
        for size in (3, 4):
            weights = [torch.empty(size, device="cuda") for _ in range(2)]
            torch._foreach_mul_(weights, weights)
            torch._foreach_add_(weights, 1.0)
    recipes = [recipe for recipe in fake_result_cache._recipes.values() if recipe is not None]
    assert len(set(recipes)) == len(recipes) > 4


def test_a_call_that_is_refused_is_refused_every_time() -> None:
    with simulated_gpu(H200, hides_modes=True):
        a, b = torch.empty(3, device="cuda"), torch.empty(4, device="cuda")
        for _ in range(2):
            for one, other in (([a], [b]), ([a, a], [a]), ([], [])):
                with pytest.raises(RuntimeError):
                    torch._foreach_add_(one, other)
            with pytest.raises(RuntimeError, match="broadcast"):
                a + b
            with pytest.raises(RuntimeError, match="invalid"):
                a.view(2, 2)


def test_tensors_of_inference_mode_stay_so() -> None:
    with simulated_gpu(H200, hides_modes=True):
        x = torch.empty(3, device="cuda")
        plain = [x.exp(), x.view(3, 1)]
        with torch.inference_mode():
            inside = [x.exp(), torch.empty(3, device="cuda").view(3, 1)]
        assert not any(tensor.is_inference() for tensor in plain)
        assert all(tensor.is_inference() for tensor in inside)


def test_results_on_the_host_stay_there() -> None:
    with simulated_gpu(H200, hides_modes=True) as tracker:
        for _ in range(2):
            before = tracker.ledger.requested.live
            host = torch.empty(5).exp().view(5, 1)
            assert host.device.type == "cpu"
            assert tracker.ledger.requested.live == before
            assert host.to("cuda").device.type == "cuda"


class Blocks(nn.Module):
    """A few layers of each kind that models have."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.pictures = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(2)
        )
        self.mixing = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16))
        self.scores = nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        words = self.words(ids)
        mixed = words + self.mixing(words) * self.pictures(images).mean(dim=(1, 2))[:, None, None]
        attended = torch.softmax(mixed @ mixed.transpose(1, 2), -1) @ mixed
        signs = torch.where(ids[..., None] > 3, -attended, attended.clone()) - attended.pow(2)
        both = torch.cat([signs, torch.stack([mixed, mixed]).sum(0)], 1) / 2
        return nn.functional.cross_entropy(self.scores(both).flatten(0, 1), torch.cat([ids, ids], 1).flatten())


def blocks_step(layout: torch.memory_format, autocast: torch.dtype | None, training: bool, device: str) -> Any:
    model = Blocks().to(device, memory_format=layout).train(training)
    images = torch.empty(4, 3, 9, 9, device=device).to(memory_format=layout)
    ids = torch.empty(4, 7, dtype=torch.int64, device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            loss = model(ids, images)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def operators_step(layout: torch.memory_format, device: str) -> Callable[[], None]:
    """Operators that no model of ``Blocks`` runs: on a strided tensor, in place, into ``out``, and on other shapes."""
    whole = torch.empty(2, 4, 6, 8, device=device).to(memory_format=layout)

    def step() -> None:
        x = whole[:, 1:, ::2]
        places = torch.empty(x.shape, dtype=torch.int64, device=device)
        x.amax(1), (x > 0).any(1), x.cumsum(1), x.flip(1), x.gather(1, places), x.triu(), torch.linalg.vector_norm(x)
        x.index_select(1, places[0, 0, 0]), x[:, places[0, 0, 0]], x.scatter(1, places, 1.0), x.sort(1), x.topk(2, 1)
        torch.empty_like(x), torch.full_like(x, 2.0), torch.ones_like(x, dtype=torch.int64), x.to(torch.bfloat16)
        x.new_empty(3), x.new_full((3,), 2.0), x.new_ones(3), x.new_zeros(3, dtype=torch.bool)
        x.new_empty_strided((2, 3), (1, 2)), torch.zeros_like(x, device="cpu"), x.exp().add_(x).masked_fill_(x > 0, 1.0)
        square = torch.empty(4, 4, device=device)
        torch.addmm(square, square, square, out=torch.empty(4, 4, device=device))
        square.addmm_(square, square).clamp_(min=0).tril_().copy_(square[0])

    return step


def test_meta_kernels_give_what_fake_tensor_mode_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = set()
    new = FakeResultCache.new

    def both(cache: FakeResultCache, operator: Any, args: Any, kwargs: Any, given: Any) -> Any:
        result = new(cache, operator, args, kwargs, given)
        if result is not NOT_HANDLED:
            expected = operator(*args, **kwargs)
            if cache.hides_modes:
                hide_python_key(tensors_in(expected))
            assert fake_result_cache._are_alike(expected, result), operator
            if operator._schema.name.endswith("_") or operator._overloadname == "out":
                assert result is expected, operator
            compared.add(operator)
        return result

    monkeypatch.setattr(FakeResultCache, "new", both)
    layouts, dtypes = (torch.contiguous_format, torch.channels_last), (None, torch.bfloat16)
    for settings in itertools.product(layouts, dtypes, (True, False)):
        measured(functools.partial(blocks_step, *settings))
    for layout in layouts:
        measured(functools.partial(operators_step, layout))
    assert compared > fake_result_cache.META_KERNELS
    others = {str(operator) for operator in compared - fake_result_cache.META_KERNELS}
    assert others > {"aten.exp.default", "aten.add_.Tensor", "aten.copy_.default", "aten.addmm.out", "aten.gt.Scalar"}


def test_a_result_on_another_device_is_never_made_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    handled = []
    new = FakeResultCache.new

    def noted(cache: FakeResultCache, operator: Any, args: Any, kwargs: Any, given: Any) -> Any:
        result = new(cache, operator, args, kwargs, given)
        if result is not NOT_HANDLED:
            handled.append(str(operator))
        return result

    monkeypatch.setattr(FakeResultCache, "new", noted)
    with simulated_gpu(H200, hides_modes=True):
        x = torch.empty(2**40, device="cuda")  # 4 TiB
        moved = [x.cpu(), torch.ones_like(x, device="cpu"), x.new_empty(2**40, device="cpu")]
        same = x.new_empty(2**40, device=x.device)
    assert {tensor.device.type for tensor in moved} == {"cpu"}
    assert same.device.type == "cuda"
    assert handled == ["aten.new_empty.default"]


def test_there_is_an_end_to_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_result_cache, "_MOST_RECIPES", 5)
    with simulated_gpu(H200, hides_modes=True):
        for size in range(1, 20):
            assert torch.empty(size, device="cuda").exp().shape == (size,)
    assert len(fake_result_cache._recipes) <= 5


def test_an_operator_on_a_list_looks_at_each_tensor_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's lists have thousands of tensors: to compare each result with each argument took minutes."""
    looks = 0

    def untyped_storage(tensor: torch.Tensor) -> Any:
        nonlocal looks
        looks += 1
        return torch.Tensor.untyped_storage(tensor)

    monkeypatch.setattr(FakeTensor, "untyped_storage", untyped_storage, raising=False)
    counts = []
    for number in (100, 200):
        looks = 0
        memfix.peak(
            lambda device, number=number: lambda: torch._foreach_add([torch.empty(2, device=device)] * number, 1.0)  # type: ignore[misc]
        )
        counts.append(looks)
    assert counts[0] > 100
    assert counts[1] < 2.5 * counts[0]

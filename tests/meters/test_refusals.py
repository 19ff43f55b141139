"""What cannot be simulated is refused in words, and leaves nothing patched behind."""

from __future__ import annotations

import gc
import io
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memfix
from memfix.errors import ON_A_GPU, MeasurementError, MemfixError, UsageError

HERE = r"test_refusals\.py:\d+"


def state_of_torch() -> tuple[Any, ...]:
    return (
        torch.cuda.is_available,
        torch.cuda.current_stream,
        torch.Generator,
        torch.einsum,
        torch.UntypedStorage.resize_,
        torch.autograd.graph._engine_run_backward,
        torch.utils._python_dispatch._get_current_dispatch_mode(),
        torch._C._get_sdp_priority_order(),
        gc.isenabled(),
    )


@pytest.fixture(autouse=True)
def nothing_left_patched() -> Iterator[None]:
    before = state_of_torch()
    yield
    assert state_of_torch() == before
    x = torch.ones(3, requires_grad=True)
    (x * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 2, 3]


def refused(build: Any, error: type[MemfixError] = MeasurementError, **options: Any) -> str:
    with pytest.raises(error) as raised:
        memfix.peak(build, **options)
    return str(raised.value)


def step_of(*shape: int) -> Any:
    """``step_of(4)(function)`` builds the step ``function(x)``."""

    def of(function: Any) -> Any:
        def build(device: str) -> Any:
            x = torch.empty(*shape, device=device)
            return lambda: function(x)

        return build

    return of


# ---------------------------------------------------------------- sparse
@pytest.mark.filterwarnings("ignore:.*[Ss]parse.*")
def test_a_sparse_tensor_is_refused() -> None:
    def build(device: str) -> Any:
        places = torch.zeros(2, 3, dtype=torch.int64, device=device)
        values = torch.empty(3, device=device)
        return lambda: torch.sparse_coo_tensor(places, values, (10, 10))

    assert refused(build) == (
        "a tensor of layout torch.sparse_coo holds memory that only its values decide; " + ON_A_GPU
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_compressed_sparse_tensor_is_refused() -> None:
    def build(device: str) -> Any:
        starts, places = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
        adjacent = torch.sparse_csr_tensor(starts, places, torch.ones(2), (2, 2), check_invariants=False)
        return lambda: adjacent @ torch.ones(2, 2)

    assert refused(build).startswith("a tensor of layout torch.sparse_csr holds memory that only its values decide")


def test_a_sparse_gradient_is_refused() -> None:
    def build(device: str) -> Any:
        table = nn.Embedding(100, 8, sparse=True, device=device)
        ids = torch.zeros(4, dtype=torch.int64, device=device)
        return lambda: table(ids).sum().backward()

    assert refused(build).startswith("a tensor of layout torch.sparse_coo holds memory that only its values decide")


def test_making_a_tensor_sparse_is_refused_with_the_line() -> None:
    message = refused(step_of(10, 10)(lambda x: x.to_sparse()))
    assert message.startswith("the step uses what cannot be simulated (aten._to_sparse.default) at ")
    assert message.endswith(f"; register a fake for it, or {ON_A_GPU}")


# ---------------------------------------------------------------- two devices
@pytest.mark.parametrize("meet", [lambda x: x + torch.empty(4, 4), lambda x: x @ torch.empty(4, 4, device="cpu")])
def test_tensors_of_two_devices_are_refused_with_the_line(meet: Any) -> None:
    with pytest.raises(
        MeasurementError, match=rf"^tensors of two devices meet in one operator at .*{HERE}: .*cuda:0.* cpu"
    ):
        memfix.peak(step_of(4, 4)(meet))


def test_a_number_on_the_host_may_meet_the_gpu() -> None:
    assert memfix.peak(step_of(4, 4)(lambda x: x + torch.tensor(1.0))).peak_bytes == 64


# ---------------------------------------------------------------- operators of others
@pytest.fixture(scope="module")
def operators() -> Iterator[Any]:
    with torch.library._scoped_library("memfix_refusals", "FRAGMENT") as library:
        library.define("without_fake(Tensor x) -> Tensor")
        library.impl("without_fake", lambda x: x.clone(), "CUDA")
        library.define("with_fake(Tensor x) -> Tensor")
        library.impl("with_fake", lambda x: x.new_empty(100), "Meta")
        yield torch.ops.memfix_refusals


def test_an_operator_without_a_fake_is_refused_by_name(operators: Any) -> None:
    with pytest.raises(
        MeasurementError,
        match=rf"^the step uses what cannot be simulated \(memfix_refusals\.without_fake\.default\) at .*{HERE}; "
        rf"register a fake for it, or {re.escape(ON_A_GPU)}$",
    ):
        memfix.peak(step_of(4)(lambda x: operators.without_fake(x)))


def test_a_custom_operator_without_a_fake_is_refused_by_name() -> None:
    @torch.library.custom_op("memfix_refusals::custom", mutates_args=())
    def custom(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with pytest.raises(
        MeasurementError,
        match=rf"^the step uses what cannot be simulated \(memfix_refusals::custom\) at .*{HERE}; "
        rf"register a fake for it, or {re.escape(ON_A_GPU)}$",
    ):
        memfix.peak(step_of(4)(custom))


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_an_operator_of_operators_is_refused_by_name() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    with pytest.raises(
        MeasurementError,
        match=rf"^the step uses what cannot be simulated \(flex_attention\) at .*{HERE}; {re.escape(ON_A_GPU)}$",
    ):
        memfix.peak(step_of(1, 2, 64, 16)(lambda x: flex_attention(x, x, x)))


def test_an_operator_with_a_fake_is_an_estimate(operators: Any) -> None:
    reading = memfix.peak(step_of(4)(lambda x: operators.with_fake(x)))
    assert reading.peak_bytes == 400
    assert reading.notes == ("no workspace rule for memfix_refusals.with_fake.default",)


# ---------------------------------------------------------------- subclasses
class _Wrapping(torch.Tensor):
    """A tensor in a wrapper that runs every operator on what it holds."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*(arg.held if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


class DTensor(_Wrapping):
    """Known to the meter by its name alone."""


def wrapped(kind: type[_Wrapping]) -> Any:
    def build(device: str) -> Any:
        x = kind(torch.empty(4, device=device))
        return lambda: x + 1

    return build


def test_the_reducer_of_data_parallel_is_refused_by_name() -> None:
    """The fake group returns no reduced gradients to it, on a GPU neither."""

    def build(device: str) -> Any:
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4, device=device))
        return lambda: net(torch.ones(2, 4, device=device)).sum().backward()

    with pytest.raises(MeasurementError, match=r"DistributedDataParallel takes .* at .*test_refusals.py:\d+; measure"):
        memfix.peak(build, world_size=2)


def nests(device: str) -> Any:
    parts = [torch.ones(length, 4, device=device) for length in (2, 3)]
    return lambda: torch.nested.nested_tensor(parts, layout=torch.jagged) * 2


def test_a_jagged_tensor_is_refused_in_words() -> None:
    with pytest.raises(MeasurementError, match=f"a nested tensor of layout torch.jagged at .*{re.escape(ON_A_GPU)}"):
        memfix.peak(nests)


def test_a_dtensor_is_refused_by_name() -> None:
    message = "DTensor spans several GPUs, and one is simulated; measure the local tensors' step"
    assert refused(wrapped(DTensor)) == message


def test_another_subclass_is_unwrapped() -> None:
    assert memfix.peak(wrapped(_Wrapping)).peak_bytes == 16


# ---------------------------------------------------------------- what is not a step
@pytest.mark.parametrize(
    ("build", "got"), [(lambda device: None, "None"), (lambda device: 3, "3"), (lambda device: [len], r"\[<built-in")]
)
def test_a_build_without_a_step_is_refused(build: Any, got: str) -> None:
    with pytest.raises(
        UsageError, match=rf"^build must return the step to measure, a function without arguments; got {got}"
    ):
        memfix.peak(build)


def test_a_negative_warm_up_is_refused_before_anything_is_built() -> None:
    def build(device: str) -> Any:
        raise AssertionError("built")

    assert refused(build, UsageError, warmup=-1) == (
        "warmup is how often the step runs before it is measured, at least 0; got -1"
    )


def test_an_error_of_the_steps_own_is_passed_on() -> None:
    def fails(x: torch.Tensor) -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match=r"^planted$"):
        memfix.peak(step_of(4)(fails))


def test_an_error_in_backward_is_passed_on() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        memfix.peak(step_of(4)(lambda x: Fails.apply(x.requires_grad_()).sum().backward()))


class PlainSubclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (lambda x: x.as_subclass(PlainSubclass).exp(), "a tensor subclass without a __torch_dispatch__"),
        (lambda x: pickle.dumps(x), "pickles, or torch.save, of tensors on the GPU"),
        (lambda x: torch.save(x, io.BytesIO()), "pickles, or torch.save, of tensors on the GPU"),
        (lambda x: torch.cuda.caching_allocator_alloc(1 << 20), "addresses from torch's allocator"),
    ],
)
def test_what_is_not_simulated_is_refused_with_the_line(step: Any, what: str) -> None:
    said = refused(step_of(4)(step))
    assert what in said
    assert ON_A_GPU in said

"""The autograd engine under the meter: gradients add up in place, and graphs that backward made are watched."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from forked_python import forked_python

import memfix
from memfix.errors import MeasurementError
from memfix.meters.simulated import engine
from memfix.meters.simulated.workspace.layout import is_dense

N = 1 << 20
GRADIENTS = "gradients of gradients: the engine may run their graph in another order on a GPU"


# ---------------------------------------------------------------- accumulation
def test_a_second_gradient_is_added_into_the_first() -> None:
    def build(device: str) -> Any:
        x, upstream = torch.empty(N, device=device, requires_grad=True), torch.empty(N, device=device)

        def step() -> None:
            y = x * 1.0
            torch.autograd.backward([y, y * 2.0, y * 3.0], [upstream, upstream, upstream])
            x.grad = None

        return step

    # three outputs; a gradient that is scaled, and the sum, which is made once
    assert memfix.peak(build).peak_bytes == 5 * 4 * N


def test_gradients_of_five_uses_take_no_more_than_those_of_three() -> None:
    def peak_of(num_uses: int) -> int:
        def build(device: str) -> Any:
            x = torch.empty(N, device=device, requires_grad=True)

            def step() -> None:
                torch.autograd.backward([(x * float(use)).sum() for use in range(num_uses)])
                x.grad = None

            return step

        return memfix.peak(build).peak_bytes // N

    assert peak_of(5) == peak_of(3) == 2 * 4


def test_a_gradient_that_is_kept_is_added_to_in_its_own_memory() -> None:
    def build(device: str) -> Any:
        x = torch.empty(N, device=device, requires_grad=True)
        x.grad = torch.empty(N, device=device)
        upstream = torch.empty(N, device=device)
        return lambda: (x * 2.0).backward(upstream)

    reading = memfix.peak(build)
    assert (reading.peak_bytes, reading.leaked_bytes) == (2 * 4 * N, 0)  # the product, and its gradient


def test_a_gradient_that_a_hook_keeps_is_not_written_over() -> None:
    def build(device: str) -> Any:
        x, upstream = torch.empty(N, device=device, requires_grad=True), torch.empty(N, device=device)

        def step() -> None:
            kept: list[torch.Tensor] = []
            y = x * 1.0
            left, right = y * 2.0, y * 3.0
            for node in (left.grad_fn, right.grad_fn):
                assert node is not None
                node.register_hook(lambda grads, _: kept.append(grads[0]))
            torch.autograd.backward([left, right], [upstream, upstream])
            x.grad = None

        return step

    # y, left and right; two gradients kept, their sum, and x's own
    assert memfix.peak(build).peak_bytes == 7 * 4 * N


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(3, 4), True),
        (torch.empty(3, 4).t(), True),
        (torch.empty(3, 1, 4).expand(3, 1, 4), True),
        (torch.empty(3, 8)[:, ::2], False),
        (torch.empty(1).expand(3), False),
        (torch.empty(()), True),
    ],
)
def test_dense_is_what_some_order_of_dims_makes_contiguous(tensor: torch.Tensor, dense: bool) -> None:
    assert is_dense(tensor.shape, tensor.stride()) == dense


# ---------------------------------------------------------------- gradients of gradients
def doubly(use: Any) -> Any:
    def build(device: str) -> Any:
        x = torch.empty(64, device=device, requires_grad=True)

        def step() -> None:
            y = (x.sin() * x).sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            use(y, gradient)
            x.grad = None

        return step

    return build


@pytest.mark.parametrize("use", [lambda y, g: g.exp().sum().backward(), lambda y, g: (y + g.exp().sum()).backward()])
def test_a_graph_that_backward_made_is_in_doubt_when_it_is_run(use: Any) -> None:
    reading = memfix.peak(doubly(use))
    assert GRADIENTS in reading.notes
    assert not reading.exact


@pytest.mark.parametrize("use", [lambda y, g: None, lambda y, g: y.backward()])
def test_a_graph_that_backward_made_is_in_no_doubt_while_it_is_not_run(use: Any) -> None:
    assert GRADIENTS not in memfix.peak(doubly(use)).notes


def test_gradients_for_every_sample_are_no_gradients_of_gradients() -> None:
    def build(device: str) -> Any:
        weight, samples = torch.empty(64, device=device), torch.empty(16, 64, device=device)
        gradient = torch.func.grad(lambda w, x: (w * x).sin().sum())
        return lambda: torch.func.vmap(gradient, (None, 0))(weight, samples)

    reading = memfix.peak(build)
    assert reading.notes == ()
    assert reading.held_bytes == 16 * 64 * 4


def test_a_gradient_of_a_gradient_by_functions_is_in_doubt() -> None:
    def build(device: str) -> Any:
        weight = torch.empty(64, device=device)
        first = torch.func.grad(lambda w: (w.sin() * w).sum())
        return lambda: torch.func.grad(lambda w: first(w).sum())(weight)

    assert GRADIENTS in memfix.peak(build).notes


# ---------------------------------------------------------------- long chains
def chain(num_nodes: int) -> Any:
    def build(device: str) -> Any:
        x = torch.empty(N, device=device, requires_grad=True)

        def step() -> None:
            y = x
            for _ in range(num_nodes):
                y = y + 1
            y.backward(torch.empty_like(x))

        return step

    return build


def test_a_chain_that_the_stack_cannot_free_is_measured() -> None:
    """In a process with a tenth of the usual stack, where a tenth of the nodes is as bad."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_STACK, (800 << 10, resource.getrlimit(resource.RLIMIT_STACK)[1]))
import memfix
from tests.meters.test_engine import chain
print(memfix.peak(chain(5000)).peak_bytes)
"""
    ended = forked_python("-c", code)
    # two values: the next one and the one before, which it needs no more
    assert (ended.stdout, ended.returncode) == (f"{2 * 4 * N}\n", 0), ended.stderr


def test_a_chain_that_a_thread_cannot_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_STACK_BYTES_OF_THREADS", 800 << 10)
    with ThreadPoolExecutor(1) as pool, pytest.raises(MeasurementError, match="from the main thread"):
        pool.submit(memfix.peak, chain(5000)).result()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(memfix.peak, chain(500)).result().peak_bytes == 2 * 4 * N


def _order_of_gradients(forward: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> list[str]:
    order: list[str] = []

    def build(device: str) -> Callable[[], None]:
        layer, x = nn.Linear(6, 4, device=device), torch.randn(5, 6, device=device)
        for name, parameter in layer.named_parameters():
            parameter.register_hook(lambda _, name=name: order.append(name))
        return lambda: forward(layer, x).sum().backward()

    memfix.peak(build)
    return order[-2:]


def test_autocast_casts_arguments_in_the_order_of_the_machine_that_was_measured() -> None:
    """The engine runs the last cast first. On x86 the bias is cast before the weight, on Arm after it: so the bias's
    gradient, 2 KiB of an accelerate step on an H200, is alive while the weight's is cast, or is not."""

    def by_autocast(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return layer(x)

    def by_hand(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):  # which has nothing left to cast
            weight, bias = layer.weight.bfloat16(), layer.bias.bfloat16()
            return F.linear(x.bfloat16(), weight, bias)

    assert _order_of_gradients(by_autocast) == ["weight", "bias"]
    assert _order_of_gradients(by_hand) == ["bias", "weight"]


# ---------------------------------------------------------------- the gradients that autograd's thread still holds
def leapfrog(*, needs_more: bool, by_func: bool = False) -> Any:
    """A gradient is dropped, and then a forward takes more than was alive beside the gradient."""

    def build(device: str) -> Any:
        weight = torch.ones(1000, device=device)

        def gradient(of: torch.Tensor) -> torch.Tensor:
            if by_func:
                return torch.func.grad(lambda x: x.square().sum())(of)
            of = of.detach().requires_grad_()
            return torch.autograd.grad(of.square().sum(), of)[0]

        def step() -> None:
            gradient(weight)
            torch.empty(4000 if needs_more else 1, device=device)

        return step

    return build


@pytest.mark.parametrize("by_func", [False, True])
def test_a_gradient_that_was_returned_may_be_dropped_late(by_func: bool) -> None:
    """Measured on an H200 whose CPU was busy: the gradient was alive in the forward that followed."""
    reading = memfix.peak(leapfrog(needs_more=True, by_func=by_func))
    assert reading.notes == (engine.LAST_GRADIENTS,)
    assert (reading.at_least, reading.peak_bytes, reading.at_most) == (16000, 16000, 20000)


def test_a_gradient_that_is_dropped_late_does_not_matter_below_the_peak() -> None:
    assert memfix.peak(leapfrog(needs_more=False)).exact


def test_the_next_backward_drops_the_gradients_of_the_last() -> None:
    def build(device: str) -> Any:
        weight = torch.ones(1000, device=device, requires_grad=True)

        def step() -> None:
            torch.autograd.grad(weight.square().sum(), weight)
            (weight * torch.ones(1, device=device)).sum().backward()
            weight.grad = None
            torch.empty(3000, device=device)

        return step

    assert memfix.peak(build).exact

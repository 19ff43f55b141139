"""Which arguments of a Triton kernel are written into, by its source."""

# ruff: noqa: F821

from __future__ import annotations

from typing import Any

import pytest

from memfix.meters.simulated.kernel_writes import written_arguments, written_by_source


class Wrapped:
    """As ``triton.jit`` and its autotuner wrap a function."""

    def __init__(self, function: Any) -> None:
        self.fn = function


def copies(source, target, size, BLOCK):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + places, tl.load(source + places), mask=places < size)


def walks(source, target, size):
    at: tl.tensor = target
    for _ in range(size):
        tl.store(at, tl.load(source))
        at += 1


def counts(source, target, size):
    tl.atomic_add(target + tl.load(source), size)


def describes(source, target, size):
    tile = tl.make_tensor_descriptor(target, [size], [1], [16])
    tile.store([0], tl.load(source))


def adds_one(number, to):
    tl.store(to, tl.load(to) + number)


ADDS_ONE = Wrapped(adds_one)


def calls(source, target, size):
    ADDS_ONE(to=target + size, number=tl.load(source))


def calls_in_order(source, target, size):
    ADDS_ONE(tl.load(source), target)


def carries(source, target, size):
    first = target
    second = first
    for _ in range(size):
        tl.store(second, 0.0)
        second = first + 1


def swaps(source, target, size):
    one, other = source, target
    tl.store(one, tl.load(other))


@pytest.mark.parametrize("kernel", [copies, walks, counts, describes, calls, calls_in_order, carries])
def test_only_what_is_stored_to_is_written(kernel: Any) -> None:
    for wrapped in (kernel, Wrapped(kernel), Wrapped(Wrapped(kernel))):
        written = written_arguments(wrapped, ("source", "target"), {"size": 3, "grid": "grid"})
        assert [argument for argument in written if argument != 3] == ["target"]  # a number may be part of an address


def test_names_that_are_assigned_together_stand_for_all_that_is_assigned() -> None:
    assert written_arguments(swaps, ("source", "target", "size"), {}) == ["source", "target"]


def test_without_a_source_everything_may_be_written() -> None:
    made: dict[str, Any] = {}
    exec("def made(source, target): pass", made)
    kernels = [
        made["made"],
        print,
        Wrapped(len),
        (lambda source, target: None),
    ]
    for kernel in kernels:
        assert written_arguments(kernel, ("source",), {"target": "target"}) == ["source", "target"]


def test_the_last_function_of_a_source_is_the_kernel() -> None:
    written = written_by_source(
        "import triton\n"
        "def added(one, other):\n    return one + other\n"
        "@triton.jit\n"
        "def kernel(in_ptr0, in_out_ptr0, out_ptr0, xnumel):\n"
        "    tmp0 = tl.load(in_ptr0 + (x0), xmask)\n"
        "    tl.store(in_out_ptr0 + (x0), tmp0, xmask)\n"
        "    tl.store(out_ptr0 + (x0), tmp0, xmask)\n"
    )
    assert written(("a", "b", "c", 4)) == ["b", "c"]

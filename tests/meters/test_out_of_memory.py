"""Steps that need more memory than the simulated GPU has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memfix
from memfix.meters.simulated.gpus import get_gpu

TOO_MUCH, SOME = 10**13, 1 << 20
MY_ERRORS = (ValueError, torch.cuda.OutOfMemoryError)


def reading_of(step: Callable[[str], Any]) -> memfix.Reading:
    def build(device: str) -> Callable[[], Any]:
        return lambda: step(device)

    return memfix.peak(build)


def take(device: str, size: int) -> torch.Tensor:
    return torch.empty(size, device=device, dtype=torch.uint8)


def by_name(device: str) -> torch.Tensor:
    try:
        return take(device, TOO_MUCH)
    except torch.OutOfMemoryError:
        return take(device, SOME)


def by_a_tuple(device: str) -> torch.Tensor:
    try:
        return take(device, TOO_MUCH)
    except MY_ERRORS:
        return take(device, SOME)


def by_the_second_clause(device: str) -> torch.Tensor:
    try:
        return take(device, TOO_MUCH)
    except (KeyError, ValueError) as error:
        raise AssertionError from error
    except torch.cuda.OutOfMemoryError:
        return take(device, SOME)


def around_another(device: str) -> torch.Tensor:
    try:
        try:
            with torch.no_grad():
                return take(device, TOO_MUCH)
        except KeyError:
            return take(device, 2 * SOME)
    except torch.OutOfMemoryError:
        return take(device, SOME)


def smaller_and_smaller(device: str) -> torch.Tensor:
    size = 1 << 45
    while True:
        try:
            return take(device, size)
        except torch.OutOfMemoryError:
            size = size // 4 if size > 1 << 41 else SOME


def suppressed(device: str) -> torch.Tensor:
    with contextlib.suppress(KeyError, torch.OutOfMemoryError):
        return take(device, TOO_MUCH)
    return take(device, SOME)


@pytest.mark.parametrize(
    "step", [by_name, by_a_tuple, by_the_second_clause, around_another, smaller_and_smaller, suppressed]
)
def test_a_step_that_catches_the_error_gets_it(step: Callable[[str], Any]) -> None:
    reading = reading_of(step)
    assert (reading.peak_bytes, reading.exact) == (SOME, True)


def many_small_ones(device: str) -> int:
    size, kept = 1 << 30, list[torch.Tensor]()
    try:
        while len(kept) < 1000:
            kept.append(take(device, size))
    except torch.OutOfMemoryError:
        pass
    return len(kept)


def test_small_tensors_run_out_of_memory_together() -> None:
    capacity = get_gpu("H200").memory_bytes
    assert 0.9 * capacity < reading_of(many_small_ones).peak_bytes < 1.1 * capacity


def any_error(device: str) -> torch.Tensor:
    try:
        return take(device, TOO_MUCH)
    except Exception:
        return take(device, SOME)


def every_error(device: str) -> torch.Tensor:
    try:
        return take(device, TOO_MUCH)
    except:  # noqa: E722
        return take(device, SOME)


@pytest.mark.parametrize("step", [any_error, every_error])
def test_a_step_that_catches_any_error_is_an_estimate_where_it_does_not_fit(step: Callable[[str], Any]) -> None:
    reading = reading_of(step)
    assert not reading.exact
    assert "catches errors" in reading.notes[0]


def not_caught(device: str) -> torch.Tensor:
    with contextlib.suppress(torch.OutOfMemoryError):
        take(device, SOME)
    try:
        return take(device, TOO_MUCH)
    except ValueError:
        raise
    finally:
        del device


@pytest.mark.parametrize("step", [not_caught, lambda device: take(device, TOO_MUCH)])
def test_a_step_that_does_not_catch_it_is_measured_to_its_end(step: Callable[[str], Any]) -> None:
    try:
        reading = reading_of(step)
    except torch.OutOfMemoryError:  # of a caller, not of the step
        raise AssertionError from None
    assert (reading.peak_bytes, reading.exact) == (TOO_MUCH, True)


def test_errors_that_are_caught_do_not_matter_where_the_step_fits() -> None:
    def step(device: str) -> torch.Tensor:
        try:
            return take(device, SOME)
        except Exception:
            return take(device, 2 * SOME)

    assert reading_of(step).exact

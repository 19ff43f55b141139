"""The largest size that fits: the search, its bounds, and what it says of what it tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memfix
from memfix.errors import EXIT_NOT_MEASURED, EXIT_USAGE, MeasurementError, UsageError
from memfix.meters.base import Reading, Step, StepBuilder
from memfix.units import GiB, MiB


def bytes_of(value: int) -> StepBuilder:
    """A step that takes ``value`` bytes."""

    def build(device: str) -> Step:
        return lambda: torch.empty(value, dtype=torch.uint8, device=device)

    return build


def reading(size: int, *, exact: bool = True, base: int = 0) -> Reading:
    return Reading("simulated", "H200", size, base, 0, 0, size, exact=exact)


def counted(asked: list[int]) -> Callable[[int], StepBuilder]:
    """A build for each value that writes down which were asked for."""

    def build_of(value: int) -> StepBuilder:
        asked.append(value)
        return bytes_of(value)

    return build_of


# ---------------------------------------------------------------- the search
def test_the_largest_is_found_to_the_last_unit() -> None:
    found = memfix.fit(bytes_of, MiB)
    assert (found.value, found.bounded, found.capacity_bytes) == (MiB, False, MiB)


@pytest.mark.parametrize("start", [1, 3, MiB - 1, MiB, MiB + 1, 5 * MiB, 1 << 24])
def test_the_start_does_not_change_the_answer(start: int) -> None:
    assert memfix.fit(bytes_of, "1 MiB", start=start).value == MiB


def test_the_search_doubles_upwards_and_then_halves_the_gap() -> None:
    asked: list[int] = []
    found = memfix.fit(counted(asked), 5 * 512, start=512)
    assert found.value == 5 * 512
    assert asked[:4] == [512, 1024, 2048, 4096]
    assert asked[4:7] == [3072, 2560, 2816]


def test_the_search_halves_downwards_from_a_start_that_is_too_large() -> None:
    asked: list[int] = []
    found = memfix.fit(counted(asked), 1024, start=8192)
    assert found.value == 1024
    assert asked[:4] == [8192, 4096, 2048, 1024]


def test_every_value_is_measured_once() -> None:
    asked: list[int] = []
    found = memfix.fit(counted(asked), MiB, start=7)
    assert len(asked) == len(set(asked))
    assert [row.value for row in found.tried] == asked


def test_what_existed_before_counts_too() -> None:
    def build_of(value: int) -> StepBuilder:
        def build(device: str) -> Step:
            weight = torch.empty(MiB, dtype=torch.uint8, device=device)
            return lambda: (weight, torch.empty(value, dtype=torch.uint8, device=device))

        return build

    found = memfix.fit(build_of, 3 * MiB)
    assert found.value == 2 * MiB
    assert max(row.bytes for row in found.tried if row.fits) == 3 * MiB


def test_the_allocators_rounding_counts_too() -> None:
    found = memfix.fit(bytes_of, 1000)
    assert found.value == 512
    assert {row.value: row.bytes for row in found.tried}[1024] == 1024
    assert all(row.bytes % 512 == 0 for row in found.tried)


# ---------------------------------------------------------------- bounds
def test_nothing_above_the_bound_is_tried_and_the_answer_says_so() -> None:
    asked: list[int] = []
    found = memfix.fit(counted(asked), MiB, high=100)
    assert (found.value, found.bounded) == (100, True)
    assert max(asked) == 100


def test_a_bound_that_is_too_large_by_one_is_no_bound() -> None:
    found = memfix.fit(bytes_of, MiB, high=MiB + 1)
    assert (found.value, found.bounded) == (MiB, False)


def test_the_bound_itself_may_be_the_start() -> None:
    asked: list[int] = []
    found = memfix.fit(counted(asked), MiB, start=64, high=64)
    assert (found.value, found.bounded, asked) == (64, True, [64])


@pytest.mark.parametrize("start", [4096, 1 << 20])
def test_a_smallest_value_that_is_too_large_cannot_be_fitted(start: int) -> None:
    with pytest.raises(MeasurementError) as refused:
        memfix.fit(bytes_of, "1KiB", start=start, low=4096)
    assert str(refused.value) == "even the smallest value, 4096, needs 4.00 KiB; the capacity is 1.00 KiB"
    assert refused.value.exit_code == EXIT_NOT_MEASURED


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"low": 0}, "low=0, start=0, high=16777216"),
        ({"low": 2, "start": 1}, "low=2, start=1, high=16777216"),
        ({"start": 9, "high": 8}, "low=1, start=9, high=8"),
        ({"high": 0}, "low=1, start=1, high=0"),
    ],
)
def test_bounds_out_of_order_are_refused(bounds: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        memfix.fit(bytes_of, MiB, **bounds)
    assert str(refused.value) == f"fit needs 1 <= low <= start <= high, got {said}"
    assert refused.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        (
            "24 GB",
            "capacity: unknown unit 'GB' in '24 GB'; memfix counts in powers of two: B, KiB, MiB, GiB, TiB",
        ),
        ("much", "capacity: cannot read 'much' as a size; write it as '24GiB', '512MiB' or a number of bytes"),
        ("", "capacity: cannot read '' as a size; write it as '24GiB', '512MiB' or a number of bytes"),
        (-1, "capacity: a size must be at least 0 bytes, got -1"),
        (1.5, "capacity: a size must be an int or a string such as '24GiB', got 1.5"),
        (0, "capacity: nothing fits in 0 bytes"),
        ("0 GiB", "capacity: nothing fits in 0 bytes"),
    ],
)
def test_a_capacity_that_is_no_size_is_refused_before_anything_is_built(capacity: object, message: str) -> None:
    asked: list[int] = []
    with pytest.raises(UsageError) as refused:
        memfix.fit(counted(asked), capacity)  # type: ignore[arg-type]
    assert (str(refused.value), asked) == (message, [])


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown GPU 'H20'; did you mean 'H200'"):
        memfix.fit(bytes_of, MiB, gpu="H20")


# ---------------------------------------------------------------- what is said
def test_the_table_is_in_order_of_size_and_marks_estimates() -> None:
    readings = {
        1023: reading(2 * GiB, exact=False),
        1022: reading(GiB),
        1024: reading(2 * GiB, base=512 * MiB),
    }
    found = memfix.fit(lambda value: value, 2 * GiB, start=1022, high=1024, measure=readings.__getitem__)  # type: ignore
    assert (found.value, found.bounded) == (1023, False)
    assert found.table() == (
        "  1,022      1.00 GiB  fits\n  1,023      2.00 GiB  fits  (an estimate)\n  1,024      2.50 GiB  too much"
    )


def test_the_answer_keeps_the_reading_of_everything_that_was_tried() -> None:
    found = memfix.fit(bytes_of, 1024, start=1024, high=1025)
    assert [(row.value, row.fits, row.reading.peak_bytes, row.bytes) for row in found.tried] == [
        (1024, True, 1024, 1024),
        (1025, False, 1025, 1536),
    ]

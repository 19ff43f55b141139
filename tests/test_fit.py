"""The largest size that fits: the search, its bounds, and what it says of what it tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import memfix
from memfix.errors import EXIT_NOT_MEASURED, EXIT_USAGE, MeasurementError, UsageError
from memfix.fit import DoesNotFit, fit_growing, fit_ranks
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


# ---------------------------------------------------------------- by lines
def line_by_line(asked: list[int], bytes_at: Callable[[int], int]) -> Callable[[int], Reading]:
    """Readings that count how often they were asked for."""

    def reading_at(value: int) -> Reading:
        asked.append(value)
        return reading(bytes_at(value))

    return reading_at


def kinked(value: int) -> int:
    """A straight line that becomes steeper, above a base."""
    return 20 * GiB + 200_000 * value + max(0, value - 60_000) * 150_000


@pytest.mark.parametrize("capacity", ["21GiB", "24GiB", "31GiB", "32GiB", "80GiB", "139GiB"])
def test_by_lines_the_answer_is_that_of_bisection_in_few_readings(capacity: str) -> None:
    asked: list[int] = []
    found = fit_growing(line_by_line(asked, kinked), capacity, start=131_072, low=64, multiple_of=64)
    wanted = memfix.fit(lambda v: v, capacity, low=64, multiple_of=64, measure=lambda v: reading(kinked(v)))  # type: ignore
    assert (found.value, found.bounded) == (wanted.value, False)
    assert len(asked) == len(set(asked)) <= 9
    assert all(value % 64 == 0 for value in asked)


def test_guesses_that_stay_below_the_limit_do_not_lead_to_the_highest_value() -> None:
    """The line through the first two is too steep, and so reaches the capacity too early."""
    asked: list[int] = []
    found = fit_growing(line_by_line(asked, lambda v: 30_390 + 2657 * v - 202 * (v == 1)), 80_000, start=1)
    assert found.value == 18
    assert max(asked) < 100


def test_where_the_start_fits_nothing_far_below_it_is_read() -> None:
    """A fixed cost makes the line through the smallest value overshoot, and large values take long to simulate."""
    asked: list[int] = []
    found = fit_growing(line_by_line(asked, lambda v: max(5000, 3 * v)), 30_000, start=4000)
    assert (found.value, asked) == (10_000, [4000, 2000, 10_000, 10_001])


def test_a_jump_is_found_to_the_last_unit() -> None:
    asked: list[int] = []
    found = fit_growing(line_by_line(asked, lambda v: v + (GiB if v >= 777 else 0)), MiB, start=4096, high=100_000)
    assert (found.value, found.bounded) == (776, False)
    assert len(asked) < 40


def test_by_lines_nothing_above_the_bound_is_tried() -> None:
    asked: list[int] = []
    found = fit_growing(line_by_line(asked, lambda v: v), GiB, start=10, high=1000, multiple_of=10, low=10)
    assert (found.value, found.bounded, max(asked)) == (1000, True, 1000)


def test_by_lines_nothing_fits_where_the_lowest_does_not() -> None:
    found = fit_growing(line_by_line([], kinked), "1GiB", start=100)
    assert (found.value, [row.value for row in found.tried]) == (0, [1])


def test_a_peak_that_does_not_grow_is_bounded_by_the_highest() -> None:
    found = fit_growing(line_by_line([], lambda v: 100), MiB, start=8, high=4096)
    assert (found.value, found.bounded) == (4096, True)


def test_readings_of_an_earlier_search_are_not_taken_again() -> None:
    asked: list[int] = []
    known: dict[int, Reading] = {}
    reading_at = line_by_line(asked, kinked)
    first = fit_growing(reading_at, "80GiB", start=131_072, known=known)
    num_asked = len(asked)
    assert fit_growing(reading_at, "80GiB", start=131_072, known=known).value == first.value
    assert len(asked) == num_asked
    fit_growing(reading_at, "81GiB", start=131_072, known=known)
    assert len(asked) <= num_asked + 3


def test_a_value_that_fits_above_one_that_does_not_is_refused() -> None:
    known = {100: reading(2 * MiB), 2000: reading(2000)}
    with pytest.raises(MeasurementError) as refused:
        fit_growing(line_by_line([], lambda v: v), MiB, start=50, known=known)
    assert str(refused.value) == (
        "the peak falls as the value grows: 100 needs 2.00 MiB and does not fit, 2,000 needs 1.95 KiB and does"
    )


def test_the_function_is_not_hidden_by_the_module_of_its_name() -> None:
    import importlib

    importlib.import_module("memfix.fit")
    importlib.import_module("memfix.suite")
    assert callable(memfix.fit)
    assert callable(memfix.suite)


# ---------------------------------------------------------------- numbers of ranks
def shared(total: int, own: int, asked: list[int] | None = None) -> Callable[[int], Reading]:
    """Readings of ranks that share ``total`` bytes and each need ``own`` besides."""

    def reading_at(world_size: int) -> Reading:
        if asked is not None:
            asked.append(world_size)
        return reading(own, base=total // world_size)

    return reading_at


def test_the_fewest_ranks_are_found_by_doubling() -> None:
    found = fit_ranks(shared(1000, 10), 135)
    assert (found.value, found.sought, [row.value for row in found.tried]) == (8, "smallest", [1, 2, 4, 8])
    assert found.as_dict()["smallest"] == 8
    assert found.answer("{:,} ranks") == "8 ranks"


def test_no_more_ranks_are_tried_where_their_share_is_small_already() -> None:
    asked: list[int] = []
    found = fit_ranks(shared(1000, 500, asked), 400)
    assert (found.value, asked) == (0, [1, 2, 4, 8, 16])
    assert found.answer("{:,} ranks") == "not even 16 ranks"


def test_a_search_that_may_yet_succeed_goes_on() -> None:
    assert fit_ranks(shared(1 << 20, 10), 300).value == 4096


def layered(device: str, mesh: object) -> Step:
    size = (1 << 20) // mesh.size(0)  # type: ignore[attr-defined]
    return lambda: torch.empty(size, dtype=torch.uint8, device=device)


def test_a_step_of_ones_own_is_fitted_over_a_mesh_that_grows() -> None:
    found = memfix.fit_world_size(layered, "256 KiB", mesh={"data": -1, "tensor": 2})
    assert (found.value, [row.value for row in found.tried]) == (8, [2, 4, 8])


def test_a_world_that_is_never_large_enough_is_refused() -> None:
    with pytest.raises(
        DoesNotFit, match=r"^even the largest world size, 4, needs 256.00 KiB; the capacity is 1.00 KiB$"
    ):
        memfix.fit_world_size(layered, "1 KiB", mesh={"data": -1}, high=4)


def test_a_mesh_that_does_not_grow_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^mesh must have one size of -1, which grows with the number of ranks, got"):
        memfix.fit_world_size(layered, "1 KiB", mesh={"data": 4})
    with pytest.raises(UsageError, match=r"^high is the most ranks that are tried, at least 2; got 1$"):
        memfix.fit_world_size(layered, "1 KiB", mesh={"data": -1, "tensor": 2}, high=1)

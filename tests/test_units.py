"""Sizes and times: read exactly, printed for people."""

from __future__ import annotations

from typing import Any

import pytest

from memfix.units import GiB, format_bytes, format_change, format_room, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("7 B", 7),
        ("512MiB", 536_870_912),
        (" 24 GiB ", 25_769_803_776),
        ("1_000", 1000),
        ("1.5 KiB", 1536),
        ("0.1 GiB", 107_374_182),
        ("3TiB", 3_298_534_883_328),
        (0, 0),
        (1024, 1024),
    ],
)
def test_sizes_are_read_exactly_and_a_fraction_of_a_byte_is_dropped(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("count", [0, 1, 1023, 1 << 10, 3 << 20, 39 << 30, 2 << 40])
def test_what_is_printed_in_whole_units_is_read_back(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count


@pytest.mark.parametrize("unit", ["GB", "gib", "K"])
def test_units_that_are_no_power_of_two_are_refused(unit: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole message is compared
        parse_bytes(f"24{unit}")
    assert str(refused.value) == (
        f"unknown unit '{unit}' in '24{unit}'; memfix counts in powers of two: B, KiB, MiB, GiB, TiB"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (-1, "a size must be at least 0 bytes, got -1"),
        ("-1", "cannot read '-1' as a size; write it as '24GiB', '512MiB' or a number of bytes"),
        ("", "cannot read '' as a size; write it as '24GiB', '512MiB' or a number of bytes"),
        ("1e3", "cannot read '1e3' as a size; write it as '24GiB', '512MiB' or a number of bytes"),
        (True, "a size must be an int or a string such as '24GiB', got True"),
        (1.5, "a size must be an int or a string such as '24GiB', got 1.5"),
        (None, "a size must be an int or a string such as '24GiB', got None"),
    ],
)
def test_what_is_no_size_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole message is compared
        parse_bytes(given)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1 << 20, "1.00 MiB"),
        (42_552_000_000, "39.63 GiB"),
        (1 << 51, "2048.00 TiB"),
        (-2048, "-2.00 KiB"),
        (-1, "-1 B"),
    ],
)
def test_bytes_are_printed_in_the_largest_unit_that_leaves_one(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "reference", "text"),
    [
        (122, 100, "+22.0 %"),
        (50, 100, "-50.0 %"),
        (100, 100, "+0.0 %"),
        (1_000_001, 1_000_000, "+1 B"),
        (999_999, 1_000_000, "-1 B"),
        (199, 100, "+99.0 %"),
        (200, 100, "2.0x over"),
        (710, 100, "7.1x over"),
        (1001, 1000, "+0.1 %"),
        (100_030, 100_000, "+30 B"),
        (3, 1, "3.0x over"),
        (2048, 0, "+2.00 KiB"),
    ],
)
def test_a_change_is_a_percentage_a_multiple_or_single_bytes(count: int, reference: int, text: str) -> None:
    assert format_change(count, reference) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2, "2 s"), (1.25e-3, "1.25 ms"), (1e-6, "1 us"), (3.5e-9, "3.5 ns"), (0, "0 ns")],
)
def test_seconds_are_printed_in_the_unit_that_fits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_time_that_rounds_up_to_the_next_unit_is_printed_in_it() -> None:
    assert format_seconds(0.9999) == "1 s"


def test_room_says_what_fits_and_by_how_much_the_rest_does_not() -> None:
    assert format_room(24 * GiB, 24 * GiB) == "fits in 24.00 GiB"
    assert format_room(25 * GiB, 24 * GiB) == "does not fit: 1.00 GiB more than 24.00 GiB"

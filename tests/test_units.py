"""Human forms of sizes, durations and rates: what is read, what is refused, and that printing can be read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.errors import UnitError
from relight.units import (
    format_bytes,
    format_duration,
    format_rate,
    parse_bytes,
    parse_duration,
    parse_rate,
)

COUNTS = st.integers(min_value=0, max_value=2**63)
SECONDS = st.floats(min_value=0, max_value=1e9, allow_nan=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0B", 0),
        ("1 B", 1),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("80GB", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        (" 1.5 GiB ", 3 * 2**29),
        ("0.1GiB", 107374182),
        ("5.67TB", 5_670_000_000_000),
        ("2PiB", 2**51),
        (4096, 4096),
    ],
)
def test_sizes_are_read(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["8G", "8g", "8Gi", "8gb", "8 K", "1mb"])
def test_ambiguous_size_is_refused_with_both_readings(text: str) -> None:
    with pytest.raises(UnitError, match=r"ambiguous: write .* or .*iB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "-1GB",
        "nan",
        "nanGB",
        "infB",
        "1e3B",
        "0.5B",
        "1_000B",
        "12",
        "3XB",
        "1GB2",
        "9999999PB",
        -1,
        2**63 + 1,
    ],
)
def test_other_sizes_are_refused_naming_input_and_forms(text: str | int) -> None:
    with pytest.raises(UnitError) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)
    assert "GiB" in str(caught.value)


@pytest.mark.parametrize("value", [True, 1.5, None, b"1GB"])
def test_a_size_is_text_or_an_int(value: object) -> None:
    with pytest.raises(UnitError):
        parse_bytes(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1 kB", "1000 B"),
        (2**30, "1.074 GB", "1 GiB"),
        (999_949, "999.9 kB", "976.5 KiB"),
        (999_999, "1 MB", "976.6 KiB"),
        (2**20 - 1, "1.049 MB", "1 MiB"),
        (5_670_000_000_000, "5.67 TB", "5.157 TiB"),
    ],
)
def test_sizes_are_printed_with_four_digits(count: int, decimal: str, binary: str) -> None:
    assert (format_bytes(count), format_bytes(count, binary=True)) == (decimal, binary)


@given(count=COUNTS, binary=st.booleans())
def test_printed_size_reads_back_within_its_digits(count: int, binary: bool) -> None:
    assert parse_bytes(format_bytes(count, binary=binary)) == pytest.approx(count, rel=5e-4)


@given(count=COUNTS, binary=st.booleans())
def test_exactly_printed_size_reads_back_to_the_byte(count: int, binary: bool) -> None:
    assert parse_bytes(format_bytes(count, binary=binary, exact=True)) == count


@pytest.mark.parametrize(
    ("count", "expected"), [(2**30, "1 GiB"), (3 * 2**20, "3 MiB"), (1025, "1025 B"), (0, "0 B")]
)
def test_exact_size_uses_the_largest_unit_that_divides_it(count: int, expected: str) -> None:
    assert format_bytes(count, binary=True, exact=True) == expected


def test_negative_size_is_not_printed() -> None:
    with pytest.raises(UnitError):
        format_bytes(-1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10m", 600.0),
        ("10min", 600.0),
        ("180min", 10_800.0),
        ("1.5h", 5400.0),
        ("90s", 90.0),
        ("90 sec", 90.0),
        ("2d", 172_800.0),
        ("250ms", 0.25),
        ("350us", 0.00035),
        ("1h30m", 5400.0),
        ("2d 4h", 187_200.0),
        ("0s", 0.0),
    ],
)
def test_durations_are_read(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10",
        "m",
        "-5m",
        "nans",
        "infs",
        "inf",
        "10M",
        "10mo",
        "1e3s",
        "30m1h",
        "1h1h",
        "5 5s",
        "1h 5",
        "9" * 400 + "s",
    ],
)
def test_other_durations_are_refused_naming_input_and_forms(text: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)
    assert "1h30m" in str(caught.value)


def test_a_duration_is_text() -> None:
    with pytest.raises(UnitError, match="not text"):
        parse_duration(10)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "expected"), [("90", 90.0), (" 1.5 ", 1.5), ("2m", 120.0)])
def test_a_bare_number_is_read_when_the_caller_says_what_it_counts(text: str, expected: float) -> None:
    assert parse_duration(text, bare_unit="s") == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0us"),
        (0.4e-6, "0us"),
        (0.00035, "350us"),
        (0.0125, "12.5ms"),
        (0.9996, "1s"),
        (1.5, "1.5s"),
        (59.97, "1m"),
        (605.0, "10m 5s"),
        (3599.7, "1h"),
        (5400.0, "1h 30m"),
        (187_200.0, "2d 4h"),
    ],
)
def test_durations_are_printed_with_two_units(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


@given(seconds=SECONDS)
def test_printed_duration_reads_back_within_its_digits(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.021, abs=0.5e-6)


@given(seconds=SECONDS)
def test_exactly_printed_duration_reads_back_to_the_bit(seconds: float) -> None:
    assert parse_duration(format_duration(seconds, exact=True)) == seconds


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_what_is_no_duration_is_not_printed(seconds: float) -> None:
    with pytest.raises(UnitError):
        format_duration(seconds)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2GB/s", 2e9), ("1.5GiB/s", 1.5 * 2**30), ("100 MB/s", 1e8), ("25Gbit/s", 3.125e9), ("0B/s", 0.0)],
)
def test_rates_are_read(text: str, expected: float) -> None:
    assert parse_rate(text) == expected


@pytest.mark.parametrize(
    "text", ["", "2GB", "2GB/h", "20Gb/s", "2G/s", "/s", "-1GB/s", "nanGB/s", "9" * 400 + "GB/s", 5]
)
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(UnitError, match="per second"):
        parse_rate(text)


@given(rate=st.floats(min_value=0, max_value=1e15, allow_nan=False))
def test_printed_rate_reads_back_within_its_digits(rate: float) -> None:
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=5e-4, abs=0.51)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_what_is_no_rate_is_not_printed(rate: float) -> None:
    with pytest.raises(UnitError):
        format_rate(rate)

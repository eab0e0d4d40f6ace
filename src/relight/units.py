"""Parse and print byte counts, durations and rates; the only place where human forms become numbers.

Inside relight a number carries its unit in its name (`_bytes`, `_seconds`, `_bytes_per_second`); forms such as
``"80GiB"`` or ``"10m"`` exist only at the command line and in configuration. Decimal (GB, 1e9) and binary
(GiB, 2**30) units are never mixed, and a form that could mean two things is refused.
Must not import anything of relight but errors.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from relight.errors import UnitError

__all__ = ["format_bytes", "format_duration", "format_rate", "parse_bytes", "parse_duration", "parse_rate"]

_DECIMAL_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_BYTES = {**_DECIMAL_BYTES, **_BINARY_BYTES, "KB": 10**3}
_BITS = {"kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
_DURATIONS = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "sec": Fraction(1),
    "m": Fraction(60),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
_PRINTED_DURATIONS = {"d": 86400, "h": 3600, "m": 60, "s": 1}

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)
_COMPOUND = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?\s*[A-Za-z]+\s*)+", re.ASCII)

_BYTES_FORMS = (
    "a number and one of B, kB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB (powers of 1024)"
)
_DURATION_FORMS = "numbers with us, ms, s, m (or min), h, d, such as 250ms, 90s, 10m, 1h30m, 2d"
_RATE_FORMS = "bytes or bits per second, such as 200MB/s, 1.5GiB/s, 25Gbit/s"

# No file offset goes further (8 EiB), so a larger count is a slip of the pen.
_MAX_BYTES = 2**63


def parse_bytes(value: str | int) -> int:
    """Return the byte count that `value` means, rounded to the nearest byte.

    An int is a count of bytes already; text needs a unit, and ``"8G"`` or ``"8gb"`` is refused as ambiguous.

    Raises:
        UnitError: `value` is in no allowed form, negative, not finite or larger than 2**63.
    """
    if isinstance(value, str):
        number, unit = _split(value, _BYTES_FORMS)
        if unit not in _BYTES:
            raise _refused(value, _BYTES_FORMS, _byte_unit_hint(unit))
        if unit == "B" and number.denominator != 1:
            raise _refused(value, _BYTES_FORMS, "part of a byte")
        count = round(number * _BYTES[unit])
    elif isinstance(value, bool) or not isinstance(value, int):
        raise _refused(value, _BYTES_FORMS, "neither text nor an int")
    else:
        count = value
    if not 0 <= count <= _MAX_BYTES:
        raise _refused(value, _BYTES_FORMS, "out of range")
    return count


def format_bytes(count_bytes: int, *, binary: bool = False, exact: bool = False) -> str:
    """Print a byte count, as ``"1.074 GB"`` or with `binary` as ``"1 GiB"``.

    `parse_bytes` of the text gives `count_bytes` within 0.05 percent, and to the byte with `exact`, which
    prints the largest unit that divides the count.

    Raises:
        UnitError: `count_bytes` is negative or larger than 2**63.
    """
    parse_bytes(count_bytes)
    units = _BINARY_BYTES if binary else _DECIMAL_BYTES
    if exact:
        unit = max((u for u in units if count_bytes % units[u] == 0), key=units.__getitem__)
        return f"{count_bytes // units[unit]} {unit}" if count_bytes else "0 B"
    return _scaled(count_bytes, units)


def parse_duration(value: str, *, bare_unit: str | None = None) -> float:
    """Return the duration that `value` means, in seconds.

    Units may be joined, largest first: ``"1h30m"``. A bare number is refused, since it is seconds to one reader
    and steps or minutes to the next, unless `bare_unit` says what it counts.

    Raises:
        UnitError: `value` is in no allowed form, negative or not finite.
    """
    if not isinstance(value, str):
        raise _refused(value, _DURATION_FORMS, "not text")
    if bare_unit is not None and re.fullmatch(r"[0-9]+(\.[0-9]+)?", value.strip(), re.ASCII):
        value = value.strip() + bare_unit
    if not _COMPOUND.fullmatch(value.strip()):
        _split(value, _DURATION_FORMS)
        raise _refused(value, _DURATION_FORMS, "no unit")
    seconds, previous = Fraction(0), None
    for number, unit in _QUANTITY.findall(value):
        scale = _DURATIONS.get(unit)
        if scale is None:
            raise _refused(value, _DURATION_FORMS, f"unknown unit {unit!r}")
        if previous is not None and scale >= previous:
            raise _refused(value, _DURATION_FORMS, "units must go from large to small")
        seconds, previous = seconds + Fraction(number) * scale, scale
    return _finite(value, seconds, _DURATION_FORMS)


def format_duration(seconds: float, *, exact: bool = False) -> str:
    """Print a duration, as ``"350us"``, ``"12.5ms"``, ``"1.5s"``, ``"10m 5s"``, ``"2d 4h"``.

    `parse_duration` of the text gives `seconds` within 2.1 percent and half a microsecond, and to the float
    with `exact`, which prints seconds with all digits.

    Raises:
        UnitError: `seconds` is negative or not finite.
    """
    if not math.isfinite(seconds) or seconds < 0:
        raise _refused(seconds, "a finite number of seconds that is not negative")
    if exact:
        return f"{Fraction(seconds)}s" if float(seconds).is_integer() else f"{_plain(seconds)}s"
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < scale * 999.5:
            return f"{_digits(seconds / scale) if seconds >= scale else round(seconds / scale)}{unit}"
    if seconds < 59.95:
        return f"{_digits(seconds)}s"
    return _two_units(seconds)


def parse_rate(value: str) -> float:
    """Return the rate that `value` means, in bytes per second.

    ``"Gb/s"`` is refused: it is read as bits by some and bytes by others; write ``"Gbit/s"`` or ``"GB/s"``.

    Raises:
        UnitError: `value` is in no allowed form, negative or not finite.
    """
    if not isinstance(value, str):
        raise _refused(value, _RATE_FORMS, "not text")
    amount, slash, per = value.partition("/")
    if not slash or per.strip() != "s":
        raise _refused(value, _RATE_FORMS, "no '/s'")
    number, unit = _split(amount, _RATE_FORMS)
    if unit in _BITS:
        return _finite(value, number * _BITS[unit] / 8, _RATE_FORMS)
    if unit not in _BYTES:
        raise _refused(value, _RATE_FORMS, _byte_unit_hint(unit))
    return _finite(value, number * _BYTES[unit], _RATE_FORMS)


def format_rate(bytes_per_second: float) -> str:
    """Print a rate, as ``"2.5 GB/s"``; `parse_rate` of the text gives it within 0.05 percent and half a byte.

    Raises:
        UnitError: `bytes_per_second` is negative or not finite.
    """
    if not math.isfinite(bytes_per_second) or bytes_per_second < 0:
        raise _refused(bytes_per_second, "a finite rate that is not negative")
    return f"{_scaled(round(bytes_per_second), _DECIMAL_BYTES)}/s"


def _split(value: str, forms: str) -> tuple[Fraction, str]:
    matched = _QUANTITY.fullmatch(value.strip())
    if matched is None:
        raise _refused(value, forms)
    return Fraction(matched[1]), matched[2]


def _finite(value: str, number: Fraction, forms: str) -> float:
    try:
        return float(number)
    except OverflowError as error:
        raise _refused(value, forms, "too large") from error


def _refused(value: object, forms: str, reason: str = "") -> UnitError:
    because = f" ({reason})" if reason else ""
    return UnitError(f"cannot read {value!r}{because}: expected {forms}")


def _byte_unit_hint(unit: str) -> str:
    if not unit:
        return "no unit"
    prefix = unit[0].upper()
    if unit.lower() in {"k", "m", "g", "t", "p", "ki", "mi", "gi", "ti", "pi", *(f"{p}b" for p in "kmgtp")}:
        decimal = "kB" if prefix == "K" else f"{prefix}B"
        return f"{unit!r} is ambiguous: write {decimal} or {prefix}iB"
    return f"unknown unit {unit!r}"


def _scaled(count: int, units: dict[str, int]) -> str:
    """Print `count` with four significant digits in the largest unit that keeps it at least 1."""
    text = f"{count} B"
    for unit, scale in units.items():
        # 0.99995 units would print as 1.000: it is shown in the larger unit.
        if scale > 1 and count >= Fraction(99995, 100000) * scale:
            text = f"{float(f'{count / scale:.4g}'):.15g} {unit}"
    return text


def _digits(value: float) -> str:
    """Print `value` (below 1000) with three significant digits and no exponent."""
    return f"{float(f'{value:.3g}'):.15g}"


def _plain(value: float) -> str:
    """Print all digits of `value` without an exponent, so that float(text) == value."""
    text = repr(value)
    if "e" not in text:
        return text
    mantissa, _, exponent = text.partition("e")
    return f"{value:.{len(mantissa.partition('.')[2]) - int(exponent)}f}"


def _two_units(seconds: float) -> str:
    names = list(_PRINTED_DURATIONS)
    index = next(i for i, name in enumerate(names) if round(seconds) >= _PRINTED_DURATIONS[name])
    large, small = names[index], names[index + 1]
    count, rest = divmod(
        round(seconds / _PRINTED_DURATIONS[small]) * _PRINTED_DURATIONS[small], _PRINTED_DURATIONS[large]
    )
    return f"{count}{large} {rest // _PRINTED_DURATIONS[small]}{small}" if rest else f"{count}{large}"

"""Quantities written with their unit, as in scenario and profile files, to and from plain numbers.

Rates are decimal bits per second (1gbit = 1e9 bit/s) and are returned in bytes per second; sizes
take binary (KiB) or decimal (kB) prefixes; durations go from ns to h; fractions are percentages.
A number without a unit is refused, except "0", so that nobody has to guess which unit was meant.
``parse_x(format_x(value)) == value`` holds for every value a parser can return.
"""

import re
from decimal import Decimal

_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z/%]*)\s*\Z")
_MAX_CHARACTERS = 64

_DURATION_S = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
}
_RATE_BIT_PER_S = {
    "bit": Decimal(1),
    "kbit": Decimal(10**3),
    "mbit": Decimal(10**6),
    "gbit": Decimal(10**9),
    "tbit": Decimal(10**12),
}
_SIZE_BYTES = {
    "B": Decimal(1),
    "kB": Decimal(10**3),
    "MB": Decimal(10**6),
    "GB": Decimal(10**9),
    "TB": Decimal(10**12),
    "KiB": Decimal(2**10),
    "MiB": Decimal(2**20),
    "GiB": Decimal(2**30),
    "TiB": Decimal(2**40),
}
_FRACTION = {"%": Decimal("0.01")}
_MAX_SIZE_BYTES = 2**63 - 1


def parse_duration_s(text: str) -> float:
    """``"0.8ms"`` -> 0.0008. Units: ns, us, ms, s, min, h. ValueError says what is right."""
    return float(_parse(text, _DURATION_S, "a duration", "0.8ms"))


def parse_rate_bytes_per_s(text: str) -> float:
    """``"100gbit"`` -> 12.5e9. Units: bit, kbit, mbit, gbit, tbit, all per second and decimal."""
    return float(_parse(text, _RATE_BIT_PER_S, "a rate", "100gbit") / 8)


def parse_fraction(text: str) -> float:
    """``"0.1%"`` -> 0.001, from 0% to 100%."""
    fraction = float(_parse(text, _FRACTION, "a fraction", "0.1%"))
    if fraction > 1.0:
        raise ValueError(f"{text!r} is more than 100%")
    return fraction


def parse_size_bytes(text: str) -> int:
    """``"64KiB"`` -> 65536. Units: B, kB, MB, GB, TB and KiB, MiB, GiB, TiB; a whole number."""
    size = _parse(text, _SIZE_BYTES, "a size", "64KiB")
    if size > _MAX_SIZE_BYTES:
        raise ValueError(f"{text!r} is more than 2^63 - 1 bytes")
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size)


def format_duration_s(value_s: float) -> str:
    """0.0008 -> ``"0.8ms"``-like text: the largest of s, ms, us, ns that keeps the number >= 1."""
    return _format(_decimal(value_s), {unit: _DURATION_S[unit] for unit in ("s", "ms", "us", "ns")})


def format_rate(value_bytes_per_s: float) -> str:
    """12.5e9 -> ``"100gbit"``."""
    return _format(_decimal(value_bytes_per_s) * 8, dict(reversed(_RATE_BIT_PER_S.items())))


def format_fraction(value: float) -> str:
    """0.001 -> ``"0.1%"``."""
    if value > 1.0:
        raise ValueError(f"{value!r} is more than 1")
    return _format(_decimal(value), _FRACTION)


def format_size_bytes(value_bytes: int) -> str:
    """65536 -> ``"64KiB"``: the largest binary unit that divides the size, else bytes."""
    if not 0 <= value_bytes <= _MAX_SIZE_BYTES:
        raise ValueError(f"{value_bytes!r} is not a size in bytes")
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value_bytes and value_bytes % int(_SIZE_BYTES[unit]) == 0:
            return f"{value_bytes // int(_SIZE_BYTES[unit])}{unit}"
    return f"{value_bytes}B"


def _parse(text: str, units: dict[str, Decimal], what: str, example: str) -> Decimal:
    wanted = f'write {what} as text such as "{example}" (units: {", ".join(units)})'
    if not isinstance(text, str):
        raise ValueError(f"{text!r} has no unit: {wanted}")
    match = _NUMBER.match(text) if len(text) <= _MAX_CHARACTERS else None
    if match is None:
        raise ValueError(f"{text[:_MAX_CHARACTERS]!r} is not {what}: {wanted}")
    number, unit = Decimal(match[1]), match[2]
    if unit not in units and not (unit == "" and number == 0):
        found = f"has the unit {unit!r}" if unit else "has no unit"
        raise ValueError(f"{text!r} {found}: {wanted}")
    value = number * units.get(unit, Decimal(1))
    if value > Decimal("1e300"):
        raise ValueError(f"{text!r} is too large: {wanted}")
    return value


def _decimal(value: float) -> Decimal:
    if not 0 <= value <= 1e300:
        raise ValueError(f"{value!r} is not a finite number of at least 0")
    return Decimal(repr(float(value)))


def _format(value: Decimal, units_largest_first: dict[str, Decimal]) -> str:
    unit, scale = next(
        ((unit, scale) for unit, scale in units_largest_first.items() if value >= scale),
        list(units_largest_first.items())[-1],
    )
    number = (value / scale).normalize()
    # Plain digits where they are short; an exponent only for extreme values.
    text = format(number, "f")
    return f"{text if len(text) <= 24 else number}{unit}"

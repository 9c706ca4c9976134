"""Values of a scenario file: quantities that are text with a unit, and bounds of plain numbers.

"100gbit", "0.8ms", "0.1%" and "256KiB" become base units (bytes per second, seconds, shares, bytes)
while the file is read; an error says what would be right.
"""

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic import WithJsonSchema as JsonSchema

from netem.units import (
    parse_duration_s,
    parse_fraction,
    parse_rate_bytes_per_s,
    parse_size_bytes,
)


def _text(
    parse: Callable[[str], float],
    what: str,
    example: str,
    inside: Callable[[float], bool],
    bounds: str,
) -> tuple[Any, ...]:
    """Annotations of a quantity written as text. ``parse`` says in its error what is right, and
    ``bounds`` which values are ``inside``, in the units that people write."""

    def read(text: str) -> float:
        value = parse(text)
        if not inside(value):
            raise ValueError(f"{text!r} is out of bounds: give {bounds}")
        return value

    schema = {"type": "string", "description": what, "examples": [example]}
    return (BeforeValidator(read), JsonSchema(schema))


_DURATION = (parse_duration_s, "a duration with its unit: ns, us, ms, s, min, h", "0.8ms")
_RATE = (parse_rate_bytes_per_s, "a rate with its unit: bit, kbit, mbit, gbit, tbit", "1gbit")
_FRACTION = (parse_fraction, "a percentage", "0.1%")
_SIZE = (parse_size_bytes, "a size with its unit: B, kB, MB, GB, KiB, MiB, GiB", "64KiB")

#: A year: no run is longer, and sums of durations stay finite.
_MAX_S = 3.2e7
_YEAR = "at most 8800h"
Duration = Annotated[float, *_text(*_DURATION, lambda s: 0 <= s <= _MAX_S, f"0s or more, {_YEAR}")]
PositiveDuration = Annotated[
    float, *_text(*_DURATION, lambda s: 0 < s <= _MAX_S, f"more than 0s, {_YEAR}")
]
StateDuration = Annotated[
    float, *_text(*_DURATION, lambda s: 1e-3 <= s <= _MAX_S, f"1ms or more, {_YEAR}")
]
Rate = Annotated[float, *_text(*_RATE, lambda rate: 125 <= rate <= 1e18, "1kbit to 8000000tbit")]
Loss = Annotated[float, *_text(*_FRACTION, lambda share: 0 <= share < 1, "0% to less than 100%")]
Share = Annotated[float, *_text(*_FRACTION, lambda share: 0 <= share <= 1, "0% to 100%")]
ByteSize = Annotated[float, *_text(*_SIZE, lambda size: 1 <= size <= 1e15, "1B to 1000000GB")]
ChunkSize = Annotated[int, *_text(*_SIZE, lambda size: 2**10 <= size <= 2**22, "1KiB to 4MiB")]
#: No worker reads a longer body (``harness.surface.generate.MAX_BODY_BYTES``).
BodySize = Annotated[int, *_text(*_SIZE, lambda size: 2**10 <= size <= 2**24, "1KiB to 16MiB")]

PathText = Annotated[str, Field(min_length=1, max_length=4096)]
Name = Annotated[str, Field(min_length=1, max_length=64)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]
Count = Annotated[int, Field(ge=0, le=1000)]
Price = Annotated[float, Field(gt=0, le=1e6)]
FreePrice = Annotated[float, Field(ge=0, le=1e6)]

"""Azure (LLM inference 2023 and 2024): ``TIMESTAMP,ContextTokens,GeneratedTokens``, times with up
to nine decimals and an optional offset from UTC."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np

from harness.core import ScenarioError
from harness.trace.record import Rows, malformed, tokens

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def read_azure(path: Path, lines: list[bytes]) -> Rows:
    header = lines[0].decode("utf-8-sig", "replace").strip()
    if header != AZURE_HEADER:
        raise malformed(path, 1, f'the header must be "{AZURE_HEADER}", not {header[:80]!r}')
    if len(lines) == 1:
        raise ScenarioError(f"The trace file {path} holds a header but no request.")
    at_ns, inputs, outputs = [], [], []
    for number, line in enumerate(lines[1:], start=2):
        text = line.decode("utf-8", "replace").strip()
        if not text:
            raise malformed(path, number, "the line is empty")
        cells = text.split(",")
        if len(cells) != 3:
            raise malformed(path, number, f"3 values are needed, not {len(cells)}")
        try:
            at_ns.append(_nanoseconds(cells[0]))
            inputs.append(tokens(cells[1]))
            outputs.append(tokens(cells[2]))
        except ValueError as error:
            raise malformed(path, number, error) from error
    # Subtracting in whole nanoseconds: a float holds an epoch time to a quarter of a microsecond.
    first_ns = min(at_ns)
    return Rows(
        arrival_s=np.array([(one - first_ns) / 1e9 for one in at_ns], dtype=np.float64),
        input_tokens=np.array(inputs, dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
        hash_ids=((),) * len(inputs),
    )


def _nanoseconds(text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:80]!r} is not a time such as 2023-11-16 18:15:46.6805900")
    date, clock, fraction, zone = match.groups()
    moment = datetime.fromisoformat(f"{date}T{clock}{(zone or 'Z').replace('Z', '+00:00')}")
    whole_s = (moment - _EPOCH) // timedelta(seconds=1)
    return whole_s * 10**9 + int((fraction or "0").ljust(9, "0"))

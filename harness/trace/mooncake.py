"""Mooncake (FAST'25 release): ``{"timestamp": ms, "input_length", "output_length", "hash_ids"}`` a
line, hash ids of 512-token blocks.

Its timestamps are quantised to 3 s, give or take a few ms. Where every timestamp of a file is
within 10 ms of a multiple of 3 s, each is set to that multiple, and a replay spreads the arrivals
of a quantum uniformly inside it, in file order, by the seed. Others stay as they are.
"""

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from harness.trace.record import MAX_TOKENS, Rows, malformed, quantised

QUANTUM_S = 3.0
_TOLERANCE_S = 0.010


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], ...] = ()


def read_mooncake(path: Path, lines: list[bytes]) -> Rows:
    decoder = msgspec.json.Decoder(_Line)
    rows: list[_Line] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise malformed(path, number, "the line is empty")
        try:
            rows.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise malformed(path, number, error) from error
    arrival_s = np.array([row.timestamp / 1e3 for row in rows], dtype=np.float64)
    arrival_s, quantum_s = quantised(arrival_s, QUANTUM_S, _TOLERANCE_S)
    return Rows(
        arrival_s=arrival_s,
        input_tokens=np.array([row.input_length for row in rows], dtype=np.int64),
        output_tokens=np.array([row.output_length for row in rows], dtype=np.int64),
        hash_ids=tuple(row.hash_ids for row in rows),
        quantum_s=quantum_s,
    )

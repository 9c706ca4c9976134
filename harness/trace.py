"""Request traces: Mooncake JSONL and Azure CSV, read whole, validated line by line.

- Mooncake (FAST'25 release): ``{"timestamp": ms, "input_length", "output_length", "hash_ids"}`` a
  line. Its timestamps are quantised to 3 s, give or take a few ms. Where every timestamp of a file
  is within 10 ms of a multiple of 3 s, each is set to that multiple, and a replay spreads the
  arrivals of a quantum uniformly inside it, in file order, by the seed. Others stay as they are.
- Azure (LLM inference 2023): ``TIMESTAMP,ContextTokens,GeneratedTokens``, times with up to nine
  decimals.

Times count from the first request. Trace files are the user's: nothing here contains one.
"""

import hashlib
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from harness.block_keys import HASH_ID_TOKENS
from harness.core import ScenarioError
from harness.datafile import read_bytes

TraceFormat = Literal["mooncake", "azure"]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_TRACE_BYTES = 256 * 1024 * 1024
MAX_TOKENS = 2**31
QUANTUM_S = 3.0
_QUANTUM_TOLERANCE_S = 0.010
_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by arrival. Arrays are (requests,); ``quantum_s`` is 0 where times are exact.

    ``end_s`` is where the trace, or the part taken of it, ends.
    """

    path: Path
    format: TraceFormat
    sha256: str
    quantum_s: float
    end_s: float
    arrival_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    hash_ids: tuple[tuple[int, ...], ...]

    def part(self, duration_s: float | None, num_requests: int | None) -> "Trace":
        """The requests of the first ``duration_s`` of trace time, ``num_requests`` at most."""
        count, end_s = len(self.arrival_s), self.end_s
        if duration_s is not None:
            count = int(np.searchsorted(self.arrival_s, duration_s, side="left"))
            end_s = min(end_s, duration_s)
        if num_requests is not None and num_requests < count:
            count = num_requests
            end_s = min(end_s, float(self.arrival_s[count - 1]) + self.quantum_s)
        return replace(
            self,
            end_s=end_s,
            arrival_s=self.arrival_s[:count],
            input_tokens=self.input_tokens[:count],
            output_tokens=self.output_tokens[:count],
            hash_ids=self.hash_ids[:count],
        )

    @property
    def rate_req_per_s(self) -> float:
        """Mean rate over the trace; one second is the shortest span a rate is formed over."""
        return len(self.arrival_s) / max(self.end_s, 1.0)

    def unlimited_cache_tokens(self) -> FloatArray:
        """Tokens of each prompt's prefix that an earlier request had: whole blocks of its hash ids,
        which stand for all before them, in a cache that forgets nothing. # (requests,)"""
        seen: set[int] = set()
        found = np.zeros(len(self.hash_ids))
        for index, hashes in enumerate(self.hash_ids):
            hits = 0
            while hits < len(hashes) and hashes[hits] in seen:
                hits += 1
            found[index] = hits * HASH_ID_TOKENS
            seen.update(hashes)
        return found

    def spread_arrivals(self, rng: np.random.Generator) -> FloatArray:
        """Arrival times, spread uniformly and in file order inside each quantum; ascending."""
        draws = rng.random(len(self.arrival_s))
        if not self.quantum_s:
            return self.arrival_s.copy()
        _, quantum = np.unique(self.arrival_s, return_inverse=True)
        ordered = draws[np.lexsort((draws, quantum))]
        width_s = np.minimum(self.quantum_s, self.end_s - self.arrival_s)
        return np.asarray(self.arrival_s + ordered * width_s)


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], ...] = ()


#: arrival_s, input_tokens, output_tokens, hash_ids
_Row = tuple[float, int, int, tuple[int, ...]]


def read_trace(path: Path, trace_format: TraceFormat | None = None) -> Trace:
    """Read a trace; the format is found by extension, then by the first line, unless given.

    Raises ScenarioError naming ``file:line`` for a line that is empty or malformed.
    """
    data = read_bytes(path, "trace file", MAX_TRACE_BYTES)
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    if not lines:
        raise ScenarioError(f"The trace file {path} is empty; it needs at least one request.")
    found = trace_format or _detect(path, lines[0])
    rows = _mooncake(path, lines) if found == "mooncake" else _azure(path, lines)
    arrival_s = np.array([row[0] for row in rows], dtype=np.float64)
    order = np.argsort(arrival_s, kind="stable")
    arrival_s = arrival_s[order]
    arrival_s, quantum_s = _quantised(arrival_s) if found == "mooncake" else (arrival_s, 0.0)
    arrival_s = arrival_s - arrival_s[0]
    return Trace(
        path=path,
        format=found,
        sha256=hashlib.sha256(data).hexdigest(),
        quantum_s=quantum_s,
        end_s=float(arrival_s[-1]) + quantum_s,
        arrival_s=arrival_s,
        input_tokens=np.array([rows[i][1] for i in order], dtype=np.int64),
        output_tokens=np.array([rows[i][2] for i in order], dtype=np.int64),
        hash_ids=tuple(rows[i][3] for i in order),
    )


def _detect(path: Path, first: bytes) -> TraceFormat:
    if path.suffix.lower() == ".jsonl" or first.lstrip().startswith(b"{"):
        return "mooncake"
    if path.suffix.lower() == ".csv" or first.startswith(b"TIMESTAMP"):
        return "azure"
    raise ScenarioError(
        f"The format of the trace file {path} is not recognised by its extension (.jsonl, .csv) or "
        f'its first line (a JSON object, or "{_AZURE_HEADER}"); set workload.trace_format to '
        '"mooncake" or "azure" if it is one of them.'
    )


def _malformed(path: Path, number: int, why: object) -> ScenarioError:
    return ScenarioError(
        f"The trace file is malformed at {path}:{number}: {why}. Correct or remove the line."
    )


def _mooncake(path: Path, lines: list[bytes]) -> list[_Row]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    rows: list[_Row] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise _malformed(path, number, "the line is empty")
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _malformed(path, number, error) from error
        rows.append((row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids))
    return rows


def _azure(path: Path, lines: list[bytes]) -> list[_Row]:
    header = lines[0].decode("utf-8-sig", "replace").strip()
    if header != _AZURE_HEADER:
        raise _malformed(path, 1, f'the header must be "{_AZURE_HEADER}", not {header[:80]!r}')
    if len(lines) == 1:
        raise ScenarioError(f"The trace file {path} holds a header but no request.")
    timed: list[tuple[int, int, int]] = []
    for number, line in enumerate(lines[1:], start=2):
        text = line.decode("utf-8", "replace").strip()
        if not text:
            raise _malformed(path, number, "the line is empty")
        cells = text.split(",")
        if len(cells) != 3:
            raise _malformed(path, number, f"3 values are needed, not {len(cells)}")
        try:
            timed.append((_azure_ns(cells[0]), _tokens(cells[1]), _tokens(cells[2])))
        except ValueError as error:
            raise _malformed(path, number, error) from error
    # Subtracting in whole nanoseconds: a float holds an epoch time to a quarter of a microsecond.
    first_ns = min(row[0] for row in timed)
    return [((ns - first_ns) / 1e9, new, out, ()) for ns, new, out in timed]


def _azure_ns(text: str) -> int:
    match = _AZURE_TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:80]!r} is not a time such as 2023-11-16 18:15:46.6805900")
    date, clock, fraction, zone = match.groups()
    moment = datetime.fromisoformat(f"{date}T{clock}{(zone or 'Z').replace('Z', '+00:00')}")
    whole_s = (moment - _EPOCH) // timedelta(seconds=1)
    return whole_s * 10**9 + int((fraction or "0").ljust(9, "0"))


def _tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= MAX_TOKENS):
        raise ValueError(f"{text[:80]!r} is not a number of tokens of at least 1")
    return int(text)


def _quantised(arrival_s: FloatArray) -> tuple[FloatArray, float]:
    """Arrivals set to their quantum and the quantum, or as they are and 0."""
    nearest = np.round(arrival_s / QUANTUM_S) * QUANTUM_S
    if np.abs(arrival_s - nearest).max() <= _QUANTUM_TOLERANCE_S:
        return np.asarray(nearest), QUANTUM_S
    return arrival_s, 0.0

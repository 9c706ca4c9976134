"""A schedule as the load holds it: columns, so that a million requests take tens of megabytes.

Read from JSON lines (one ``core.Request`` a line) and checked on the way, split among workers by
index modulo their number, and sent to a worker as the bytes of its columns. A request becomes a
``core.Request`` only when its time has come.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, overload

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from harness.core import Request, ScenarioError
from harness.load.prompts import MAX_PROMPT_TOKENS

#: A schedule line has some kilobytes of prefix hashes at the most.
MAX_LINE_BYTES = 4 << 20
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A schedule line: ``core.Request`` with bounds on every field."""

    rid: Annotated[str, Meta(min_length=1, max_length=256)]
    index: Annotated[int, Meta(ge=0, le=2**53)]
    planned_s: Annotated[float, Meta(ge=0, le=1e9)]
    input_tokens: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    output_tokens: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    hash_ids: tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...] = ()
    cached_tokens: Annotated[int, Meta(ge=0, le=MAX_PROMPT_TOKENS)] = 0


_LINE_KEYS = tuple(entry.name for entry in fields(Request))


@dataclass(frozen=True, slots=True, eq=False)
class Shard(Sequence[Request]):
    """Planned requests in order of ``planned_s``. ``*_ends[i]`` is where request i's part of
    ``rids`` (UTF-8) or ``hash_ids`` ends."""

    indexes: Ints  # (requests,)
    planned_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    hash_ids: Ints  # (all hash ids,)
    hash_ends: Ints
    rids: bytes
    rid_ends: Ints

    def __len__(self) -> int:
        return len(self.indexes)

    @overload
    def __getitem__(self, at: int) -> Request: ...
    @overload
    def __getitem__(self, at: slice) -> "Shard": ...
    def __getitem__(self, at: int | slice) -> "Request | Shard":
        if isinstance(at, slice):
            return self._chosen(np.arange(len(self))[at])
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        at %= len(self)
        first_hash = int(self.hash_ends[at - 1]) if at else 0
        return Request(
            self.rid(at),
            int(self.indexes[at]),
            float(self.planned_s[at]),
            int(self.input_tokens[at]),
            int(self.output_tokens[at]),
            tuple(self.hash_ids[first_hash : int(self.hash_ends[at])].tolist()),
            int(self.cached_tokens[at]),
        )

    def __iter__(self) -> Iterator[Request]:
        return map(self.__getitem__, range(len(self)))

    def rid(self, at: int) -> str:
        """The name of request ``at``, without the rest of it."""
        first = int(self.rid_ends[at - 1]) if at else 0
        return self.rids[first : int(self.rid_ends[at])].decode()

    def part(self, worker: int, workers: int) -> "Shard":
        """What worker ``worker`` of ``workers`` replays: the requests by index modulo."""
        assert 0 <= worker < workers
        if workers == 1:
            return self
        return self._chosen(np.flatnonzero(self.indexes % workers == worker))

    def _chosen(self, rows: Ints) -> "Shard":
        hash_ids, hash_ends = _ragged(self.hash_ids, self.hash_ends, rows)
        rids, rid_ends = _ragged(np.frombuffer(self.rids, np.uint8), self.rid_ends, rows)
        return Shard(
            self.indexes[rows],
            self.planned_s[rows],
            self.input_tokens[rows],
            self.output_tokens[rows],
            self.cached_tokens[rows],
            hash_ids,
            hash_ends,
            rids.tobytes(),
            rid_ends,
        )

    def to_bytes(self) -> bytes:
        """The columns for another process, little-endian."""
        columns: dict[str, bytes] = {}
        for name in _COLUMNS:
            value = getattr(self, name)
            little = value if isinstance(value, bytes) else _little(value).tobytes()
            columns[name] = little
        return msgspec.msgpack.encode(columns)

    @staticmethod
    def from_bytes(data: bytes) -> "Shard":
        """The shard that ``to_bytes`` wrote; what came over a network is checked."""
        columns = msgspec.msgpack.decode(data, type=dict[str, bytes])
        arrays: dict[str, Ints | Floats | bytes] = {}
        for name in _COLUMNS:
            kind = "<f8" if name == "planned_s" else "<i8"
            arrays[name] = (
                columns[name] if name == "rids" else _native(np.frombuffer(columns[name], kind))
            )
        return Shard(**arrays)  # type: ignore[arg-type]  # each column by its name


_COLUMNS = tuple(entry.name for entry in fields(Shard))


class _Builder:
    """Columns as they grow."""

    def __init__(self) -> None:
        self.numbers: list[tuple[int, int, int, int]] = []
        self.planned_s: list[float] = []
        self.hash_ids: list[int] = []
        self.hash_ends: list[int] = []
        self.rids: list[bytes] = []

    def add(self, one: "_Line | Request") -> None:
        self.numbers.append((one.index, one.input_tokens, one.output_tokens, one.cached_tokens))
        self.planned_s.append(one.planned_s)
        self.hash_ids += one.hash_ids
        self.hash_ends.append(len(self.hash_ids))
        self.rids.append(one.rid.encode())

    def shard(self) -> Shard:
        numbers = np.array(self.numbers, np.int64).reshape(-1, 4).T.copy()  # [4, requests]
        return Shard(
            indexes=numbers[0],
            planned_s=np.array(self.planned_s, np.float64),
            input_tokens=numbers[1],
            output_tokens=numbers[2],
            cached_tokens=numbers[3],
            hash_ids=np.array(self.hash_ids, np.int64),
            hash_ends=np.array(self.hash_ends, np.int64),
            rids=b"".join(self.rids),
            rid_ends=np.cumsum([len(rid) for rid in self.rids], dtype=np.int64),
        )


#: Requests that are held as Python objects while a file is read.
_PIECE = 65_536


def read_schedule(path: Path) -> Shard:
    """Every planned request of a JSONL schedule, in order.

    Raises ScenarioError naming ``file:line`` for a line that is empty, malformed, out of order or
    repeats a rid or an index, and for a schedule without any line.
    """
    pieces: list[Shard] = []
    builder, last_s = _Builder(), 0.0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b""), 1):
                request = _parse_line(line, path, number)
                if request.planned_s < last_s:
                    raise ScenarioError(
                        f"{path}:{number}: planned_s {request.planned_s} is before the line above "
                        f"({last_s}); a schedule is sorted by planned_s."
                    )
                last_s = request.planned_s
                builder.add(request)
                if number % _PIECE == 0:
                    pieces.append(builder.shard())
                    builder = _Builder()
    except OSError as error:
        raise ScenarioError(f"{path}: cannot read the schedule: {error.strerror}.") from error
    schedule = _joined([*pieces, builder.shard()])
    if not len(schedule):
        raise ScenarioError(f"{path}: the schedule is empty; it needs one request a line.")
    _refuse_repeated(schedule, path)
    return schedule


def write_schedule(requests: Sequence[Request], path: Path) -> None:
    """Write ``requests`` as the JSONL file that ``read_schedule`` reads."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as lines:
        lines.writelines(encode(request) + b"\n" for request in requests)


def shard_of(requests: Sequence[Request]) -> Shard:
    """Requests that are in memory, as columns."""
    builder = _Builder()
    for request in requests:
        builder.add(request)
    return builder.shard()


def refuse_unknown(raw: dict[str, object], known: tuple[str, ...], place: str) -> None:
    """Name the first key that is not ``known``, and the nearest that is. Raises ScenarioError."""
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}."
            raise ScenarioError(f"{place}: unknown key {key!r}; {hint}")


def _parse_line(line: bytes, path: Path, number: int) -> _Line:
    if not line.endswith(b"\n") and len(line) >= MAX_LINE_BYTES:
        raise ScenarioError(f"{path}:{number}: the line is longer than {MAX_LINE_BYTES} bytes.")
    if not line.strip():
        raise ScenarioError(
            f"{path}:{number}: the line is empty; a schedule has one request a line."
        )
    try:
        return _DECODE(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _explain_line(line, f"{path}:{number}")
        raise ScenarioError(f"{path}:{number}: {error}.") from error


_DECODE = msgspec.json.Decoder(_Line).decode


def _explain_line(line: bytes, place: str) -> None:
    """Name the nearest key when that is what is wrong with a line that did not decode."""
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{place}: not a JSON object: {error}.") from error
    if isinstance(raw, dict):
        refuse_unknown(raw, _LINE_KEYS, place)


def _refuse_repeated(schedule: Shard, path: Path) -> None:
    count = len(schedule)
    # Hashes first: a set of a million names is ten times the schedule.
    hashes = np.fromiter((hash(schedule.rid(at)) for at in range(count)), np.int64, count)
    if len(np.unique(hashes)) == len(np.unique(schedule.indexes)) == count:
        return
    rids: set[str] = set()
    indexes: set[int] = set()
    for at in range(count):
        rid, index = schedule.rid(at), int(schedule.indexes[at])
        if rid in rids or index in indexes:
            raise ScenarioError(
                f"{path}:{at + 1}: rid {rid!r} or index {index} occurs twice; both name one "
                "request."
            )
        rids.add(rid)
        indexes.add(index)


def _joined(pieces: list[Shard]) -> Shard:
    if len(pieces) == 1:
        return pieces[0]
    columns = {
        name: np.concatenate([getattr(piece, name) for piece in pieces])
        for name in _COLUMNS
        if name not in {"hash_ends", "rids", "rid_ends"}
    }
    return Shard(
        **columns,
        hash_ends=_shifted([piece.hash_ends for piece in pieces]),
        rids=b"".join(piece.rids for piece in pieces),
        rid_ends=_shifted([piece.rid_ends for piece in pieces]),
    )


def _shifted(ends: list[Ints]) -> Ints:
    """Ends within each piece as ends within all of them."""
    lengths = np.cumsum([0, *(int(one[-1]) if len(one) else 0 for one in ends)])
    shifted = [one + before for one, before in zip(ends, lengths, strict=False)]
    return np.concatenate(shifted).astype(np.int64)


def _ragged(values: npt.NDArray[Any], ends: Ints, rows: Ints) -> tuple[npt.NDArray[Any], Ints]:
    """The chosen rows of a column whose rows have lengths of their own."""
    starts = np.concatenate([[0], ends[:-1]])[rows] if len(ends) else ends[rows]
    lengths = ends[rows] - starts
    new_ends = np.cumsum(lengths).astype(np.int64)
    if not len(new_ends) or not new_ends[-1]:
        return values[:0], new_ends
    within = np.arange(new_ends[-1]) - np.repeat(new_ends - lengths, lengths)
    return values[np.repeat(starts, lengths) + within], new_ends


def _little(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return column.astype(column.dtype.newbyteorder("<"), copy=False)


def _native(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return column.astype(column.dtype.newbyteorder("="), copy=False)

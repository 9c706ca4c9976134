"""Raw samples: one row a request (prefill) or a batch (decode), kept whatever became of it.

While a profile is measured rows are appended to ``NAME.samples.jsonl``, one write a row, so that a
kill loses at most the row being written. At the end, or after Ctrl-C, they go into
``NAME.samples.parquet`` with an explicit schema, and the spool is removed. The first line of the
spool, and the metadata of the table, say what was measured: engine, version, flags, model,
hardware. A session that would measure something else refuses to add to them.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from harness.child import Spool
from harness.core import ScenarioError
from harness.profiler.plan import Cell, Kind
from harness.record.run_directory import write_atomically

VERSION = 1
_F, _I, _T = pa.float64(), pa.int64(), pa.string()

_COLUMNS: list[tuple[str, pa.DataType]] = [
    ("kind", _T),
    ("new_tokens", _I),
    ("cached_tokens", _I),
    ("batch", _I),
    ("context_tokens", _I),
    ("session", _I),
    ("visit", _I),
    ("used", pa.bool_()),
    ("unused_because", _T),
    ("value_s", _F),
    ("outside_s", _F),
    ("inside_s", _F),
    ("parts_s", pa.map_(_T, _F)),
    ("prompt_tokens", _I),
    ("told_cached_tokens", _I),
    ("mean_context_tokens", _F),
    ("steps_s", pa.list_(_F)),
    ("kv_wire_bytes", _I),
    ("resident_tokens", _I),
    ("egress_bytes_per_s", _F),
    ("unix_s", _F),
    ("mono_ns", _I),
    ("sm_clock_hz", _F),
    ("memory_clock_hz", _F),
    ("power_w", _F),
    ("temperature_c", _F),
    ("memory_used_bytes", _I),
    ("throttle_reasons", _I),
]
SCHEMA = pa.schema(_COLUMNS)


@dataclass(frozen=True, slots=True)
class Sample:
    """One row; times in scenario seconds. ``value_s`` is what the profile takes: the inside of a
    prefill where the engine tells it, the mean step of a batch. None where it failed."""

    kind: Kind
    new_tokens: int
    cached_tokens: int
    batch: int
    context_tokens: int
    session: int
    visit: int
    used: bool
    unused_because: str | None
    value_s: float | None
    outside_s: float | None = None
    inside_s: float | None = None
    parts_s: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: int | None = None
    told_cached_tokens: int | None = None
    mean_context_tokens: float | None = None
    steps_s: tuple[float, ...] = ()
    kv_wire_bytes: int | None = None
    resident_tokens: int | None = None
    egress_bytes_per_s: float | None = None
    unix_s: float = 0.0
    mono_ns: int = 0
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    throttle_reasons: int | None = None

    @property
    def cell(self) -> Cell:
        return Cell(self.kind, self.new_tokens, self.cached_tokens, self.batch, self.context_tokens)


class SampleFile:
    """The samples of one profile, on disk. ``identity`` is what is measured, as plain JSON."""

    def __init__(self, stem: Path, identity: Mapping[str, Any]) -> None:
        self.table_path = stem.with_name(f"{stem.name}.samples.parquet")
        self.spool_path = stem.with_name(f"{stem.name}.samples.jsonl")
        self._identity = json.loads(json.dumps(identity))
        self.samples: list[Sample] = []

    def load(self) -> None:
        """Take up what earlier sessions left. ScenarioError if it is of something else."""
        if self.table_path.exists():
            self.samples += self._read_table()
        if self.spool_path.exists():
            # A kill between writing the table and removing the spool leaves rows in both.
            known = {(one.session, one.mono_ns) for one in self.samples}
            self.samples += [
                one for one in self._read_spool() if (one.session, one.mono_ns) not in known
            ]
            self.compact()

    def add(self, sample: Sample) -> None:
        """Keep a sample, on disk too."""
        is_new = not self.spool_path.exists()
        with Spool(self.spool_path) as spool:
            if is_new:
                spool.write({"identity": self._identity})
            spool.write(asdict(sample))
        self.samples.append(sample)

    def compact(self) -> None:
        """Write all samples as a table; the spool goes when the table is there."""
        metadata = {
            "prfaas_table": "profile_samples",
            "prfaas_schema_version": str(VERSION),
            "prfaas_identity": json.dumps(self._identity),
        }
        rows = [asdict(one) | {"parts_s": list(one.parts_s.items())} for one in self.samples]
        table = pa.Table.from_pylist(rows, schema=SCHEMA.with_metadata(metadata))
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer, compression="zstd")
        write_atomically(self.table_path, buffer.getvalue().to_pybytes())
        self.spool_path.unlink(missing_ok=True)

    def _read_table(self) -> list[Sample]:
        try:
            # Arrow's own file: its threads may outlive one of Python's when the process ends.
            with pa.OSFile(str(self.table_path), "rb") as file:
                table = pq.read_table(file)
        except (OSError, pa.ArrowException) as error:
            raise ScenarioError(f"cannot read {self.table_path}: {error}") from error
        metadata = table.schema.metadata or {}
        if not table.schema.equals(SCHEMA) or b"prfaas_identity" not in metadata:
            raise ScenarioError(
                f"{self.table_path} is no table of profile samples of version {VERSION}; move it "
                "away to measure anew."
            )
        self._check(json.loads(metadata[b"prfaas_identity"]), self.table_path)
        return [
            Sample(**row | {"parts_s": dict(row["parts_s"]), "steps_s": tuple(row["steps_s"])})
            for row in table.to_pylist()
        ]

    def _read_spool(self) -> list[Sample]:
        """Rows of a session that was killed; a last line that was cut off is dropped."""
        head, *lines = self.spool_path.read_bytes().split(b"\n")
        try:
            identity = msgspec.json.decode(head)["identity"]
            rows = [msgspec.json.decode(line, type=Sample) for line in lines[:-1]]
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise ScenarioError(
                f"{self.spool_path} is no spool of profile samples ({error}); move it away to "
                "measure anew."
            ) from error
        self._check(identity, self.spool_path)
        return rows

    def _check(self, found: Mapping[str, Any], path: Path) -> None:
        if found == self._identity:
            return
        keys = sorted({*found, *self._identity})
        changed = next(key for key in keys if found.get(key) != self._identity.get(key))
        was, now = found.get(changed), self._identity.get(changed)
        if isinstance(was, dict) and isinstance(now, dict):
            inner = next(k for k in sorted({*was, *now}) if was.get(k) != now.get(k))
            changed, was, now = f"{changed}.{inner}", was.get(inner), now.get(inner)
        raise ScenarioError(
            f"{path} holds samples of something else: {changed} was {was!r} and is {now!r}. "
            "Samples of two engines are not mixed: measure into another --out folder, or move the "
            "file away."
        )

"""The run directory: where a run's files lie, its manifest and its schedule.

``runs/<UTC YYYYmmddTHHMMSSZ>-<scenario>/`` holds ``manifest.json``, ``schedule.jsonl``,
``expected.jsonl``, ``spool/`` (JSON lines, appended as results arrive) and, once a run has ended or
``prfaas report`` is asked for it, one Parquet file a table, ``verdict.json``, ``report.html`` and
``trace.json``. The manifest is replaced whole and atomically, so a reader finds the old one or the
new one. Everything a report needs is in here: it never reads the scenario's files again.
"""

import dataclasses
import difflib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from harness.core import Instance, PrfaasError, Request, ScenarioError

SCHEMA_VERSION = 1
Status = Literal["running", "finished", "interrupted", "failed"]
Kind = Literal["live", "simulated"]
_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
_MAX_COLLISIONS = 100
_DEPLOYMENT = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: Tables of the resolved scenario that a verdict or a report reads from the manifest.
_READ_TABLES = ("slo", "scheduling", "load", "workload", "link", "prefix_cache")
_READ_NUMBERS = ("rate_scale", "rate_req_per_s")
#: No count of tokens or requests comes near it; larger ones do not fit the tables.
MAX_COUNT = 2**53


@dataclass(frozen=True, slots=True)
class Cell:
    """One deployment run once. Both instants are null until they happened."""

    deployment: str
    repeat: int
    start_mono_ns: int | None = None
    end_mono_ns: int | None = None

    @property
    def name(self) -> str:
        return f"{self.deployment}-r{self.repeat}"


@dataclass(frozen=True, slots=True)
class DeploymentModel:
    """What the throughput model says of a deployment at the offered load.

    ``lambda_max_req_per_s`` uses T(E[l]) as the paper does, ``lambda_max_exact_req_per_s`` uses
    E[T(l)]. ``utilisation`` is load over capacity by stage; ``fitting_load_scale`` multiplies the
    load to bring the busiest stage to 0.95.
    """

    lambda_max_req_per_s: float | None = None
    lambda_max_exact_req_per_s: float | None = None
    utilisation: dict[str, float] = field(default_factory=dict)
    fitting_load_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a run was. ``link_*`` hold the link in scenario and wall units as its room wrote it."""

    run_id: str
    started_utc: str
    started_mono_ns: int
    scenario: dict[str, Any]
    scenario_hash: str
    time_scale: float
    byte_scale: float
    deployments: tuple[Cell, ...]
    instances: dict[str, tuple[Instance, ...]]
    #: ``simulated``: nothing was run live. Its clock is simulated too, and starts with the load.
    kind: Kind = "live"
    status: Status = "running"
    error: str | None = None
    seeds: dict[str, int] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)
    link_backend: str | None = None
    link_requested: dict[str, Any] | None = None
    link_applied: dict[str, Any] | None = None
    link_ceiling: dict[str, Any] | None = None
    link_check: dict[str, Any] | None = None
    link_check_after: dict[str, Any] | None = None
    link_changes: tuple[dict[str, Any], ...] = ()
    link_failures: tuple[str, ...] = ()
    link_notes: tuple[str, ...] = ()
    #: Figures of the client against a server of known truth, or why it was not tried; null: never
    #: asked. Then each load worker of each cell with its clock, and in words those that were lost
    #: and the clocks that moved.
    load_self_test: dict[str, Any] | None = None
    load_workers: tuple[dict[str, Any], ...] = ()
    load_workers_lost: tuple[str, ...] = ()
    load_clock_faults: tuple[str, ...] = ()
    #: How many requests, their SHA-256, and how bursty they are beside what was intended.
    schedule: dict[str, Any] | None = None
    models: dict[str, DeploymentModel] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def deployment_names(self) -> tuple[str, ...]:
        """Each deployment once, in the order in which the run planned them."""
        return tuple(dict.fromkeys(cell.deployment for cell in self.deployments))

    def started(self, deployment: str, repeat: int, start_mono_ns: int) -> "Manifest":
        """The manifest once this cell's load has its origin."""
        return self._with_cell(deployment, repeat, start_mono_ns=start_mono_ns)

    def ended(self, deployment: str, repeat: int, end_mono_ns: int) -> "Manifest":
        """The manifest once this cell is over."""
        return self._with_cell(deployment, repeat, end_mono_ns=end_mono_ns)

    def _with_cell(self, deployment: str, repeat: int, **change: int) -> "Manifest":
        cells = tuple(
            dataclasses.replace(cell, **change)  # type: ignore[arg-type]  # keys are Cell's own
            if (cell.deployment, cell.repeat) == (deployment, repeat)
            else cell
            for cell in self.deployments
        )
        assert cells != self.deployments, f"{deployment} repeat {repeat} is not in the manifest"
        return dataclasses.replace(self, deployments=cells)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths inside one run directory, and what is read and written whole."""

    path: Path

    @classmethod
    def create(cls, root: Path, scenario_name: str, now_utc: datetime) -> "RunDirectory":
        """Make a new directory under ``root``; a second one within a second gets a suffix."""
        assert now_utc.tzinfo is not None, "a run starts at a UTC time"
        stamp = now_utc.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
        name = _NAME.sub("-", scenario_name).strip("-.")[:80] or "run"
        for attempt in range(_MAX_COLLISIONS):
            suffix = f"-{attempt + 1}" if attempt else ""
            path = root / f"{stamp}-{name}{suffix}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ScenarioError(
                    f"cannot make the run directory {path}: {error.strerror}. "
                    "Name a directory that can be written."
                ) from error
            (path / "spool").mkdir()
            return cls(path)
        raise PrfaasError(f"{root} already holds {_MAX_COLLISIONS} runs named {stamp}-{name}")

    @property
    def manifest_path(self) -> Path:
        return self.path / "manifest.json"

    @property
    def schedule_path(self) -> Path:
        return self.path / "schedule.jsonl"

    @property
    def expected_path(self) -> Path:
        return self.path / "expected.jsonl"

    @property
    def verdict_path(self) -> Path:
        return self.path / "verdict.json"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    @property
    def simulation_path(self) -> Path:
        """Of a simulated run: what ``prfaas simulate --json`` printed."""
        return self.path / "simulation.json"

    @property
    def trace_path(self) -> Path:
        return self.path / "trace.json"

    def cell_path(self, cell: Cell) -> Path:
        """The spool directory of one deployment and repeat."""
        return self.path / "spool" / cell.name

    def spool_path(self, cell: Cell, name: str) -> Path:
        """One spool file, such as ``client`` or ``gateway``, of one deployment and repeat."""
        return self.cell_path(cell) / f"{name}.jsonl"

    def client_paths(self, cell: Cell, name: str = "client") -> tuple[Path, ...]:
        """The spools of all load workers of a cell; the one of a single worker has no number."""
        several = sorted(
            self.cell_path(cell).glob(f"{name}-*.jsonl"),
            key=lambda path: (len(path.name), path.name),
        )
        return tuple(several) or (self.spool_path(cell, name),)

    def simulated_path(self, deployment: str) -> Path:
        """The simulation of the schedule on one deployment, one JSON line a request."""
        return self.path / "spool" / f"simulated-{deployment}.jsonl"

    def table_path(self, name: str) -> Path:
        """One of the Parquet tables, by name."""
        return self.path / f"{name}.parquet"

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace ``manifest.json`` atomically."""
        document = msgspec.to_builtins(manifest, str_keys=True)
        write_atomically(self.manifest_path, json_bytes(document))

    def read_manifest(self) -> Manifest:
        """The manifest, validated; ScenarioError names the file and the key that is wrong."""
        raw = _read(self.manifest_path, "is this a run directory?")
        try:
            document = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ScenarioError(f"{self.manifest_path} is not JSON: {error}") from error
        _check_manifest_keys(document, self.manifest_path)
        try:
            manifest = msgspec.convert(document, Manifest)
        except msgspec.ValidationError as error:
            raise ScenarioError(f"{self.manifest_path}: {error}") from error
        for fault in _manifest_faults(manifest):
            raise ScenarioError(f"{self.manifest_path}: {fault}")
        return manifest

    def write_schedule(self, requests: Iterable[Request]) -> None:
        """Write the planned requests, one JSON line each."""
        lines = b"".join(msgspec.json.encode(request) + b"\n" for request in requests)
        write_atomically(self.schedule_path, lines)

    def read_schedule(self) -> tuple[Request, ...]:
        """The planned requests in order; ScenarioError names the line that is wrong."""
        raw = _read(self.schedule_path, "the run ended before its schedule was written")
        decoder = msgspec.json.Decoder(Request)
        requests = []
        for number, line in enumerate(raw.splitlines(), start=1):
            try:
                requests.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ScenarioError(f"{self.schedule_path}:{number}: {error}") from error
        for key in ("rid", "index"):
            if len({getattr(request, key) for request in requests}) != len(requests):
                raise ScenarioError(f"{self.schedule_path} names a request twice (by its {key})")
        for request in requests:
            if (
                max(
                    abs(v)
                    for v in (
                        request.index,
                        request.input_tokens,
                        request.output_tokens,
                        request.cached_tokens,
                    )
                )
                > MAX_COUNT
            ):
                raise ScenarioError(
                    f"{self.schedule_path}: request {request.rid} has a number beyond {MAX_COUNT}"
                )
        return tuple(requests)


def json_bytes(document: object) -> bytes:
    """Indented JSON; a number that JSON cannot hold is a fault of the caller, so it raises."""
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside ``path``, then rename over it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise PrfaasError(f"cannot write {path}: {error.strerror}") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _read(path: Path, hint: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ScenarioError(f"cannot read {path}: {error.strerror}; {hint}") from error


def _manifest_faults(manifest: Manifest) -> Iterator[str]:
    """What the types let pass and no run of ours writes."""
    for key in ("time_scale", "byte_scale"):
        value = getattr(manifest, key)
        if not (math.isfinite(value) and value > 0):
            yield f"{key!r} must be positive and finite, not {value:g}"
    if len({(cell.deployment, cell.repeat) for cell in manifest.deployments}) < len(
        manifest.deployments
    ):
        yield "'deployments' names a deployment and repeat twice"
    for name in (*manifest.deployment_names(), *manifest.instances):
        # It becomes part of a path.
        if not _DEPLOYMENT.fullmatch(name):
            yield f"{name[:80]!r} is not the name of a deployment"
    for name in manifest.deployment_names():
        if name not in manifest.instances:
            yield f"'instances' lacks the deployment {name!r}"
    tables = {f"scenario.{key}": manifest.scenario.get(key, {}) for key in _READ_TABLES}
    for key in ("link_requested", "link_applied", "link_check"):
        tables[key] = getattr(manifest, key)
    for place, table in tables.items():
        if table is None and place.startswith("link_"):
            continue
        if not isinstance(table, dict):
            yield f"{place!r} must be an object"
            continue
        for key, value in table.items():
            if not (key.endswith("_s") or key in _READ_NUMBERS) or value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                yield f"'{place}.{key}' must be a number or null, not {str(value)[:80]!r}"
            elif key in _READ_NUMBERS and value <= 0:
                yield f"'{place}.{key}' must be positive, not {value}"
    for name, model in manifest.models.items():
        if model.fitting_load_scale is not None and model.fitting_load_scale <= 0:
            yield f"'models.{name}.fitting_load_scale' must be positive"


def _check_manifest_keys(document: object, path: Path) -> None:
    if not isinstance(document, dict):
        raise ScenarioError(f"{path} holds no JSON object; is this a run directory?")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ScenarioError(
            f"{path} has schema_version {version!r}; this version reads {SCHEMA_VERSION}. "
            "Use the version of prfaas-bench that wrote it (manifest key 'versions')."
        )
    valid = [entry.name for entry in dataclasses.fields(Manifest)]
    for key in document:
        if key not in valid:
            nearest = difflib.get_close_matches(key, valid, n=1, cutoff=0.0)[0]
            raise ScenarioError(
                f"{path}: unknown key {key!r}; the nearest valid one is {nearest!r}"
            )

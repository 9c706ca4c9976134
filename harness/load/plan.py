"""What one load process is told: the plan file, and the schedule that it names.

The plan is one JSON object; the schedule has one ``core.Request`` a line, in the order of
``planned_s``, and is fixed before the run. A request leaves at
``start_mono_ns + planned_s / time_scale * 1e9`` on CLOCK_MONOTONIC, whatever became of the ones
before it. With ``concurrency`` the loop is closed instead (``harness.load.replay``). Everything is
read and checked here, before a socket is opened; what is wrong is refused with the file, the line
or key, and what would be right.
"""

import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from harness.core import ScenarioError
from harness.load.schedule import read_schedule, refuse_unknown, write_schedule

__all__ = ["Plan", "load_plan", "read_schedule", "write_plan", "write_schedule"]

#: A plan is a few hundred bytes.
MAX_PLAN_BYTES = 1 << 20
MAX_WORKERS = 64

#: Printable ASCII, so that neither header nor request line can be broken out of.
_Token = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[!-~]+$")]
_Text = Annotated[str, Meta(min_length=1, max_length=4096)]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The plan file. Relative paths are relative to the file that names them.

    ``workers`` load processes on this host and ``remote_workers`` that are started elsewhere share
    the schedule; with more than one of both, or with ``web_fd``, a Locust master drives them.
    Worker k appends to ``spool_path`` with ``-k`` before its suffix, a single one to the path as it
    is; ``samples_path`` likewise. ``token`` is what a remote worker must know; ``web_fd`` is an
    inherited socket that listens for Locust's web UI.
    """

    host: _Token
    port: Annotated[int, Meta(ge=1, le=65535)]
    path: Annotated[str, Meta(max_length=4096, pattern=r"^/[!-~]*$")]
    api_key: _Token | None
    model: _Text
    time_scale: Annotated[float, Meta(ge=1e-3, le=1e6)]
    schedule_path: _Text
    spool_path: _Text
    salt: _Text
    request_timeout_s: Annotated[float, Meta(gt=0, le=86400)]
    keep_alive: bool = False
    concurrency: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None
    think_time_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    workers: Annotated[int, Meta(ge=0, le=MAX_WORKERS)] = 1
    remote_workers: Annotated[int, Meta(ge=0, le=MAX_WORKERS)] = 0
    bind_host: _Token = "127.0.0.1"
    bind_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    token: _Token | None = None
    web_fd: Annotated[int, Meta(ge=0)] | None = None
    samples_path: _Text | None = None

    @property
    def num_workers(self) -> int:
        return self.workers + self.remote_workers

    @property
    def distributed(self) -> bool:
        """Whether a master drives workers; else one process does all."""
        return self.num_workers > 1 or self.remote_workers > 0 or self.web_fd is not None


def worker_path(path: str, worker: int, workers: int) -> str:
    """Where worker ``worker`` of ``workers`` writes what a single one would write to ``path``."""
    if workers == 1:
        return path
    whole = Path(path)
    return str(whole.with_name(f"{whole.stem}-{worker}{whole.suffix}"))


def load_plan(path: Path) -> Plan:
    """The plan in ``path``, its paths made absolute. Raises ScenarioError."""
    text = _read(path, MAX_PLAN_BYTES)
    try:
        raw = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ScenarioError(f"{path}: not a JSON document: {error}.") from error
    if not isinstance(raw, dict):
        raise ScenarioError(
            f"{path}: a plan is a JSON object with the keys {', '.join(_plan_keys())}."
        )
    refuse_unknown(raw, _plan_keys(), str(path))
    try:
        plan = msgspec.convert(raw, Plan)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{path}: {error}.") from error
    _check(plan, path)
    beside = path.absolute().parent
    return msgspec.structs.replace(
        plan,
        schedule_path=str(beside / plan.schedule_path),
        spool_path=str(beside / plan.spool_path),
        samples_path=None if plan.samples_path is None else str(beside / plan.samples_path),
    )


def _check(plan: Plan, path: Path) -> None:
    """What keys say together. Raises ScenarioError."""
    fault = None
    if plan.num_workers == 0:
        fault = "'workers' is 0 and there are no 'remote_workers'; nobody would send a request"
    elif plan.num_workers > MAX_WORKERS:
        fault = f"'workers' and 'remote_workers' are more than {MAX_WORKERS} together"
    elif plan.concurrency is not None and plan.concurrency < plan.num_workers:
        fault = (
            f"'concurrency' {plan.concurrency} is less than the {plan.num_workers} workers that "
            "share it; take fewer workers"
        )
    elif plan.remote_workers and plan.token is None:
        fault = "'remote_workers' need a 'token' that they know too"
    if fault is not None:
        raise ScenarioError(f"{path}: {fault}.")


def write_plan(plan: Plan, path: Path) -> None:
    """Write ``plan`` as the file that ``load_plan`` reads; nobody else may, since it has a key."""
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")


def _plan_keys() -> tuple[str, ...]:
    return Plan.__struct_fields__


def _read(path: Path, limit_bytes: int) -> bytes:
    try:
        with path.open("rb") as source:
            if os.fstat(source.fileno()).st_size > limit_bytes:
                raise ScenarioError(f"{path}: larger than {limit_bytes} bytes; not a plan file.")
            return source.read(limit_bytes)
    except OSError as error:
        raise ScenarioError(f"{path}: cannot read the plan: {error.strerror}.") from error

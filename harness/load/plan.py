"""What one load process is told: the plan file and the schedule it replays.

The plan is one JSON object; the schedule has one ``core.Request`` a line, in the order of
``planned_s``, and is fixed before the run. A request leaves at
``start_mono_ns + planned_s / time_scale * 1e9`` on CLOCK_MONOTONIC, whatever became of the ones
before it. Everything is read and checked here, before a socket is opened; what is wrong is refused
with the file, the line or key, and what would be right.
"""

import difflib
import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from harness.core import Request, ScenarioError
from harness.load.prompts import MAX_PROMPT_TOKENS

#: A plan is a few hundred bytes, a schedule line some kilobytes of prefix hashes at the most.
MAX_PLAN_BYTES = 1 << 20
MAX_LINE_BYTES = 4 << 20

#: Printable ASCII, so that neither header nor request line can be broken out of.
_Token = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[!-~]+$")]
_Text = Annotated[str, Meta(min_length=1, max_length=4096)]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The plan file. Relative paths are relative to the file that names them."""

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


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A schedule line: ``core.Request`` with bounds on every field."""

    rid: Annotated[str, Meta(min_length=1, max_length=256)]
    index: Annotated[int, Meta(ge=0)]
    planned_s: Annotated[float, Meta(ge=0, le=1e9)]
    input_tokens: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    output_tokens: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    hash_ids: tuple[int, ...] = ()
    cached_tokens: Annotated[int, Meta(ge=0)] = 0


_LINE_KEYS = tuple(field.name for field in fields(Request))


def load_plan(path: Path) -> Plan:
    """The plan in ``path``, its paths made absolute. Raises ScenarioError."""
    text = _read(path, MAX_PLAN_BYTES)
    try:
        raw = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ScenarioError(f"{path}: not a JSON document: {error}.") from error
    if not isinstance(raw, dict):
        raise ScenarioError(
            f"{path}: a plan is a JSON object with the keys {_listed(_plan_keys())}."
        )
    _refuse_unknown(raw, _plan_keys(), str(path))
    try:
        plan = msgspec.convert(raw, Plan)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{path}: {error}.") from error
    beside = path.absolute().parent
    return msgspec.structs.replace(
        plan,
        schedule_path=str(beside / plan.schedule_path),
        spool_path=str(beside / plan.spool_path),
    )


def read_schedule(path: Path) -> tuple[Request, ...]:
    """Every planned request of a JSONL schedule, in order.

    Raises ScenarioError naming ``file:line`` for a line that is empty, malformed, out of order or
    repeats a rid or an index, and for a schedule without any line.
    """
    requests: list[Request] = []
    rids: set[str] = set()
    indexes: set[int] = set()
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b""), 1):
                request = _parse_line(line, f"{path}:{number}")
                if requests and request.planned_s < requests[-1].planned_s:
                    raise ScenarioError(
                        f"{path}:{number}: planned_s {request.planned_s} is before the line above "
                        f"({requests[-1].planned_s}); a schedule is sorted by planned_s."
                    )
                if request.rid in rids or request.index in indexes:
                    raise ScenarioError(
                        f"{path}:{number}: rid {request.rid!r} or index {request.index} occurs "
                        "twice; both name one request."
                    )
                rids.add(request.rid)
                indexes.add(request.index)
                requests.append(request)
    except OSError as error:
        raise ScenarioError(f"{path}: cannot read the schedule: {error.strerror}.") from error
    if not requests:
        raise ScenarioError(f"{path}: the schedule is empty; it needs one request a line.")
    return tuple(requests)


def write_plan(plan: Plan, path: Path) -> None:
    """Write ``plan`` as the file that ``load_plan`` reads; nobody else may, since it has a key."""
    path.touch(mode=0o600)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")


def write_schedule(requests: tuple[Request, ...], path: Path) -> None:
    """Write ``requests`` as the JSONL file that ``read_schedule`` reads."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as lines:
        lines.writelines(encode(request) + b"\n" for request in requests)


def _parse_line(line: bytes, place: str) -> Request:
    if not line.endswith(b"\n") and len(line) >= MAX_LINE_BYTES:
        raise ScenarioError(f"{place}: the line is longer than {MAX_LINE_BYTES} bytes.")
    if not line.strip():
        raise ScenarioError(f"{place}: the line is empty; a schedule has one request a line.")
    try:
        fields_of_line = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _explain_line(line, place)
        raise ScenarioError(f"{place}: {error}.") from error
    return Request(*(getattr(fields_of_line, key) for key in _LINE_KEYS))


def _explain_line(line: bytes, place: str) -> None:
    """Name the nearest key when that is what is wrong with a line that did not decode."""
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{place}: not a JSON object: {error}.") from error
    if isinstance(raw, dict):
        _refuse_unknown(raw, _LINE_KEYS, place)


def _refuse_unknown(raw: dict[str, object], known: tuple[str, ...], place: str) -> None:
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {_listed(known)}."
            raise ScenarioError(f"{place}: unknown key {key!r}; {hint}")


def _plan_keys() -> tuple[str, ...]:
    return Plan.__struct_fields__


def _listed(keys: tuple[str, ...]) -> str:
    return ", ".join(keys)


def _read(path: Path, limit_bytes: int) -> bytes:
    try:
        with path.open("rb") as source:
            if os.fstat(source.fileno()).st_size > limit_bytes:
                raise ScenarioError(f"{path}: larger than {limit_bytes} bytes; not a plan file.")
            return source.read(limit_bytes)
    except OSError as error:
        raise ScenarioError(f"{path}: cannot read the plan: {error.strerror}.") from error

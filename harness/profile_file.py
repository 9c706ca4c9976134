"""The JSON form of a profile: schema version 1, strict, every point with its provenance."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.core import ScenarioError
from harness.datafile import parse_json_file
from harness.profile import (
    DecodePoint,
    Extrapolation,
    PrefillPoint,
    Profile,
    Provenance,
    ReleaseCurve,
)
from harness.profile_measurement import (
    IntervalFile,
    MeasurementFile,
    QuantilesFile,
    ReleaseFile,
)

MAX_POINTS = 20_000

Text = Annotated[str, Field(min_length=1, max_length=2000)]
Tokens = Annotated[int, Field(ge=1, le=2**31)]
Seconds = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]

_WHAT = "profile file"
#: Rounding of shares that were written as decimals.
_SHARE_ERROR = 1e-6


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PrefillPointFile(_File):
    new_tokens: Tokens
    cached_tokens: Annotated[int, Field(ge=0, le=2**31)] = 0
    prefill_s: Seconds
    provenance: Provenance
    source: Text
    #: 95 % interval, and how many visits it rests on; ``is_tight``: as many as it asked for.
    interval_s: IntervalFile | None = None
    samples: Annotated[int, Field(ge=1)] | None = None
    is_tight: bool | None = None


class DecodePointFile(_File):
    batch: Annotated[int, Field(ge=1, le=100_000)]
    context_tokens: Tokens
    step_s: Seconds
    provenance: Provenance
    source: Text
    interval_s: IntervalFile | None = None
    samples: Annotated[int, Field(ge=1)] | None = None
    is_tight: bool | None = None
    step_quantiles_s: QuantilesFile | None = None


class PrefillFile(_File):
    interpolation: Literal["log_log"]
    points: Annotated[list[PrefillPointFile], Field(min_length=2, max_length=MAX_POINTS)]


class DecodeFile(_File):
    max_batch: Annotated[int, Field(ge=1, le=100_000)]
    provenance: Provenance
    source: Text
    points: Annotated[list[DecodePointFile], Field(min_length=4, max_length=MAX_POINTS)]


class EngineFile(_File):
    name: Text
    version: Text


class ProfileFile(_File):
    """One (engine, hardware, model). ``decode.provenance`` and ``source`` are of ``max_batch``.

    ``decode`` is null, or left out, for hardware that only prefills. ``measurement`` and
    ``release`` are what ``prfaas profile`` found, and left out otherwise.
    """

    schema_version: Literal[1]
    name: Text
    notes: str = ""
    model: Text
    hardware: Text
    gpus_per_instance: Annotated[int, Field(ge=1, le=100_000)]
    engine: EngineFile
    prefill: PrefillFile
    decode: DecodeFile | None = None
    release: Annotated[list[ReleaseFile], Field(max_length=100)] | None = None
    measurement: MeasurementFile | None = None


@dataclass(frozen=True, slots=True)
class ProfileSource:
    """A profile as another process is told to load it."""

    path: str
    extrapolate: Extrapolation | None

    def load(self) -> Profile:
        return load_profile(Path(self.path), self.extrapolate)


def load_profile(path: Path, extrapolate: Extrapolation | None = None) -> Profile:
    """Read a profile. ScenarioError names the file, the key and, for a point, its lengths."""
    return profile_of(read_profile_file(path), path, extrapolate)


def read_profile_file(path: Path) -> ProfileFile:
    """The file as it is written; whether its points make a profile is ``profile_of``'s to say."""
    return parse_json_file(path, _WHAT, ProfileFile)


def profile_of(file: ProfileFile, path: Path, extrapolate: Extrapolation | None = None) -> Profile:
    """The profile that ``file`` describes; ``path`` is where it lies, or will. ScenarioError."""
    _check_prefill(path, file.prefill.points)
    prefill = [
        PrefillPoint(p.new_tokens, p.cached_tokens, p.prefill_s, p.provenance, p.source)
        for p in file.prefill.points
    ]
    decode = file.decode
    steps: list[DecodePoint] = []
    if decode is not None:
        _check_decode(path, decode)
        steps = [
            DecodePoint(p.batch, p.context_tokens, p.step_s, p.provenance, p.source)
            for p in decode.points
        ]
    return Profile(
        name=file.name,
        path=path,
        model=file.model,
        hardware=file.hardware,
        gpus_per_instance=file.gpus_per_instance,
        engine_name=file.engine.name,
        engine_version=file.engine.version,
        prefill_points=tuple(sorted(prefill, key=lambda p: (p.cached_tokens, p.new_tokens))),
        decode_points=tuple(sorted(steps, key=lambda p: (p.batch, p.context_tokens))),
        decode_max_batch=decode.max_batch if decode else None,
        decode_max_batch_provenance=decode.provenance if decode else None,
        decode_max_batch_source=decode.source if decode else None,
        extrapolate=extrapolate,
        release=tuple(_release(path, one) for one in file.release or ()),
    )


def _release(path: Path, one: ReleaseFile) -> ReleaseCurve:
    curve = ReleaseCurve(one.new_tokens, tuple(one.byte_shares), tuple(one.time_shares))
    for name in ("byte_shares", "time_shares"):
        shares = getattr(curve, name)
        if len(shares) != len(curve.byte_shares) or list(shares) != sorted(shares):
            raise ScenarioError(
                f"The {_WHAT} {path} has a release of {one.new_tokens} tokens whose {name!r} do "
                "not ascend, or are not as many as the other shares."
            )
        if abs(shares[-1] - 1) > _SHARE_ERROR:
            raise ScenarioError(
                f"The {_WHAT} {path} has a release of {one.new_tokens} tokens whose {name!r} end "
                f"at {shares[-1]:g} instead of 1."
            )
    return curve


def _check_prefill(path: Path, points: list[PrefillPointFile]) -> None:
    """Each cached length is a curve of two points or more, from 0 cached, never falling."""
    curves: dict[int, list[PrefillPointFile]] = {}
    for point in sorted(points, key=lambda p: (p.cached_tokens, p.new_tokens)):
        curves.setdefault(point.cached_tokens, []).append(point)
    if 0 not in curves:
        raise ScenarioError(
            f"The {_WHAT} {path} has no prefill point with 'cached_tokens' 0; prompts without a "
            "cached prefix need a cost."
        )
    for cached, curve in curves.items():
        if len(curve) < 2:
            raise ScenarioError(
                f"The {_WHAT} {path} has a single prefill point at cached_tokens {cached}; "
                "interpolation needs two or more for each cached length."
            )
        for before, after in pairwise(curve):
            if before.new_tokens == after.new_tokens:
                raise ScenarioError(
                    f"The {_WHAT} {path} has two prefill points at new_tokens {after.new_tokens}, "
                    f"cached_tokens {cached}; keep one."
                )
            if after.prefill_s < before.prefill_s:
                raise ScenarioError(
                    f"The {_WHAT} {path} has a prefill time that falls with length: "
                    f"{before.prefill_s:g} s at {before.new_tokens} new tokens but "
                    f"{after.prefill_s:g} s at {after.new_tokens} (cached_tokens {cached}); "
                    "correct the points."
                )
    shortest = max(curve[0].new_tokens for curve in curves.values())
    longest = min(curve[-1].new_tokens for curve in curves.values())
    if shortest >= longest:
        raise ScenarioError(
            f"The {_WHAT} {path} has no range of new tokens that all of its cached lengths cover; "
            "measure each cached length over the same new tokens."
        )


def _check_decode(path: Path, decode: DecodeFile) -> None:
    """The points form a complete grid of two batches and contexts or more, up to ``max_batch``."""
    batches = sorted({point.batch for point in decode.points})
    contexts = sorted({point.context_tokens for point in decode.points})
    seen = {(point.batch, point.context_tokens) for point in decode.points}
    if len(seen) < len(decode.points):
        raise ScenarioError(
            f"The {_WHAT} {path} has two decode points for the same batch and context; keep one."
        )
    if len(batches) < 2 or len(contexts) < 2:
        raise ScenarioError(
            f"The {_WHAT} {path} needs decode points at two or more batches and two or more "
            f"contexts; it has batches {batches} and contexts {contexts}."
        )
    if len(seen) < len(batches) * len(contexts):
        batch, context = next((b, c) for b in batches for c in contexts if (b, c) not in seen)
        raise ScenarioError(
            f"The {_WHAT} {path} has no decode point for batch {batch} at context_tokens "
            f"{context}; the points must form a complete grid."
        )
    if not batches[0] <= decode.max_batch <= batches[-1]:
        raise ScenarioError(
            f"The {_WHAT} {path} has decode.max_batch {decode.max_batch}, but its decode points "
            f"cover batches of {batches[0]} to {batches[-1]}; add points or lower it."
        )

"""What exactly was measured: hashes of the model's files, and what the GPUs did meanwhile."""

import functools
import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from harness.profile_measurement import GpuFile
from harness.profiler.gpu import Gpus
from harness.profiler.samples import Sample

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelHashes:
    """SHA-256 of the model's ``config.json`` and of its weights' index, or, where there is one
    file and no index, of the names and sizes of its weights. ``absent`` says why there are none."""

    config_sha256: str | None
    weights_sha256: str | None
    vocab_size: int | None
    absent: str | None = None


def model_hashes(path: str | None) -> ModelHashes:
    """Of the folder that the engine says it serves, if this machine has it."""
    if path is None:
        return ModelHashes(None, None, None, "the engine does not say which files it serves")
    folder = Path(path)
    config = folder / "config.json"
    if not config.is_file():
        return ModelHashes(None, None, None, f"{path} is no folder of a model on this machine")
    content = config.read_bytes()
    try:
        told = json.loads(content)
    except ValueError:
        told = {}
    vocab = told.get("vocab_size") if isinstance(told, dict) else None
    index = folder / _INDEX
    weights = None
    if index.is_file():
        weights = _sha256(index.read_bytes())
    elif files := sorted(folder.glob("*.safetensors")):
        listed = "\n".join(f"{one.name} {one.stat().st_size}" for one in files)
        weights = _sha256(listed.encode())
    return ModelHashes(_sha256(content), weights, vocab if isinstance(vocab, int) else None)


def gpu_summary(gpus: Gpus, samples: Sequence[Sample]) -> GpuFile | None:
    """Over the samples that were used; None where no GPU was seen."""
    seen = [one for one in samples if one.used and one.sm_clock_hz is not None]
    if not seen or gpus.driver is None:
        return None

    # Whoever has one of them has all: a sample is of one look at the GPUs.
    def told(name: str) -> list[float]:
        return [value for one in seen if (value := getattr(one, name)) is not None]

    return GpuFile(
        driver=gpus.driver,
        names=list(gpus.names),
        min_sm_clock_hz=min(told("sm_clock_hz")),
        mean_sm_clock_hz=fmean(told("sm_clock_hz")),
        mean_power_w=fmean(told("power_w")),
        max_temperature_c=max(told("temperature_c")),
        max_memory_used_bytes=float(max(told("memory_used_bytes"))),
        throttle_reasons=functools.reduce(operator.or_, map(int, told("throttle_reasons"))),
    )


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

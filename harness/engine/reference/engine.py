"""The model of a worker process, and what its instances compute with, as the process is told."""

from dataclasses import dataclass
from pathlib import Path

import torch

from harness.architecture import Architecture
from harness.engine.reference.cache import Cache
from harness.engine.reference.checkpoint import load_weights
from harness.engine.reference.choice import chosen_model
from harness.engine.reference.decode import ReferenceDecode
from harness.engine.reference.model import Model
from harness.engine.reference.prefill import ReferencePrefill
from harness.engine.reference.weights import random_weights
from harness.engine_settings import Reference
from harness.kv_blocks import KvBlocks

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ReferenceEngine:
    """One model for all instances of a process; each has a cache and a thread of its own.

    ``context_tokens`` is the longest prompt with its output.
    """

    model: Model
    settings: Reference
    architecture: Architecture
    context_tokens: int

    def prefill(self, name: str, *, layerwise: bool) -> ReferencePrefill:
        """A prefill instance's compute; its ``serve`` is to be run, and it is to be closed."""
        cache = self._cache(self.settings.prefill_slots)
        chunk_tokens = self.settings.chunk_tokens
        return ReferencePrefill(name, self.model, cache, chunk_tokens, layerwise=layerwise)

    def decode(
        self, name: str, max_batch: int, interval_tokens: int, blocks: KvBlocks | None
    ) -> ReferenceDecode:
        """The same of a decode instance with ``max_batch`` slots."""
        return ReferenceDecode(name, self.model, self._cache(max_batch), interval_tokens, blocks)

    def told(self) -> dict[str, str | int]:
        """What a profile records of it."""
        settings = self.settings
        return {
            "torch": torch.__version__,
            "device": settings.device,
            "dtype": settings.dtype,
            "threads": settings.threads,
            "chunk_tokens": settings.chunk_tokens,
            "weights_seed": settings.seed,
            "ranks": settings.ranks,
            "context_length": self.context_tokens,
        }

    def _cache(self, slots: int) -> Cache:
        config, dtype = self.model.config, self.architecture.kv_dtype
        device = self.model.device
        return Cache(config, slots, self.context_tokens, dtype=dtype, device=device)


def load_engine(
    settings: Reference, architecture: Architecture, context_tokens: int
) -> ReferenceEngine:
    """Read or draw the weights. Sets torch's number of threads for the whole process."""
    torch.set_num_threads(settings.threads)
    config = chosen_model(settings, architecture)
    dtype = _DTYPES[settings.dtype]
    folder = None if settings.model_path is None else Path(settings.model_path)
    if folder is not None and any(folder.glob("*.safetensors")):
        weights = load_weights(config, folder, dtype=dtype, device=settings.device)
    else:
        weights = random_weights(config, settings.seed, dtype=dtype, device=settings.device)
    return ReferenceEngine(Model(config, weights), settings, architecture, context_tokens)

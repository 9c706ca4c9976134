"""The model of a worker process, and what its instances compute with, as the process is told."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.architecture import Architecture
from harness.attention import Layer
from harness.engine.reference.cache import Cache
from harness.engine.reference.checkpoint import load_weights
from harness.engine.reference.choice import chosen_model
from harness.engine.reference.decode import ReferenceDecode
from harness.engine.reference.model import Model
from harness.engine.reference.prefill import Prefixes, ReferencePrefill
from harness.engine.reference.prefix_tensors import ClusterTensors, PrefixTensors
from harness.engine.reference.weights import random_weights
from harness.engine_settings import Reference
from harness.kv_blocks import KvBlocks
from harness.settings import PrefixCache

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ReferenceEngine:
    """One model for all instances of a process; each has a cache and a thread of its own.

    ``context_tokens`` is the longest prompt with its output. ``tensors`` of cached prefixes, and a
    state every ``checkpoint_tokens``; None: nothing is cached.
    """

    model: Model
    settings: Reference
    architecture: Architecture
    context_tokens: int
    tensors: ClusterTensors | None
    checkpoint_tokens: int

    def prefill(
        self, name: str, *, layerwise: bool, prefill_s: Callable[[int, int], float] | None
    ) -> ReferencePrefill:
        """A prefill instance's compute; its ``serve`` is to be run, and it is to be closed.
        ``prefill_s`` plans from which prefix to begin; None: from the longest."""
        prefixes = None
        if self.tensors is not None:
            has_state = any(layer.fixed_bytes or layer.window_tokens for layer in self._layers)
            planned = prefill_s or _by_new_tokens
            prefixes = Prefixes(self.tensors, self.checkpoint_tokens, has_state, planned)
        return ReferencePrefill(
            name,
            self.model,
            self._cache(self.settings.prefill_slots),
            self.settings.chunk_tokens,
            layerwise=layerwise,
            prefixes=prefixes,
        )

    @property
    def _layers(self) -> tuple[Layer, ...]:
        return self.architecture.layers

    def decode(
        self, name: str, max_batch: int, interval_tokens: int, blocks: KvBlocks | None
    ) -> ReferenceDecode:
        """The same of a decode instance with ``max_batch`` slots."""
        cache = self._cache(max_batch)
        return ReferenceDecode(name, self.model, cache, interval_tokens, blocks, self.tensors)

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


def _by_new_tokens(new_tokens: int, _cached_tokens: int) -> float:
    """Less to compute is better, where nothing is known of costs."""
    return float(new_tokens)


def load_engine(
    settings: Reference,
    architecture: Architecture,
    context_tokens: int,
    prefix_cache: PrefixCache,
    instances: Sequence[str],
) -> ReferenceEngine:
    """Read or draw the weights of what ``instances`` share. Sets torch's number of threads for
    the whole process."""
    torch.set_num_threads(settings.threads)
    config = chosen_model(settings, architecture)
    dtype = _DTYPES[settings.dtype]
    folder = None if settings.model_path is None else Path(settings.model_path)
    if folder is not None and any(folder.glob("*.safetensors")):
        weights = load_weights(config, folder, dtype=dtype, device=settings.device)
    else:
        weights = random_weights(config, settings.seed, dtype=dtype, device=settings.device)
    tensors = None
    if prefix_cache.enabled:
        block_tokens = prefix_cache.block_tokens
        by_instance = {name: PrefixTensors(block_tokens) for name in instances}
        tensors = ClusterTensors(block_tokens, by_instance)
    return ReferenceEngine(
        Model(config, weights),
        settings,
        architecture,
        context_tokens,
        tensors,
        prefix_cache.checkpoint_tokens,
    )

"""Tiny models as files, workers that compute them, and the tokens that one process gives."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.architecture import Architecture, load_architecture
from harness.engine.config import EngineConfig
from harness.engine.reference.choice import chosen_model
from harness.engine_settings import Reference
from harness.settings import PrefixCache
from tests.worker_setup import engine_config

if find_spec("torch") is not None:
    import torch

    from harness.engine.reference.cache import Cache
    from harness.engine.reference.model import Model
    from harness.engine.reference.sampling import greedy, margins
    from harness.engine.reference.weights import random_weights

if TYPE_CHECKING:
    from torch import Tensor

VOCAB, CHUNK, CONTEXT = 512, 64, 400
BLOCK, CHECKPOINT = 32, 64
#: Logits differ by up to 6e-3 where a batch of another size flips a cached number's rounding.
LEAST_MARGIN = 0.012

KINDS: dict[str, dict[str, Any]] = {
    "kda": {
        "attention": "kda", "heads": 4, "key_dim": 16, "value_dim": 16, "conv_kernel": 4,
        "conv_channels": 192,
    },
    "gdn": {
        "attention": "gdn", "heads": 4, "key_dim": 16, "value_dim": 16, "conv_kernel": 4,
        "conv_channels": 192,
    },
    "lightning": {"attention": "lightning", "heads": 4, "key_dim": 16, "value_dim": 16},
    "mla": {"attention": "mla", "latent_rank": 32, "rope_dim": 16},
    "gqa": {"attention": "gqa", "kv_heads": 2, "key_dim": 16, "value_dim": 16},
    "window": {
        "attention": "sliding_window", "kv_heads": 2, "key_dim": 16, "value_dim": 8,
        "window_tokens": 24,
    },
}  # fmt: skip
LAYERS: dict[str, list[str]] = {
    **{kind: [kind, kind] for kind in KINDS},
    "kda-mla-3:1": ["kda", "kda", "kda", "mla"],
    "gdn-gqa-3:1": ["gdn", "gdn", "gdn", "gqa"],
    "window-gqa-5:1": [*["window"] * 5, "gqa"],
    "lightning-mla-7:1": [*["lightning"] * 7, "mla"],
}
MIXED = "kda-mla-3:1"


@dataclass(frozen=True)
class Tiny:
    """A model's files, and what one process makes of them."""

    architecture: Architecture
    settings: Reference

    def config(self, cluster: str, instances: str, root: Path, **changes: Any) -> EngineConfig:
        """A worker whose instances compute it, in real time and with all bytes."""
        given: dict[str, Any] = {
            "architecture": str(self.architecture.path),
            "reference": self.settings,
            "context_tokens": CONTEXT,
            "time_scale": 1.0,
            "byte_scale": 1.0,
            "prefix_cache": PrefixCache(False, BLOCK, CHECKPOINT, 2**30),
            "stream_interval_tokens": 4,
            "transfer_deadline_wall_s": 60.0,
            "admission_deadline_s": 60.0,
        }
        return engine_config(cluster, instances, root, **(given | changes))


def tiny(name: str, root: Path, **changes: Any) -> Tiny:
    """The files of one of ``LAYERS``, written to ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    used = dict.fromkeys(LAYERS[name])
    architecture, compute = root / "architecture.json", root / "compute.json"
    architecture.write_text(
        json.dumps(
            {
                "schema_version": 1,
                "name": name,
                "layer_kinds": {kind: KINDS[kind] | {"source": "made up"} for kind in used},
                "layers": LAYERS[name],
            }
        )
    )
    compute.write_text(
        json.dumps(
            {
                "schema_version": 1,
                "hidden_size": 64,
                "vocab_size": VOCAB,
                "intermediate_size": 96,
                "mla": {"heads": 4, "nope_dim": 16, "value_dim": 16},
                "gqa": {"heads": 4, "qk_norm": True},
            }
        )
    )
    given: dict[str, Any] = {
        "compute": str(compute), "model_path": None, "seed": 7, "dtype": "float32",
        "device": "cpu", "threads": 1, "chunk_tokens": CHUNK, "prefill_slots": 2,
        "context_tokens": CONTEXT, "ready_timeout_s": 60.0,
    }  # fmt: skip
    return Tiny(load_architecture(architecture), Reference(**(given | changes)))


class Alone:
    """One process: prefilled in the same chunks and decoded with nobody beside."""

    def __init__(self, model: Tiny) -> None:
        torch.set_num_threads(1)
        self._config = chosen_model(model.settings, model.architecture)
        self._chunk_tokens = model.settings.chunk_tokens
        self._model = Model(self._config, random_weights(self._config, model.settings.seed))

    def answer(self, prompt: Sequence[int], output_tokens: int) -> tuple[list[int], float]:
        """Greedy tokens, and the least margin between the two likeliest ones."""
        cache = Cache(self._config, 1, len(prompt) + output_tokens)
        read: list[Tensor] = []
        for start in range(0, len(prompt), self._chunk_tokens):
            logits = self._model.prefill(prompt[start : start + self._chunk_tokens], cache, 0)
        read.append(logits[None])
        tokens = greedy(read[0])
        while len(tokens) < output_tokens:
            read.append(self._model.decode(tokens[-1:], cache, [0]))
            tokens += greedy(read[-1])
        return tokens, min(margins(torch.cat(read)))

    @cache  # noqa: B019 - a test's own object
    def prompt(self, tokens: int, output_tokens: int, number: int = 0) -> tuple[int, ...]:
        """The ``number``-th prompt of this length whose answer is nowhere nearly tied."""
        seed = 1000 * number
        while True:
            draw = random.Random(seed)
            prompt = [draw.randrange(self._config.vocab_size) for _ in range(tokens)]
            if self.answer(prompt, output_tokens)[1] > LEAST_MARGIN:
                return tuple(prompt)
            seed += 1

"""How the reference engine's prefill grows with the prompt, kind of layer by kind. Prints JSON.

    python -m benchmarks.reference_engine [--tokens 2048 4096 8192 16384 32768] [--repeats 3] --json

Tiny models on one core, prefilled in chunks. ``cpu_s`` is the median of the repeats, which go round
the models and lengths so that a busy machine hits all alike. ``exponent`` is the slope of log time
over log tokens, by least squares: 1 for layers whose cost grows with the tokens, nearly 2 where
attention over the whole prompt is most of it. ``last_over_first`` is the time a token of the
longest prompt over that of the shortest. Needs torch.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from harness.engine.reference.cache import Cache
from harness.engine.reference.config import (
    AttentionConfig,
    DeltaConfig,
    GqaConfig,
    LayerConfig,
    LightningConfig,
    MlaConfig,
    MlpConfig,
    ModelConfig,
    Rope,
    lightning_slopes,
)
from harness.engine.reference.model import Model
from harness.engine.reference.weights import random_weights

TOKENS = (2048, 4096, 8192, 16_384, 32_768)
CHUNK_TOKENS = 2048
ROPE = Rope(10_000.0, 32)
GQA = GqaConfig(heads=4, kv_heads=2, key_dim=32, value_dim=32, rope=ROPE)
KINDS: dict[str, AttentionConfig] = {
    "kda": DeltaConfig("kda", heads=4, key_heads=4, key_dim=32, value_dim=32, conv_kernel=4),
    "gdn": DeltaConfig("gdn", heads=4, key_heads=2, key_dim=32, value_dim=32, conv_kernel=4),
    "lightning": LightningConfig(32, 32, lightning_slopes(4, 0, 4)),
    "sliding_window": replace(GQA, window_tokens=128),
    "gqa": GQA,
    "mla": MlaConfig(
        heads=4, latent_rank=64, rope_dim=32, nope_dim=32, value_dim=32, query_rank=None, rope=ROPE
    ),
}
MODELS: dict[str, list[str]] = {
    **{kind: [kind] * 4 for kind in KINDS},
    "kda_mla_3_1": ["kda", "kda", "kda", "mla"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engines = {name: _model(name) for name in options.models}
    for engine in engines.values():
        _prefill_s(engine, CHUNK_TOKENS)
    times: dict[tuple[str, int], list[float]] = {}
    for repeat in range(options.repeats):
        for name, engine in engines.items():
            print(f"{repeat + 1}/{options.repeats} {name} ...", file=sys.stderr)
            for tokens in options.tokens:
                times.setdefault((name, tokens), []).append(_prefill_s(engine, tokens))
    cases = [_case(name, options.tokens, times) for name in engines]
    document = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "chunk_tokens": CHUNK_TOKENS,
        "repeats": options.repeats,
        "cases": cases,
    }
    if options.json:
        print(json.dumps(document, indent=2))
        return 0
    for case in cases:
        print(
            f"{case['model']:16} exponent {case['exponent']:.3f}   "
            f"time a token {case['last_over_first']:.2f} x   {case['points'][-1]['cpu_s']:.2f} s"
        )
    return 0


def _model(name: str) -> Model:
    layers = tuple(LayerConfig(KINDS[kind], MlpConfig(256)) for kind in MODELS[name])
    config = ModelConfig(name, 128, 1024, layers)
    return Model(config, random_weights(config, 1))


def _prefill_s(engine: Model, tokens: int) -> float:
    """CPU seconds of a whole prompt."""
    cache = Cache(engine.config, 1, tokens)
    prompt = [index * 7919 % 1024 for index in range(tokens)]
    started_s = time.process_time()
    for start in range(0, tokens, CHUNK_TOKENS):
        engine.prefill(prompt[start : start + CHUNK_TOKENS], cache, 0)
    return time.process_time() - started_s


def _case(
    name: str, lengths: list[int], times: dict[tuple[str, int], list[float]]
) -> dict[str, Any]:
    medians = [statistics.median(times[name, tokens]) for tokens in lengths]
    points = [
        {"tokens": tokens, "cpu_s": median, "cpu_spread_s": max(all_s) - min(all_s)}
        for tokens, median, all_s in zip(
            lengths, medians, (times[name, tokens] for tokens in lengths), strict=True
        )
    ]
    exponent = float(np.polyfit(np.log(lengths), np.log(medians), 1)[0])
    per_token = [median / tokens for tokens, median in zip(lengths, medians, strict=True)]
    return {
        "model": name,
        "layers": MODELS[name],
        "exponent": exponent,
        "last_over_first": per_token[-1] / per_token[0],
        "points": points,
    }


if __name__ == "__main__":
    sys.exit(main())

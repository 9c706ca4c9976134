"""How much of a transfer a real prefill hides, layer by layer and not. Prints JSON.

    python -m benchmarks.reference_overlap [--tokens 4096] [--requests 5] --json

A tiny model computes prompts at the far end of a shaped link (the relay) and decodes at the near
end, in real workers behind the real gateway. First the link is fast, which tells how long compute
takes at the least; then its rate is set so that a prompt's KV takes half of that, and the prompts
are served with layer-wise transfer and without. TTFT runs from the gateway's receipt to the first
token it writes; each request is held against its own compute, so a busy machine moves both:

    layer-wise    beyond = (TTFT - one layer's transfer) / compute          target: 1.1 at most
    whole         beyond = (TTFT - compute) / transfer                      target: 0.9 at least

``one_layer_s`` is the largest layer's transfer. Medians of the requests, with least and most.
Needs torch.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.record.run_directory import Cell, RunDirectory
from harness.scenario import Scenario, load_scenario
from harness.testbed.local import LocalTestbed
from harness.workload import build_schedule
from netem.testlink import open_link

LAYERWISE_AT_MOST, WHOLE_AT_LEAST = 1.1, 0.9
FAST_LINK = "10gbit"
VOCABULARY = 512
_GQA = {"attention": "gqa", "kv_heads": 4, "key_dim": 32, "value_dim": 32, "source": "made up"}
_GDN = {
    "attention": "gdn", "heads": 4, "key_dim": 32, "value_dim": 32, "conv_kernel": 4,
    "conv_channels": 384, "source": "made up",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model and its prefill's chunks; 0: the whole prompt at once."""

    layers: tuple[str, ...]
    chunk_tokens: int


CASES = {
    "full": Case(("gqa",) * 8, 0),
    "hybrid_3_1_chunked": Case(("gdn", "gdn", "gdn", "gqa") * 2, 512),
}


@dataclass(frozen=True)
class Timed:
    """One request, wall seconds."""

    ttft_s: float
    compute_s: float
    kv_bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference_overlap")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true", help="nothing but JSON, as always")
    options = parser.parse_args()
    found = {name: measure(CASES[name], options.tokens, options.requests) for name in options.cases}
    print(json.dumps({"tokens": options.tokens, "requests": options.requests, "cases": found}))
    return 0 if all(one["within_targets"] for one in found.values()) else 1


def measure(case: Case, tokens: int, requests: int) -> dict[str, Any]:
    """All three runs of a case."""
    with tempfile.TemporaryDirectory(prefix="prfaas-overlap-") as name:
        folder = Path(name)
        path = _write(folder, case, tokens)
        plain = load_scenario(path)
        layer_bytes = plain.model.architecture.layer_kv_bytes(tokens)
        compute_s = min(one.compute_s for one in _served(path, FAST_LINK, True, tokens, requests))
        rate_bytes_per_s = sum(layer_bytes) / (compute_s / 2)
        rate = f"{rate_bytes_per_s * 8 / 1e6:.3f}mbit"
        layerwise = _served(path, rate, True, tokens, requests)
        whole = _served(path, rate, False, tokens, requests)
    transfer_s = sum(layer_bytes) / rate_bytes_per_s
    one_layer_s = max(layer_bytes) / rate_bytes_per_s
    hidden = [(one.ttft_s - one_layer_s) / one.compute_s for one in layerwise]
    shown = [(one.ttft_s - one.compute_s) / transfer_s for one in whole]
    return {
        "kv_bytes": sum(layer_bytes),
        "link": rate,
        "transfer_s": transfer_s,
        "one_layer_s": one_layer_s,
        "compute_s": {
            "alone_least": compute_s,
            "layerwise": _spread([one.compute_s for one in layerwise]),
            "whole": _spread([one.compute_s for one in whole]),
        },
        "ttft_s": {
            "layerwise": _spread([one.ttft_s for one in layerwise]),
            "whole": _spread([one.ttft_s for one in whole]),
        },
        "layerwise_beyond": _spread(hidden),
        "whole_beyond": _spread(shown),
        "within_targets": statistics.median(hidden) <= LAYERWISE_AT_MOST
        and statistics.median(shown) >= WHOLE_AT_LEAST,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def _served(path: Path, rate: str, layerwise: bool, tokens: int, requests: int) -> list[Timed]:
    """The prompts one after another, but for a first one that warms everything up."""
    overrides = (f"link.rate={rate}", f"transport.layerwise={str(layerwise).lower()}")
    scenario = load_scenario(path, overrides)
    run = RunDirectory.create(path.parent / "runs", "overlap", datetime.now(UTC))
    run.write_schedule(build_schedule(scenario.workload, scenario.load))
    cell = Cell("naive_heterogeneous", 0)
    deployment = scenario.deployments[cell.deployment]
    spec = scenario.link.scaled(1.0, 1.0)
    draw = random.Random(1)
    with (
        open_link(spec, "relay") as link,
        LocalTestbed(scenario, deployment, run, cell, link) as testbed,
    ):
        for _ in range(requests + 1):
            _ask(testbed, [draw.randrange(VOCABULARY) for _ in range(tokens)])
    rows = [json.loads(line) for line in run.spool_path(cell, "gateway").read_text().splitlines()]
    return [_timed(row, scenario, tokens) for row in rows[1:]]


def _ask(testbed: LocalTestbed, prompt: list[int]) -> None:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{testbed.gateway_port}/generate",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {testbed.gateway_key}"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def _timed(row: dict[str, Any], scenario: Scenario, tokens: int) -> Timed:
    kv_bytes = row["decode"]["kv_wire_bytes_received"]
    assert kv_bytes == scenario.model.architecture.kv_bytes(tokens), "all of the KV crossed"
    return Timed(
        (row["first_written_mono_ns"] - row["received_mono_ns"]) / 1e9,
        row["prefill"]["service_wall_s"],
        kv_bytes,
    )


def _write(folder: Path, case: Case, tokens: int) -> Path:
    """The scenario and all that it names."""
    kinds = {"gqa": _GQA, "gdn": _GDN}
    used = {kind: kinds[kind] for kind in dict.fromkeys(case.layers)}
    files: dict[str, Any] = {
        "architecture.json": {
            "schema_version": 1, "name": "overlap", "layer_kinds": used, "layers": case.layers,
        },
        "compute.json": {
            "schema_version": 1, "hidden_size": 128, "vocab_size": VOCABULARY,
            "intermediate_size": 384, "gqa": {"heads": 4},
        },
        "profile.json": _flat_profile(2 * tokens),
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    path = folder / "overlap.toml"
    path.write_text(_SCENARIO.format(tokens=tokens, chunk_tokens=case.chunk_tokens or tokens))
    return path


def _flat_profile(tokens: int) -> dict[str, Any]:
    """Nothing is planned by it: one prompt runs at a time."""
    told = {"provenance": "stand_in", "source": "nothing is planned by it"}
    return {
        "schema_version": 1, "name": "flat", "model": "overlap", "hardware": "cpu",
        "gpus_per_instance": 1, "engine": {"name": "reference", "version": "0"},
        "prefill": {
            "interpolation": "log_log",
            "points": [{"new_tokens": n, "prefill_s": 1.0} | told for n in (1, tokens)],
        },
        "decode": {
            "max_batch": 2, **told,
            "points": [
                {"batch": batch, "context_tokens": context, "step_s": 0.01} | told
                for batch in (1, 2) for context in (1, tokens)
            ],
        },
    }  # fmt: skip


_SCENARIO = """
[model]
architecture = "architecture.json"
[hardware.cpu]
profile = "profile.json"
[engine]
kind = "reference"
compute = "compute.json"
device = "cpu"
chunked_prefill_tokens = {chunk_tokens}
[workload]
mu = 6.0
sigma = 1.0
min_tokens = 64
max_tokens = {tokens}
output_tokens = 2
[load]
rate_req_per_s = 1
num_requests = 1
seed = 1
[slo]
tpot = "1s"
[scale]
time = 1
bytes = 1
[link]
rate = "1gbit"
rtt = "1ms"
[fabric]
rate = "10gbit"
[serving]
decode_steps = "by_batch"
[transport]
connections = 2
chunk_bytes = "16KiB"
[scheduling]
bandwidth_aware = false
[deployments.naive_heterogeneous]
num_prfaas = 1
num_prefill = 0
num_decode = 1
prfaas_hardware = "cpu"
pd_hardware = "cpu"
[testbed]
request_timeout = "120s"
"""


if __name__ == "__main__":
    sys.exit(main())

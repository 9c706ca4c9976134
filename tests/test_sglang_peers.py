"""SGLang's own tools with ours: its load generator before our gateway, its router before our
workers. The engines are emulated: what is under test is who speaks to whom, and who times what."""

import json
import os
import statistics
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from live import flat_profile, live, scenario
from sglang_cpu.models import write_model

from benchmarks.gateway_client import Address
from benchmarks.gateway_peers import router, router_lack, serving

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
NUM_REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 60, 200, 8
PREFILL_S, STEP_S = 0.08, 0.01
#: Of two medians of the same requests.
BOUND_S = 0.005


def bench_serving(url: str, key: str, folder: Path, model: Path) -> dict[str, Any]:
    """What ``sglang.bench_serving`` measures of our gateway, as text prompts, in an open loop."""
    output = folder / "bench_serving.jsonl"
    words = {
        "--backend": "sglang-oai",
        "--base-url": url,
        "--model": "m",
        "--tokenizer": model,
        "--dataset-name": "random-ids",
        "--random-input-len": INPUT_TOKENS,
        "--random-output-len": OUTPUT_TOKENS,
        "--random-range-ratio": 1,
        "--num-prompts": NUM_REQUESTS,
        "--request-rate": 10,
        "--warmup-requests": 2,
        "--output-file": output,
    }
    given = [str(word) for pair in words.items() for word in pair]
    subprocess.run(
        [sys.executable, "-m", "sglang.bench_serving", *given, "--output-details"],
        check=True,
        timeout=240,
        env=os.environ | {"OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1"},
        cwd=folder,
    )
    found: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    return found


def test_bench_serving_reads_our_gateway_as_we_record_it(tmp_path: Path) -> None:
    model = write_model("dense", tmp_path / "models")
    profile = flat_profile(tmp_path / "flat.json", PREFILL_S, STEP_S, 64)
    given = scenario(
        f'hardware.h20.profile="{profile}"',
        f'hardware.h200.profile="{profile}"',
        f'gateway.tokenizer="{model / "tokenizer.json"}"',
        "scale.time=1",
        "scale.bytes=1000000",
        "testbed.stream_interval_tokens=1",
    )
    with live(given, "homogeneous_pd", tmp_path / "runs") as served:
        found = bench_serving(served.url, served.testbed.gateway_key, tmp_path, model)
        rows = served.rows("gateway")[-NUM_REQUESTS:]
        decisions = served.rows("decisions")[-NUM_REQUESTS:]
    assert found["completed"] == NUM_REQUESTS
    assert [row["outcome"] for row in rows] == ["completed"] * NUM_REQUESTS
    # The prompts came as text, whose tokens the gateway counted: those of random ids are not read
    # back as they were, so there are more.
    assert set(found["input_lens"]) == {INPUT_TOKENS}
    assert all(one["input_tokens"] >= INPUT_TOKENS for one in decisions)
    assert sum(found["output_lens"]) == NUM_REQUESTS * OUTPUT_TOKENS
    ours_s = statistics.median(
        (row["first_written_mono_ns"] - row["received_mono_ns"]) / 1e9 for row in rows
    )
    theirs_s = found["median_ttft_ms"] / 1e3
    print(f"median TTFT: bench_serving {1e3 * theirs_s:.2f} ms, gateway {1e3 * ours_s:.2f} ms")
    assert ours_s > PREFILL_S
    assert abs(theirs_s - ours_s) < BOUND_S


def test_sglangs_router_drives_our_workers(tmp_path: Path) -> None:
    assert router_lack() is None
    with serving(tmp_path) as served, router(served) as address:
        prompts = [list(range(100 * one, 100 * one + 300)) for one in range(1, 6)]
        through = [ask(address, ids) for ids in prompts]
        direct = [ask(served.gateway, ids) for ids in prompts]
    assert [len(tokens) for tokens in through] == [4] * len(prompts)
    # A worker's tokens are a function of prompt and KV: the same pair, the same answer.
    assert through == direct


def ask(address: Address, ids: list[int]) -> list[int]:
    """The tokens of one whole answer."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    asked = urllib.request.Request(
        f"http://{address.host}:{address.port}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {address.key}"},
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        tokens: list[int] = json.load(answer)["output_ids"]
    return tokens

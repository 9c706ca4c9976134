"""The figures of a server, by what real ones answered: SGLang 0.5.23 without a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.architecture import load_architecture
from harness.engine.sglang.capabilities import Capabilities, read_capabilities
from harness.engine.sglang.metrics import Total, read_counters

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests" / "sglang_cpu" / "recorded"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def test_a_prefill_server_counts_the_bytes_of_kv_and_state_exactly() -> None:
    """Three prompts of 200 tokens of the tiny Kimi-Linear; the fourth request was the warm-up."""
    counters = read_counters(recorded("prefill.metrics"))
    one = load_architecture(ROOT / "profiles/tiny/sglang-tiny-kimi-linear.json").kv_bytes(200)
    assert one == 200 * 96 + 56_064
    assert counters.kv_transfer_bytes == Total(3 * one, 3)
    assert counters.kv_transfer_s is not None
    assert counters.kv_transfer_s.sum == pytest.approx(0.6786, abs=1e-4)
    assert set(counters.stage_s) == {
        "prefill_bootstrap",
        "prefill_forward",
        "prefill_transfer_kv_cache",
    }
    assert counters.stage_s["prefill_forward"].count == 4
    assert (counters.page_size, counters.max_total_tokens) == (1, 20_000)


def test_a_server_that_sends_no_kv_has_counted_none() -> None:
    counters = read_counters(recorded("both.metrics"))
    assert (counters.num_running, counters.num_queued, counters.token_usage) == (0, 0, 0.0)
    assert (counters.page_size, counters.max_total_tokens) == (64, 19_968)
    assert counters.queue_s == Total(0.004936738000083096, 2)
    forward = counters.stage_s["prefill_forward"]
    assert forward.sum / forward.count == pytest.approx(0.12685852)
    assert counters.kv_transfer_bytes is None
    assert counters.ttft_s is None
    json.dumps(counters.told())


def test_ranks_are_added_and_a_gauge_is_no_count_of_bytes() -> None:
    """Two ranks of 0.5.23; then the gauge that 0.5.9 never sets."""
    ranks = "".join(
        f'sglang:kv_transfer_total_mb_{what}{{tp_rank="{rank}"}} {value}\n'
        for rank in (0, 1)
        for what, value in (("sum", 1.5 + rank), ("count", 2.0))
    )
    text = f"# TYPE sglang:kv_transfer_total_mb histogram\n{ranks}"
    assert read_counters(text).kv_transfer_bytes == Total(4.0 * 2**20, 4)
    gauge = "# TYPE sglang:kv_transfer_total_mb gauge\nsglang:kv_transfer_total_mb 0.0\n"
    assert read_counters(gauge).kv_transfer_bytes is None
    usage = "".join(f'sglang:token_usage{{tp_rank="{r}"}} 0.{r}\n' for r in (1, 3, 2))
    assert read_counters(usage).token_usage == 0.3
    with pytest.raises(ValueError, match="html"):
        read_counters("<html>")


def test_what_a_server_says_of_itself_is_read_without_its_key() -> None:
    info: dict[str, Any] = json.loads(recorded("both.server_info.json"))
    found = read_capabilities(info | {"api_key": "secret"})
    assert (found.version, found.role, found.device) == ("0.5.23", "both", "cpu")
    assert (found.tp, found.dp, found.ep, found.page_size) == (1, 1, 1, 64)
    assert (found.max_total_tokens, found.max_running_requests) == (19_968, 16)
    assert (found.transfer_backend, found.bootstrap_port) == (None, None)
    assert found.radix_cache
    assert "secret" not in str(found.told())
    prefill = read_capabilities(info | {"disaggregation_mode": "prefill"})
    assert (prefill.role, prefill.bootstrap_port) == ("prefill", 8998)
    assert prefill.transfer_backend == "mooncake"


def test_what_resolution_changed_counts_and_what_is_missing_is_not_known() -> None:
    found = read_capabilities(
        {"page_size": 1, "max_running_requests": None, "internal_states": [{"page_size": 64}]}
    )
    assert found.page_size == 64
    assert found.version == "unknown"
    assert (found.max_total_tokens, found.context_tokens, found.mamba_slots) == (None, None, None)


#: What is asked for: role, version, page size; and the words of the fault.
FAULTS: dict[tuple[Any, str | None, int | None], str | None] = {
    ("both", None, None): None,
    ("both", "0.5.23", 64): None,
    ("decode", None, None): "serves whole requests (disaggregation_mode), but decode is asked for",
    ("both", "0.5.9", 64): "is version 0.5.23, but engine.version asks for 0.5.9",
    ("both", None, 1): "has pages of 64 tokens, but engine.page_size asks for 1",
}


@pytest.mark.parametrize("asked", FAULTS)
def test_a_server_that_is_not_as_asked_for_is_told_by_its_fault(asked: Any) -> None:
    found: Capabilities = read_capabilities(json.loads(recorded("both.server_info.json")))
    fault, words = found.fault(*asked), FAULTS[asked]
    assert (fault is None) == (words is None)
    if words is not None and fault is not None:
        assert fault.startswith(words)

"""Command line and environment of a server by role, version and device; ports; versions."""

import socket
from typing import Any

import msgspec
import pytest

from harness.core import EngineError
from harness.engine.sglang.command import arguments, environment, gpus_of, reserved_flag
from harness.engine.sglang.config import LauncherConfig, ServerConfig
from harness.engine.sglang.ports import choose_ports
from harness.engine.sglang.versions import VERSIONS, known_version, unsupported

CONFIG = LauncherConfig(
    cluster="pd",
    address="10.0.0.1",
    log_directory="logs",
    api_key="key",
    ready_timeout_s=1.0,
    model_path="/m",
    model_name="m",
)
NEW, OLD = VERSIONS["0.5.23"], VERSIONS["0.5.9"]


def value(words: list[str], flag: str) -> str | None:
    """What stands behind ``flag``; "" where nothing does."""
    if flag not in words:
        return None
    assert words.count(flag) == 1, flag
    behind = words[words.index(flag) + 1 :]
    return behind[0] if behind and not behind[0].startswith("--") else ""


def given(changes: dict[str, Any], server: ServerConfig, version: Any = NEW) -> list[str]:
    return arguments(msgspec.structs.replace(CONFIG, **changes), server, version)


def test_a_server_on_gpus_is_told_its_shape_and_left_its_defaults() -> None:
    server = ServerConfig(
        "pd-d0", "decode", port=1000, tp=8, dp=2, base_gpu=4, extra_flags=["--enable-dp-attention"]
    )
    words = given({"chunked_prefill_tokens": 4096}, server)
    assert value(words, "--model-path") == "/m"
    assert (value(words, "--host"), value(words, "--port")) == ("10.0.0.1", "1000")
    assert value(words, "--tensor-parallel-size") == "8"
    assert value(words, "--data-parallel-size") == "2"
    assert value(words, "--base-gpu-id") == "4"
    assert value(words, "--chunked-prefill-size") == "4096"
    assert value(words, "--disaggregation-mode") == "decode"
    assert words[-1] == "--enable-dp-attention"
    assert value(words, "--enable-metrics") == ""
    for flag in ("--page-size", "--mem-fraction-static", "--max-total-tokens", "--api-key"):
        assert flag not in words
    assert "--disaggregation-bootstrap-port" not in words
    assert "--attention-backend" not in words
    assert gpus_of(8, 2, ["--enable-dp-attention"]) == 8
    assert gpus_of(8, 2, []) == 16


def test_only_a_prefill_server_has_a_bootstrap_port_and_one_for_both_has_no_mode() -> None:
    prefill = ServerConfig("pd-p0", "prefill", bootstrap_port=8998, ib_device="mlx5_0")
    words = given({"transfer_backend": "nixl"}, prefill)
    assert value(words, "--disaggregation-bootstrap-port") == "8998"
    assert value(words, "--disaggregation-transfer-backend") == "nixl"
    assert value(words, "--disaggregation-ib-device") == "mlx5_0"
    both = given({}, ServerConfig("s", "both"))
    assert not any(word.startswith("--disaggregation") for word in both)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_what_a_server_without_a_gpu_is_told_depends_on_the_version(
    role: Any, hybrid: bool
) -> None:
    asked, server = {"device": "cpu", "hybrid": hybrid}, ServerConfig("s", role, base_gpu=3)
    new, old = given(asked, server, NEW), given(asked, server, OLD)
    for words in (new, old):
        assert value(words, "--attention-backend") == "torch_native"
        assert "--base-gpu-id" not in words
        assert ("--max-mamba-cache-size" in words) == hybrid
    assert value(new, "--sleep-on-idle") == ""
    assert "--sleep-on-idle" not in old
    strategies = ("no_buffer", "no_buffer") if hybrid else (None, None)
    new_name, old_name = "--mamba-radix-cache-strategy", "--mamba-scheduler-strategy"
    assert (value(new, new_name), value(old, old_name)) == strategies
    assert new_name not in old
    assert old_name not in new
    retraction = "cpu_tensor" if role == "decode" else None
    assert value(new, "--disaggregation-decode-retraction-backup") == retraction
    assert "--disaggregation-decode-retraction-backup" not in old


def test_the_environment_says_which_way_kv_goes_and_what_is_its_own() -> None:
    server = ServerConfig("s", "decode", env={"TMPDIR": "/mine", "A": "1"})
    tcp = environment(CONFIG, server, {"PATH": "/bin", "HOST_IP": "else"}, "/folder")
    assert tcp["PATH"] == "/bin"
    assert (tcp["TMPDIR"], tcp["A"]) == ("/mine", "1")
    assert (tcp["MC_FORCE_TCP"], tcp["MOONCAKE_PROTOCOL"]) == ("1", "tcp")
    assert tcp["HOST_IP"] == tcp["SGLANG_HOST_IP"] == "10.0.0.1"
    assert "SGLANG_USE_CPU_ENGINE" not in tcp
    config = msgspec.structs.replace(CONFIG, transfer_protocol="rdma")
    rdma = environment(config, ServerConfig("s", "decode"), {}, "/folder")
    assert rdma["MOONCAKE_PROTOCOL"] == "rdma"
    assert "MC_FORCE_TCP" not in rdma
    assert rdma["TMPDIR"] == "/folder"
    assert "/folder" not in rdma["TORCHINDUCTOR_CACHE_DIR"]
    assert "key" not in tcp.values()


def test_every_flag_of_the_launcher_is_refused_to_the_user() -> None:
    server = ServerConfig("s", "prefill", dp=2, ep=2, base_gpu=1, ib_device="d")
    full = {
        "page_size": 64,
        "chunked_prefill_tokens": 1,
        "mem_fraction": 0.5,
        "max_total_tokens": 1,
        "context_tokens": 1,
        "max_running_requests": 1,
    }
    for flag in given(full, server):
        if flag.startswith("--"):
            assert reserved_flag(flag), flag
            assert reserved_flag(f"{flag}=1"), flag
    assert reserved_flag("--trust-remote-code") is None
    assert reserved_flag("--tp") == "set engine.tp"


def test_ports_are_free_of_each_other_and_of_what_the_kernel_gives_out() -> None:
    servers = [ServerConfig(f"p{i}", "prefill") for i in range(40)]
    servers += [ServerConfig("d0", "decode"), ServerConfig("b0", "both")]
    choose_ports("127.0.0.1", servers, 7)
    ports = [port for one in servers for port in (one.port, one.bootstrap_port) if port]
    assert len(ports) == len(set(ports)) == 82
    with socket.create_server(("127.0.0.1", 0)) as given_by_kernel:
        kernels = given_by_kernel.getsockname()[1]
        assert all(port < kernels for port in ports)
        with pytest.raises(EngineError, match=r"server b0 failed in phase port: 127.0.0.1:\d+ is"):
            choose_ports("127.0.0.1", [ServerConfig("b0", "both", port=kernels)], 7)
    with pytest.raises(EngineError, match="phase port"):
        choose_ports("203.0.113.9", [ServerConfig("b0", "both")], 7)


@pytest.mark.parametrize(
    ("number", "like"),
    [("0.5.10.post1", "0.5.9"), ("0.5.24", "0.5.23"), ("0.5.9rc1", "0.5.9"), ("0.4", "0.5.9")],
)
def test_a_version_that_is_not_known_is_said_to_be_untested(number: str, like: str) -> None:
    version, untested = known_version(number)
    assert version.number == like
    if number in VERSIONS:
        assert untested is None
    else:
        assert untested is not None
        assert f"{number} is not tested" in untested
        assert f"like {like}" in untested
    assert unsupported(number, ["kv_metrics"]) is None


def test_what_a_known_version_cannot_do_is_a_reason() -> None:
    assert unsupported("0.5.23", ["pd", "hybrid_state", "sliding_window", "kv_metrics"]) is None
    assert unsupported("0.5.9", ["pd", "hybrid_state"]) is None
    assert "no counter of the KV bytes" in str(unsupported("0.5.9", ["pd", "kv_metrics"]))

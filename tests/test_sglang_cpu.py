"""Real SGLang servers without a GPU: ready, serving, attached to, and their failures by name."""

import json
import os
import shlex
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sglang_cpu.models import CONFIGS, write_model
from sglang_launch import KEY, groups_under, launcher, until_gone

from harness.engine.sglang.config import AttachedConfig, LauncherConfig, ServerConfig
from harness.engine.sglang.metrics import read_counters
from harness.engine.sglang.server import living_members
from harness.model_config import read_model_config

#: More than any of these KV pools takes, on any machine that serves them.
TOO_MANY_TOKENS = 2**24
#: Address space in which a server starts and no KV pool of that many tokens fits, KiB.
ADDRESS_SPACE_KIB = 6_000_000


def config_of(tmp_path: Path, model: str = "dense", **changes: Any) -> LauncherConfig:
    """One server that serves whole requests."""
    config = LauncherConfig(
        cluster="pd",
        address="127.0.0.1",
        log_directory=str(tmp_path / "logs"),
        api_key=KEY,
        ready_timeout_s=600.0,
        servers=[ServerConfig("pd-b0", "both")],
        python=sys.executable,
        model_path=str(write_model(model, tmp_path)),
        device="cpu",
        page_size=64,
        load_format="dummy",
        mem_fraction=0.3,
        max_total_tokens=20_000,
        max_running_requests=16,
    )
    return msgspec.structs.replace(config, **changes)


def asked(port: int, path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(answer.read().decode())


def generated(port: int, ids: list[int], count: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    text = asked(port, "/generate", {"input_ids": ids, "sampling_params": sampling})
    return msgspec.json.decode(text, type=dict[str, Any])


@pytest.mark.sglang
@pytest.mark.slow
def test_a_server_is_ready_serves_is_attached_to_and_its_death_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, version="0.5.23", requires=["kv_metrics"])
    with launcher(config) as one:
        event = one.hear()
        assert event["event"] == "ready", event
        assert (event["version"], event["untested"], event["warnings"]) == ("0.5.23", None, [])
        info, port = event["server_info"]["pd-b0"], event["ports"]["pd-b0"]
        assert (info["role"], info["device"], info["tp"], info["page_size"]) == (
            "both",
            "cpu",
            1,
            64,
        )
        assert info["max_total_tokens"] == 20_000 // 64 * 64
        assert (info["load_format"], info["radix_cache"]) == ("dummy", True)
        prompt = [4 + index * 7 % 250 for index in range(200)]
        first = generated(port, prompt, 8)
        again = generated(port, prompt, 8)
        assert again["output_ids"] == first["output_ids"]
        assert first["meta_info"]["prompt_tokens"] == 200
        assert again["meta_info"]["cached_tokens"] == 192  # whole pages
        counters = read_counters(asked(port, "/metrics"))
        assert (counters.page_size, counters.max_total_tokens) == (64, info["max_total_tokens"])
        assert counters.kv_transfer_bytes is None
        assert counters.num_queued == 0
        assert counters.queue_s is not None
        assert counters.queue_s.count >= 2
        assert counters.stage_s["prefill_forward"].count >= 2

        there = [AttachedConfig("pd-b0", "both", f"http://127.0.0.1:{port}")]
        with launcher(msgspec.structs.replace(config, servers=[], attached=there)) as other:
            attached = other.hear()
            assert attached["event"] == "ready", attached
            assert attached["server_info"]["pd-b0"] == info
            assert other.end() == 0
        assert generated(port, prompt, 8)["output_ids"] == first["output_ids"]

        (group,) = groups_under(one)
        members = living_members(group)
        assert len(members) >= 3  # the server, its scheduler, its detokenizer
        os.kill(next(pid for pid in members if "scheduler" in command(pid)), signal.SIGKILL)
        event = one.hear()
        assert event["event"] == "failed"
        assert "SGLang server pd-b0 failed in phase died" in event["message"]
        assert one.process.wait(60) == 3
        assert not living_members(group)
    log = (tmp_path / "logs" / "pd-b0.log").read_text()
    assert "The server is fired up" in log
    assert KEY not in log


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.sglang
@pytest.mark.slow
def test_nothing_of_a_server_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launcher(config_of(tmp_path)) as one:
        log = tmp_path / "logs" / "pd-b0.log"
        # Its scheduler and detokenizer run by then: they load the model.
        while not (log.exists() and "Load weight begin" in log.read_text()):
            assert one.process.poll() is None
            time.sleep(0.1)
        groups = groups_under(one)
        assert len(living_members(groups[0])) >= 3
        one.process.kill()
        one.process.wait(60)
        until_gone(groups)


def limited(tmp_path: Path) -> str:
    """This interpreter with little address space, as on a device with little memory."""
    path = tmp_path / "python"
    path.write_text(
        f'#!/bin/sh\nulimit -v {ADDRESS_SPACE_KIB}\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "words"), [("memory", "llocat"), ("load", "Cannot find any model weights")]
)
def test_a_server_that_does_not_start_says_why(tmp_path: Path, phase: str, words: str) -> None:
    config = config_of(tmp_path, load_format="auto")
    if phase == "memory":
        fields = {"max_total_tokens": TOO_MANY_TOKENS, "mem_fraction": 0.9, "load_format": "dummy"}
        config = msgspec.structs.replace(config, python=limited(tmp_path), **fields)
    with launcher(config) as one:
        event = one.hear()
        assert event["event"] == "failed", event
        assert f"pd-b0 failed in phase {phase}" in event["message"], event["message"]
        assert words in event["message"]
        assert one.process.wait(60) == 3


@pytest.mark.sglang
def test_without_a_gpu_a_server_on_gpus_is_refused_by_what_torch_says(tmp_path: Path) -> None:
    with launcher(config_of(tmp_path, device="cuda"), CUDA_VISIBLE_DEVICES="") as one:
        message = str(one.hear()["message"])
        assert "phase driver" in message
        assert "Torch not compiled with CUDA" in message


#: Growing bytes a token, window tokens and bytes a token of each, state.
GEOMETRY = {
    "dense": (512, 0, 0, 0),
    "kimi-linear": (96, 0, 0, 56_064),
    "mimo": (384, 128, 768, 0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tiny_models_have_the_kv_that_they_say(name: str, tmp_path: Path) -> None:
    growing, window, of_window, state = GEOMETRY[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    architecture = read_model_config(path)
    for tokens in (1, 127, 128, 129, 4000):
        expected = growing * tokens + of_window * min(tokens, window) + state
        assert architecture.kv_bytes(tokens) == expected

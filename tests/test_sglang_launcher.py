"""The launcher with processes that behave as SGLang's do: ready, named failures, nothing left."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sglang_launch import KEY, ROOT, groups_under, launcher, until_gone

from harness.engine.sglang.config import AttachedConfig, LauncherConfig, ServerConfig
from harness.engine.sglang.server import living_members

#: In place of the package of that name: processes that compute nothing.
PROCESS = str(ROOT / "tests/sglang_cpu/process")


@pytest.fixture
def config(tmp_path: Path) -> LauncherConfig:
    """A prefill and a decode server, without a GPU."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return LauncherConfig(
        cluster="pd",
        address="127.0.0.1",
        log_directory=str(tmp_path / "logs"),
        api_key=KEY,
        ready_timeout_s=120.0,
        servers=[ServerConfig("pd-p0", "prefill"), ServerConfig("pd-d0", "decode")],
        python=sys.executable,
        model_path=str(tmp_path / "model"),
        device="cpu",
        page_size=64,
        health_period_s=0.05,
        unhealthy_s=60.0,
    )


def with_manner(config: LauncherConfig, manner: str) -> LauncherConfig:
    """The decode server behaves so."""
    config.servers[1].env = {"SGLANG_MANNER": manner}
    return config


def failure(config: LauncherConfig) -> str:
    """What a launch that fails says, after which it is gone."""
    with launcher(config, PYTHONPATH=PROCESS) as one:
        event = one.hear()
        assert event["event"] == "failed", event
        assert one.process.wait(60) == 3
        return str(event["message"])


def test_ready_says_where_the_servers_are_and_their_end_leaves_nothing(
    config: LauncherConfig,
) -> None:
    with launcher(config, PYTHONPATH=PROCESS) as one:
        event = one.hear()
        assert event["event"] == "ready", event
        assert set(event["ports"]) == {"pd-p0", "pd-d0"}
        assert set(event["bootstrap_ports"]) == {"pd-p0"}
        assert event["addresses"]["pd-d0"] == ["127.0.0.1", event["ports"]["pd-d0"]]
        assert (event["version"], event["untested"]) == ("0.5.23", None)
        assert event["server_info"]["pd-p0"]["role"] == "prefill"
        assert event["server_info"]["pd-d0"]["page_size"] == 64
        assert KEY not in str(event)
        groups = groups_under(one)
        assert sorted(event["pids"].values()) == sorted(groups)
        assert [len(living_members(group)) for group in groups] == [2, 2]
        logs = {name: Path(path).read_text() for name, path in event["logs"].items()}
        assert one.end() == 0
        assert not any(living_members(group) for group in groups)
    known = json.loads((Path(config.log_directory) / "servers-pd.json").read_text())
    assert known == {key: value for key, value in event.items() if key != "event"}
    counted = json.loads((Path(config.log_directory) / "pd-p0.counters.json").read_text())
    assert (counted["num_running"], counted["kv_transfer_bytes"]) == (0, None)
    for log in logs.values():
        assert log.startswith("$ ")
        assert KEY not in log
        assert "api_key='***'" in log
        folder = next(word for word in log.split() if word.startswith("TMPDIR="))
        assert not Path(folder.removeprefix("TMPDIR=")).exists()


#: How the decode server behaves, and what the failure must say.
FAILURES = {
    "memory": ["pd-d0", "phase memory", "exited with 1", "Not enough memory", "mem_fraction"],
    "killed": ["pd-d0", "phase memory", "killed by SIGKILL", "exit code -9"],
    "flag": ["pd-d0", "phase launch", "unrecognized arguments: --nonsense", "extra_flags"],
    "taken": ["pd-d0", "phase port", "cannot get ready", "Errno 98"],
}


@pytest.mark.parametrize("manner", FAILURES)
def test_a_server_that_does_not_start_is_named_with_its_phase(
    config: LauncherConfig, manner: str
) -> None:
    message = failure(with_manner(config, manner))
    for words in (*FAILURES[manner], "pd-d0.log"):
        assert words in message


def test_a_server_that_is_never_ready_is_not_waited_for_longer_than_asked(
    config: LauncherConfig,
) -> None:
    config.ready_timeout_s = 3.0
    message = failure(with_manner(config, "slow"))
    assert "pd-d0 failed in phase ready" in message
    assert "not ready within 3 s" in message


@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_that_dies_in_mid_run_is_named(config: LauncherConfig, victim: int) -> None:
    with launcher(config, PYTHONPATH=PROCESS) as one:
        ready = one.hear()
        groups = groups_under(one)
        os.kill(groups[victim], signal.SIGKILL)
        event = one.hear()
        assert event["event"] == "failed"
        assert "in phase died: it was killed by SIGKILL in mid-run" in event["message"]
        assert event["message"].split()[2] == list(ready["ports"])[victim]
        assert one.process.wait(60) == 3
        assert not any(living_members(group) for group in groups)


def test_a_server_that_is_not_well_any_more_is_named(config: LauncherConfig) -> None:
    config.unhealthy_s = 1.0
    with launcher(with_manner(config, "unwell"), PYTHONPATH=PROCESS) as one:
        assert one.hear()["event"] == "ready"
        message = one.hear()["message"]
        assert "pd-d0 failed in phase died: it runs, but" in message
        assert "/health for 1 s" in message


@pytest.mark.parametrize("when", ["starting", "ready"])
def test_nothing_outlives_a_launcher_that_is_killed(config: LauncherConfig, when: str) -> None:
    config = with_manner(config, "slow" if when == "starting" else "well")
    with launcher(config, PYTHONPATH=PROCESS) as one:
        if when == "ready":
            assert one.hear()["event"] == "ready"
        deadline_s = time.monotonic() + 60
        while len(groups := groups_under(one)) < 2 or not all(
            len(living_members(group)) == 2 for group in groups
        ):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        one.process.kill()
        one.process.wait(60)
        until_gone(groups)


def test_sigterm_ends_a_launcher_as_the_end_of_stdin_does(config: LauncherConfig) -> None:
    with launcher(config, PYTHONPATH=PROCESS) as one:
        assert one.hear()["event"] == "ready"
        groups = groups_under(one)
        one.process.terminate()
        assert one.process.wait(60) == 0
        assert not any(living_members(group) for group in groups)


def test_a_port_that_is_taken_is_named_before_anything_is_launched(
    config: LauncherConfig,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        config.servers[0].port = holder.getsockname()[1]
        message = failure(config)
    assert "pd-p0 failed in phase port" in message
    assert "is taken by another process" in message
    assert not (Path(config.log_directory) / "pd-p0.log").exists()


#: A change of the configuration and what the refusal must say.
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "model": ({"model_path": "/no/such/model"}, ["phase load", "/no/such/model is not there"]),
    "interpreter": ({"python": "/no/python"}, ["phase launch", "no executable file"]),
    "version": ({"version": "0.5.9"}, ["phase launch", "has sglang 0.5.23", "asks for 0.5.9"]),
    "backend": ({"transfer_backend": "nixl"}, ["phase launch", "has no nixl"]),
    "gpu": ({"device": "cuda"}, ["phase driver"]),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_cannot_run_is_refused_before_a_launch(config: LauncherConfig, change: str) -> None:
    fields, words = REFUSED[change]
    if change == "gpu" and Path("/dev/nvidia0").exists():
        fields = {"device": "cuda", "servers": [ServerConfig("pd-p0", "prefill", base_gpu=900)]}
    message = failure(msgspec.structs.replace(config, **fields))
    for word in words:
        assert word in message


def test_attached_servers_are_looked_at_and_left_alone(config: LauncherConfig) -> None:
    with launcher(config, PYTHONPATH=PROCESS) as ours:
        ready = ours.hear()
        attached = [
            AttachedConfig(name, role, f"http://127.0.0.1:{ready['ports'][name]}", bootstrap)
            for name, role, bootstrap in (
                ("pd-p0", "prefill", "127.0.0.1:8998"),
                ("pd-d0", "decode", None),
            )
        ]
        other = msgspec.structs.replace(config, servers=[], attached=attached, model_path=None)
        with launcher(other) as theirs:
            event = theirs.hear()
            assert event["event"] == "ready", event
            assert event["ports"] == {}
            assert event["addresses"]["pd-d0"] == ["127.0.0.1", ready["ports"]["pd-d0"]]
            assert event["server_info"]["pd-d0"]["role"] == "decode"
            assert theirs.end() == 0
        swapped = [msgspec.structs.replace(one, role="decode") for one in attached]
        wrong = failure(msgspec.structs.replace(other, attached=swapped))
        assert "pd-p0 at http://127.0.0.1" in wrong
        assert "is of prefill (disaggregation_mode), but decode is asked for" in wrong
        with launcher(msgspec.structs.replace(other, unhealthy_s=1.0)) as theirs:
            assert theirs.hear()["event"] == "ready"
            groups = groups_under(ours)
            ours.end()
            assert "failed in phase died" in theirs.hear()["message"]
        assert not any(living_members(group) for group in groups)

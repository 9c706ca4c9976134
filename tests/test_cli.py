"""The command line: one paragraph for what is wrong, the right status, JSON and nothing else."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from harness.cli import main
from harness.console import simulation_table
from harness.simulation_summary import ttft_statistics

ROOT = Path(__file__).parent.parent
CASE_STUDY = str(ROOT / "scenarios/paper-case-study.toml")


Result = subprocess.CompletedProcess[str]
Call = Callable[..., Result]


def in_a_process(*arguments: str) -> Result:
    """The command line as a user starts it, which takes most of a second."""
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )


@pytest.fixture
def prfaas(capfd: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """The command line in this process."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}

    def call(*arguments: str) -> Result:
        capfd.readouterr()
        try:
            status = main(arguments)
        except SystemExit as left:  # argparse's
            status = int(str(left.code))
        return subprocess.CompletedProcess(arguments, status, *capfd.readouterr())

    yield call
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def refused(result: Result, status: int, *said: str) -> None:
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert len([line for line in result.stderr.splitlines() if line.startswith("prfaas:")]) == 1
    for words in said:
        assert words in result.stderr


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["workload.cvv=2"], ["workload.cvv", "workload.cv", "paper-case-study.toml"]),
        (["link.rate=100"], ["link.rate", "100gbit"]),
        (["link.rtt=0.8mm"], ["link.rtt", "0.8mm"]),
        (["load.rate_req_per_s=-1"], ["load.rate_req_per_s"]),
        (["deployments.homogeneous_pd.threshold_tokens=5"], ["threshold_tokens", "PrfaaS"]),
        (["deployments.prfaas_pd.num_decode=0"], ["num_decode"]),
        (["workload.max_tokens=500000"], ["131072"]),
        (["hardware.h20.profile=nowhere.json"], ["nowhere.json"]),
    ],
)
def test_a_wrong_setting_is_named(prfaas: Call, settings: list[str], said: list[str]) -> None:
    arguments = [part for one in settings for part in ("--set", one)]
    refused(prfaas("simulate", CASE_STUDY, *arguments), 2, *said)


def test_a_tokenizer_that_cannot_be_used_is_refused_before_anything_starts(
    prfaas: Call, tmp_path: Path
) -> None:
    tokenizer, runs = tmp_path / "tokenizer.json", tmp_path / "runs"
    tokenizer.write_text("no tokenizer")
    flags = ("--set", f"gateway.tokenizer={tokenizer}", "--runs", str(runs))
    refused(prfaas("bench", CASE_STUDY, *flags), 2, str(tokenizer))
    assert not runs.exists()


def test_a_missing_scenario_is_named() -> None:
    refused(in_a_process("bench", "nowhere.toml"), 2, "nowhere.toml")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "empty"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 2, "hash_ids": [1]}\n\n', ":2"),
        ('{"timestamp": 0, "input_length": 5}\n', ":1"),
        ('{"timestamp": 0, "input_length": -5, "output_length": 2, "hash_ids": []}\n', ":1"),
        ("not json\n", ":1"),
    ],
)
def test_a_malformed_trace_names_file_and_line(
    prfaas: Call, tmp_path: Path, content: str, said: str
) -> None:
    trace = tmp_path / "broken.jsonl"
    trace.write_text(content)
    refused(prfaas("bench", CASE_STUDY, "--trace", str(trace)), 2, "broken.jsonl", said)


def test_a_setting_that_a_trace_overrides_is_refused(prfaas: Call, tmp_path: Path) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 500, "output_length": 2, "hash_ids": [1]}\n')
    arguments = ("simulate", CASE_STUDY, "--trace", str(trace), "--json")
    refused(prfaas(*arguments, "--set", "load.num_requests=2"), 2, "load.num_requests", "--trace")
    assert prfaas(*arguments, "--set", "workload.rate_scale=2").returncode == 0


def test_what_cannot_be_written_is_named() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "harness", "schema"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
    assert result.returncode == 3
    assert "cannot read or write standard output: No space left" in result.stderr
    assert "Traceback" not in result.stderr


def test_overload_is_said_with_the_load_that_would_fit(prfaas: Call) -> None:
    result = prfaas("simulate", CASE_STUDY, "--json", "--set", "load.rate_req_per_s=4")
    notes = json.loads(result.stdout)["notes"]
    assert any("homogeneous_pd" in note and "0." in note for note in notes)


def test_bad_usage_has_status_2(prfaas: Call) -> None:
    for arguments in (["bench"], ["fly"], ["bench", CASE_STUDY, "--repeats", "0"], ["report"]):
        assert prfaas(*arguments).returncode == 2
    refused(prfaas("bench", CASE_STUDY, "--duration", "ten"), 2, "--duration")


def test_a_gateway_port_in_use_ends_the_run_with_a_verdict(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = in_a_process(
            "bench",
            CASE_STUDY,
            *("--set", f"testbed.gateway_port={port}", "--set", "testbed.link_backend=relay"),
            *("--set", "load.num_requests=5", "--runs", str(tmp_path), "--json"),
        )
    assert result.returncode == 3
    assert "Traceback" not in result.stderr
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    document = json.loads(result.stdout)
    assert document["verdict"] == "not_supported"
    assert any(str(port) in reason for reason in document["reasons"])
    assert document["deployments"]["prfaas_pd"]["num_unsent"] == 5


def test_simulate_prints_one_document() -> None:
    result = in_a_process("simulate", CASE_STUDY, "--json")
    assert result.returncode == 0
    document: dict[str, Any] = json.loads(result.stdout)
    found = {name: one["lambda_max_req_per_s"] for name, one in document["deployments"].items()}
    paper = {"prfaas_pd": 3.24, "homogeneous_pd": 2.11, "naive_heterogeneous": 2.45}
    assert found == pytest.approx(paper, rel=0.01)


def test_the_schema_names_every_table(prfaas: Call) -> None:
    schema = json.loads(prfaas("schema").stdout)
    assert {"model", "hardware", "workload", "link", "deployments"} <= set(schema["properties"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", CASE_STUDY, "--html", ""], "--html needs the name of a file"),
        (["plan", CASE_STUDY, "--html", "/proc/plan.html"], "/proc/plan.html"),
        (["plan", CASE_STUDY, "--html", "nowhere/plan.html"], "nowhere does not exist"),
        (["plan", CASE_STUDY, "--html", "tests"], "no regular file"),
        (["bench", CASE_STUDY, "--runs", "README.md/runs"], "README.md is no folder"),
        (["model", "inspect", "nowhere.json", "--output", "/proc/m.json"], "/proc/m.json"),
        (
            ["profile", "import", "published", "nowhere.json", "--architecture", "nowhere.json",
             "--output", "README.md"],
            "README.md exists",
        ),
    ],
)  # fmt: skip
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any input is read: those that do not exist are not what is complained of."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "nowhere.json" not in err


@pytest.mark.parametrize("verb", [["plan", "--table", "wall"], ["simulate", CASE_STUDY, "--json"]])
def test_a_reader_that_stops_ends_it_without_a_word(verb: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "harness", *verb],
        stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize("at", ["harness.verbs", "harness.planning.plan"])
def test_ctrl_c_before_there_is_anything_to_judge(at: str) -> None:
    """While a module is imported, of the command line itself or of the work."""
    code = (
        "import runpy, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {at!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        f"sys.argv = ['prfaas', 'plan', {CASE_STUDY!r}]\n"
        "runpy.run_module('harness', run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "prfaas: interrupted\n"


def test_failures_are_counted_and_leave_quantiles_not_means(prfaas: Call) -> None:
    settings = ("load.rate_req_per_s=4", "scheduling.admission_deadline=0.1s")
    flags = [part for one in (*settings, "load.num_requests=300") for part in ("--set", one)]
    result = prfaas("simulate", CASE_STUDY, "--json", *flags)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads(result.stdout, parse_constant=refuse)
    failed = {name: one for name, one in document["deployments"].items() if one["num_failed"] > 0}
    assert failed
    for name, one in failed.items():
        assert one["num_failed"] == one["num_planned"] - one["num_completed"]
        assert one["ttft_mean_s"] is None
        assert one["ttft_p50_s"] >= one["ttft_p50_completed_s"]
        assert any(f"{name}: {one['num_failed']} of 300 requests failed" in n
                   for n in document["notes"])  # fmt: skip


def test_quantiles_beyond_the_completed_requests_are_null_and_shown_as_infinite() -> None:
    document = {
        "scenario": "s", "num_requests": 10,
        "deployments": {
            "prfaas_pd": {
                "num_prfaas": 4, "num_prefill": 3, "num_decode": 5, "threshold_tokens": 19400,
                "num_failed": 4, "ttft_mean_s": None, "ttft_p50_s": 2.0, "ttft_p90_s": None,
                "utilisation": {"link": 0.5}, "lambda_max_req_per_s": 3.0,
            }
        },
    }  # fmt: skip
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(simulation_table(document))
    row = next(line.split() for line in capture.get().splitlines() if "4/3/5" in line)
    assert row == ["prfaas_pd", "4/3/5", "19,400", "4", "-", "2.00", "inf", "link", "0.50", "3.00"]
    few = "effective samples; a P99 needs 1,000"
    assert ttft_statistics(np.array([1.0, 2.0]), 2) == {
        "ttft_mean_s": None, "ttft_mean_completed_s": 1.5, "ttft_p50_s": 2.0,
        "ttft_p50_completed_s": 1.0, "ttft_p90_s": None, "ttft_p90_completed_s": 2.0,
        "effective_samples": 2.0, "ttft_p99_s": None, "ttft_p99_reason": f"2 {few}",
    }  # fmt: skip
    assert ttft_statistics(np.array([1.0]), 0) == {
        "ttft_mean_s": 1.0, "ttft_p50_s": 1.0, "ttft_p90_s": 1.0,
        "effective_samples": 1.0, "ttft_p99_s": None, "ttft_p99_reason": f"1 {few}",
    }  # fmt: skip


def test_the_simulated_table_fits_80_columns() -> None:
    shown = in_a_process("simulate", CASE_STUDY).stdout
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown

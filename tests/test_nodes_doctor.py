"""``prfaas doctor --scenario``: what would fail is found before anything is started."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from scenario_files import PAPER, ROOT, written

from harness.scenario import load_scenario
from harness.scenario_doctor import ScenarioExamination, examine_scenario
from netem.doctor import Finding

REAL = ROOT / "scenarios" / "h200-h20.toml"
TEXT = REAL.read_text().replace("../profiles/", f"{ROOT.as_posix()}/profiles/")


def examined(path: Path, *settings: str) -> dict[str, Finding]:
    return {one.name: one for one in examine_scenario(load_scenario(path, settings)).findings}


def test_the_shipped_scenario_lacks_nothing_but_measurements() -> None:
    examination = examine_scenario(load_scenario(REAL))
    assert examination.failed == 0
    by_name = {one.name: one for one in examination.findings}
    assert "46 stand_in" in by_name["profile of h20"].found
    assert by_name["memory of h20 for decode"].state == "ok"
    assert "614 GB usable" in by_name["memory of h20 for decode"].found
    assert by_name["KV paths"].state == "limited"
    assert by_name["other nodes"].state == "limited"


@pytest.mark.parametrize(
    ("settings", "name", "words"),
    [
        (["model.weights=1000GB"], "memory of h20 for decode", "does not fit"),
        (["model.weights=600GB"], "memory of h20 for decode", "batch of 32"),
        (
            ["deployments.homogeneous_pd.num_prefill=9"],
            "nodes for homogeneous_pd",
            "hold 8",
        ),
        (
            ["engine.version=0.5.9", "engine.requires=[]", "engine.decode.dp=1"],
            "KV from prfaas to decode",
            "sliding window",
        ),
        (["engine.decode.dp=3"], "KV from prefill to decode", "cannot form 3 groups"),
    ],
)
def test_what_a_run_would_fail_by_is_missing(settings: list[str], name: str, words: str) -> None:
    found = examined(REAL, *settings)[name]
    assert found.state == "missing"
    assert words in found.found + found.lacks


def test_without_sizes_the_memory_is_not_judged(tmp_path: Path) -> None:
    path = written(tmp_path, TEXT.replace('gpu_memory = "96GB"\n', "", 1))
    assert examined(path)["memory of h20 for decode"].state == "limited"


def test_copies_on_the_link_are_told() -> None:
    found = examined(REAL, "engine.dp=1")["replication in prfaas_pd"]
    assert found.state == "limited"
    assert "gqa 2" in found.lacks


def test_a_node_that_is_this_machine_is_looked_at(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", 20000))
            holder.listen()
        except OSError:
            pass  # another has it: taken all the same
        text = TEXT.replace('"192.0.2.20"', '"127.0.0.1"').replace(
            'python = "/opt/sglang/bin/python"', f'python = "{sys.executable}"'
        )
        found = examined(written(tmp_path, text.replace('"203.0.113.20"', '"127.0.0.2"')))
    assert found["node h20-0: ports"].state == "missing"
    assert "20000" in found["node h20-0: ports"].found
    assert found["node h20-0: interface"].state == (
        "ok" if Path("/sys/class/net/eth1").exists() else "missing"
    )
    assert found["node h20-0: model"].state == "missing"
    assert "h20-0" not in found["other nodes"].found


def test_an_address_that_nobody_knows_is_missing(tmp_path: Path) -> None:
    text = TEXT.replace('"192.0.2.27"', '"no-such-host.invalid"')
    assert examined(written(tmp_path, text))["node h20-7"].state == "missing"


def test_an_emulated_scenario_needs_nothing() -> None:
    found = examined(PAPER)
    assert found["engine"].found.startswith("emulated")
    assert not [name for name in found if name.startswith("node")]


def test_the_command_says_so_by_its_exit_status() -> None:
    def doctor(*more: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "harness", "doctor", *more]
        return subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT
        )

    done = doctor("--scenario", str(REAL), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["failed"] == 0
    assert {"name", "state", "found", "lacks", "remedy"} == set(document["findings"][0])
    assert set(document) == set(ScenarioExamination.__slots__) | {"failed"}
    failed = doctor("--scenario", str(REAL), "--set", "model.weights=1000GB")
    assert failed.returncode == 1
    assert "does not fit" in " ".join(failed.stdout.split())
    assert doctor("--scenario", "nothing.toml").returncode == 2
    assert doctor("--set", "a=b").returncode == 2

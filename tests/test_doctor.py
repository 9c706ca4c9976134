"""``doctor`` says what is there: compared with what the machine shows and with a real link."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from netem.doctor import examine, print_examination
from netem.link import symmetric
from netem.testlink import open_link

ROOT = Path(__file__).parents[1]
POWERLESS = (
    "import ctypes, os, sys; "
    "[ctypes.CDLL(None).prctl(24, number, 0, 0, 0) for number in range(64)]; "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def doctor(*front: str, **options: Any) -> dict[str, Any]:
    result = subprocess.run(
        [*front, sys.executable, "-m", "harness", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
        **options,
    )
    assert result.returncode == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    document["by_name"] = {one["name"]: one for one in document["findings"]}
    return document


def test_what_it_finds_is_what_the_machine_shows() -> None:
    limit = 512
    found = doctor(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
    by_name = found["by_name"]
    assert os.uname().release in by_name["kernel"]["found"]
    assert by_name["Python"]["found"].startswith(".".join(map(str, sys.version_info[:3])))
    assert (by_name["open files"]["state"], by_name["open files"]["found"][:3]) == (
        "limited",
        "512",
    )
    assert f"{len(os.sched_getaffinity(0))} usable" in by_name["cores"]["found"]
    current = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    assert by_name["congestion control"]["found"].startswith(current)
    with open_link(symmetric("real", 125e6, 1e-3)) as link:
        assert found["backend"] == link.backend


def test_whatever_is_not_in_order_says_what_it_costs_and_how_to_get_it() -> None:
    findings = doctor()["findings"]
    assert {one["state"] for one in findings} <= {"ok", "limited", "missing"}
    for one in findings:
        assert bool(one["lacks"] and one["remedy"]) == (one["state"] != "ok"), one


@pytest.mark.netadmin  # Root, to have capabilities to drop.
def test_without_capabilities_it_names_them_and_the_relay() -> None:
    found = doctor(sys.executable, "-c", POWERLESS)
    assert found["backend"] == "relay"
    assert found["by_name"]["capabilities"]["found"] == "without CAP_SYS_ADMIN and CAP_NET_ADMIN"
    assert found["by_name"]["user namespaces"]["state"] == "limited"
    assert any("netem is not used" in note for note in found["notes"])


@pytest.mark.netadmin
def test_trying_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def seen() -> tuple[list[str], list[str], str]:
        namespace = os.readlink("/proc/self/ns/net")
        return os.listdir("/sys/class/net"), os.listdir("/proc/self/fd"), namespace

    before = seen()
    examination = examine()
    assert seen() == before
    print_examination(examination)
    out = capsys.readouterr().out
    for finding in examination.findings:
        assert f"{finding.name}: {finding.found}" in out
        assert finding.remedy in out


@pytest.mark.netem
@pytest.mark.parametrize("part", ["sch_netem", "sch_fq", "ifb"], ids=["netem", "fq", "ifb"])
def test_a_kernel_with_a_part_is_known_by_trying(part: str) -> None:
    by_name = {one.name: one for one in examine().findings}
    assert by_name[part].state == "ok"

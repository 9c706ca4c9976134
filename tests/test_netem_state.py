"""Records of links: owners that cannot be mistaken, names that are taken once, safe folders."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from netem.link import LinkError
from netem.reaping import reap_stale, take_down
from netem.state import (
    MARK_VARIABLE,
    Entry,
    FolderError,
    ProcessId,
    claim,
    entries,
    folder_path,
    forget,
    forget_name,
    locked,
    marked_processes,
    runtime_folder,
    unreadable,
    write,
)

#: An interface of another network namespace.
NIC = {
    "interface": "eth9",
    "index": 9,
    "network_namespace": "net:[1]",
    "filters": [["egress", 41200, 8]],
    "ifbs": ["prfaas-x"],
    "made_clsact": True,
    "replaced": [],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRFAAS_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that waits, and ends with the test."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def taken(name: str, process: ProcessId | None = None) -> Entry:
    with locked():
        return claim(name, process or ProcessId.of(os.getpid()))


def test_an_entry_is_read_as_it_was_written() -> None:
    assert entries() == ()
    entry = taken("wan")
    assert entries() == (entry,)
    changed = replace(entry, details={"nic": {"interface": "eth1"}, "keeper": True})
    write(changed)
    assert entries() == (changed,)
    forget(entry)
    assert entries() == ()


def test_a_name_is_taken_once_and_its_holder_is_named() -> None:
    taken("wan")
    with pytest.raises(LinkError, match=rf"'wan' is up already \(process {os.getpid()}\)"):
        taken("wan")
    taken("lan")


@pytest.mark.parametrize("name", ["", "../wan", "a b", ".hidden", "x" * 32, "wan\n"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(LinkError, match="cannot be the name"):
        taken(name)


def test_forgetting_spares_the_next_holder_of_the_name() -> None:
    first = taken("wan")
    forget(first)
    second = taken("wan")
    forget(first)
    assert entries() == (second,)


def test_a_process_of_the_same_pid_is_another(sleeper: "subprocess.Popen[bytes]") -> None:
    mine = ProcessId.of(sleeper.pid)
    earlier = replace(mine, start_ticks=mine.start_ticks - 1)
    assert mine.is_alive()
    assert not earlier.is_alive()
    assert not replace(mine, boot_id="of another boot").is_alive()
    # What is not the owner is not ended, though it has its pid.
    assert not earlier.end()
    assert sleeper.poll() is None
    assert mine.end()
    assert sleeper.wait(10) == -15
    assert not mine.is_alive()


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = ProcessId.of(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    assert not owner.is_alive()
    process.communicate()


def test_a_process_that_ignores_sigterm_is_ended_all_the_same() -> None:
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert ProcessId.of(process.pid).end(grace_s=0.2)
        assert process.wait(10) == -9


def test_only_dead_owners_are_reaped(sleeper: "subprocess.Popen[bytes]") -> None:
    kept = taken("kept")
    lost = taken("lost", ProcessId.of(sleeper.pid))
    lost.log_path.write_text("left behind")
    assert reap_stale() == ()
    sleeper.kill()
    sleeper.wait()
    (removed,) = reap_stale()
    assert (removed.name, removed.ended_processes, removed.problems) == ("lost", (), ())
    assert entries() == (kept,)
    assert not lost.log_path.exists()


def test_a_link_of_a_live_run_is_not_taken_down(sleeper: "subprocess.Popen[bytes]") -> None:
    entry = taken("bench", ProcessId.of(sleeper.pid))
    with pytest.raises(LinkError, match=f"run of process {sleeper.pid}"):
        take_down(entry)
    assert sleeper.poll() is None
    assert entries() == (entry,)


def test_marked_processes_are_ended_with_what_is_left(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    entry = taken("lost", ProcessId.of(sleeper.pid))
    other = taken("kept")
    sleeper.kill()
    sleeper.wait()

    def inside(link: Entry) -> "subprocess.Popen[bytes]":
        environment = os.environ | {MARK_VARIABLE: link.link_id}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"], env=environment, **pipes
        )
        assert process.stdout is not None
        process.stdout.readline()  # Its environment is its own once it runs.
        return process

    with inside(entry) as one, inside(other) as two:
        assert [process.pid for process in marked_processes(entry.link_id)] == [one.pid]
        (removed,) = reap_stale()
        assert removed.ended_processes == (one.pid,)
        assert one.wait(10) == -15
        assert two.poll() is None
        two.kill()


def test_a_restoration_that_fails_keeps_the_record(sleeper: "subprocess.Popen[bytes]") -> None:
    entry = replace(taken("nic", ProcessId.of(sleeper.pid)), details={"nic": NIC})
    write(entry)
    sleeper.kill()
    sleeper.wait()
    (removed,) = reap_stale()
    assert "eth9 was shaped in another network namespace (net:[1])" in removed.problems[0]
    assert entries() == (entry,)


def test_a_damaged_record_is_named_and_hides_no_other(folder: Path) -> None:
    good = taken("lan")
    document = json.loads((folder / "lan.json").read_text())
    damaged = [
        {"name": "wan", "owner": {}},
        document,  # another name's
        document | {"name": "wan", "details": 5},
        document | {"name": "wan", "link_id": ""},
        document | {"name": "wan", "owner": document["owner"] | {"pid": "1"}},
        document | {"name": "wan", "since_unix_s": "now"},
    ]
    for text in ("", "{}", "[1]", *map(json.dumps, damaged)):
        (folder / "wan.json").write_text(text)
        assert entries() == (good,)
        assert reap_stale() == ()
        assert list(unreadable()) == ["wan"]
        assert "wan.json is not the record of a link" in unreadable()["wan"]
        with pytest.raises(LinkError, match="down wan --forget"):
            claim("wan", good.owner)
    forget_name("wan")
    assert unreadable() == {}


@pytest.mark.parametrize(
    "record",
    [5, [], {}, {"interface": "eth9"}, {"filters": [["out", 1, 8]]}, {"filters": [[1]]},
     {"ifbs": [5]}, {"index": "9"}, {"network_namespace": None}, {"extra": 1}],
)  # fmt: skip
def test_a_damaged_record_of_an_interface_is_kept_and_said(
    sleeper: "subprocess.Popen[bytes]", record: object
) -> None:
    if isinstance(record, dict) and record and "interface" not in record:
        record = NIC | record
    entry = replace(taken("nic", ProcessId.of(sleeper.pid)), details={"nic": record})
    write(entry)
    sleeper.kill()
    sleeper.wait()
    (removed,) = reap_stale()
    assert "says nothing of use" in removed.problems[0]
    assert entries() == (entry,)


def test_a_half_written_record_is_never_read(folder: Path) -> None:
    entry = taken("wan")
    (folder / "wan.new").write_text('{"name": "w')
    assert entries() == (entry,)


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_can_write_is_not_trusted(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(FolderError, match="can be written by someone else"):
        runtime_folder()
    assert reap_stale() == ()


def test_the_folder_is_made_for_the_owner_alone(folder: Path) -> None:
    assert folder_path() == folder
    assert not folder.exists()
    runtime_folder()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_record_says_all_of_its_owner(folder: Path) -> None:
    taken("wan")
    owner = json.loads((folder / "wan.json").read_text())["owner"]
    assert owner == {
        "pid": os.getpid(),
        "start_ticks": ProcessId.of(os.getpid()).start_ticks,
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    }

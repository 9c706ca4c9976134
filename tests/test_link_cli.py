"""``link up | show | verify | run | down | profiles`` as a user meets them."""

import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.cli import main
from netem.link_file import profile_names
from netem.reaping import take_down
from netem.state import entries

ROOT = Path(__file__).parents[1]
WAN = ("--rate", "100mbit", "--rtt", "10ms")
PATIENCE_S = 60
RELAY, PACKETS = "relay", pytest.param("auto", marks=pytest.mark.netadmin)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the links of a test are recorded; whatever it leaves up is taken down."""
    monkeypatch.setenv("PRFAAS_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield tmp_path / "run"
    for entry in entries():
        take_down(entry)


@dataclass(frozen=True)
class Said:
    """What a command line said and returned."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def prfaas(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Said]]:
    """The command line in this process."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}

    def call(*arguments: str) -> Said:
        capfd.readouterr()
        try:
            status = main(arguments)
        except SystemExit as exit_:  # argparse's
            status = int(str(exit_.code))
        return Said(status, *capfd.readouterr())

    yield call
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def shell(*arguments: str, front: tuple[str, ...] = (), **options: Any) -> Said:
    """The command line in a process of its own, which ``run`` becomes the command of."""
    result = subprocess.run(
        [*front, sys.executable, "-m", "harness", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        **options,
    )
    return Said(result.returncode, result.stdout, result.stderr)


Call = Callable[..., Said]


def done(result: Said) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


def refused(result: Said, status: int, *said: str) -> None:
    assert result.returncode == status, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert [line[:8] for line in result.stderr.splitlines()] == ["prfaas: "]
    for words in said:
        assert words in result.stderr


def ended(process: psutil.Process) -> bool:
    """Gone, or waiting for init to notice."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process is bringing about."""
    wait = threading.Event()
    for _ in range(int(PATIENCE_S / 0.05)):
        if condition():
            return
        wait.wait(0.05)
    raise AssertionError(f"not within {PATIENCE_S} s")


def await_ends(*processes: psutil.Process) -> None:
    until(lambda: all(map(ended, processes)))


def shown(prfaas: Call) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(done(prfaas("link", "show", "--json")))
    return found


@pytest.mark.parametrize("backend", [RELAY, PACKETS])
def test_a_link_outlives_the_command_and_goes_with_down(prfaas: Call, backend: str) -> None:
    up = json.loads(done(prfaas("link", "up", "wan", *WAN, "--backend", backend, "--json")))
    keeper = psutil.Process(up["pid"])
    (link,) = shown(prfaas)
    assert (link["name"], link["alive"], link["description"]) == (
        "wan",
        True,
        "wan: 100mbit, rtt 10ms",
    )
    assert link["counters"]["near_to_far"]["dropped"] == 0
    assert "near to far: " in done(prfaas("link", "show", "wan"))
    assert done(prfaas("link", "down")) == "removed wan\n"
    assert ended(keeper)
    assert shown(prfaas) == []
    assert done(prfaas("link", "down")) == "no link is up\n"


@pytest.mark.netadmin
def test_a_command_runs_inside_and_its_status_is_passed_on(prfaas: Call) -> None:
    done(prfaas("link", "up", "wan", *WAN))
    code = (
        "import os, socket; names = [n for _, n in socket.if_nameindex()]; "
        "print(*names, os.environ['PRFAAS_LINK'], os.environ['PRFAAS_LINK_ADDRESS'])"
    )
    inside = done(shell("link", "run", "--", sys.executable, "-c", code)).split()
    assert inside[0] == "lo"
    assert len(inside) == 4  # One interface beside it, and that is the link.
    far = done(shell("link", "run", "--site", "far", "--", sys.executable, "-c", code)).split()
    assert far[-1] != inside[-1]
    for script, status in (("exit 7", 7), ("kill -9 $$", -signal.SIGKILL)):
        assert shell("link", "run", "--name", "wan", "--", "sh", "-c", script).returncode == status
    assert shell("link", "run", "--", "no-such-command").returncode == 127
    assert shell("link", "run", "--", "/etc/passwd").returncode == 126
    assert shell("link", "run", "--", "cat", input="passed on").stdout == "passed on"


def test_a_link_for_one_command_is_gone_with_it(prfaas: Call) -> None:
    for script, status in (("exit 7", 7), ("kill -9 $$", 128 + signal.SIGKILL)):
        result = shell("link", "run", *WAN, "--backend", "relay", "--", "sh", "-c", script)
        assert result.returncode == status
        assert "the relay ends TCP on both sides" in result.stderr
    assert shown(prfaas) == []


@pytest.mark.netadmin
def test_verify_measures_and_its_status_says_what_it_found(prfaas: Call) -> None:
    done(prfaas("link", "up", "wan", "--rate", "100mbit", "--rtt", "20ms"))
    answer = json.loads(done(prfaas("link", "verify", "--flows", "2", "--json")))
    assert answer["failures"] == []
    assert answer["check"]["flows"] == 2
    assert 19.8e-3 <= answer["check"]["rtt_p50_s"] < 30e-3


@pytest.mark.netadmin
def test_kill_minus_9_of_the_keeper_leaves_what_down_removes(prfaas: Call, folder: Path) -> None:
    up = json.loads(done(prfaas("link", "up", "wan", *WAN, "--json")))
    code = "import sys; print('inside', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-m", "netem", "link", "run", "--", sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as inside:
        assert inside.stdout is not None
        assert inside.stdout.readline() == b"inside\n"
        keeper = psutil.Process(up["pid"])
        helpers = keeper.children()
        keeper.kill()
        await_ends(keeper, *helpers)
        (left,) = shown(prfaas)
        assert (left["alive"], left["counters"]) == (False, None)
        said = shell("link", "run", "--", "true")
        assert said.returncode == 2
        # The run removed what was left first, and what ran in it.
        assert f"removed wan, ended processes [{inside.pid}]" in said.stderr
        assert shown(prfaas) == []
        assert inside.wait(PATIENCE_S) == -signal.SIGTERM
    assert {path.name for path in folder.iterdir()} <= {"lock", "restoring"}


def test_kill_minus_9_at_any_point_of_coming_up_leaves_nothing(prfaas: Call) -> None:
    order = {"name": "wan", "document": {"rate": "100mbit", "rtt": "1ms"}}
    came_up = []
    for step in range(5):
        with subprocess.Popen(
            [sys.executable, "-m", "netem.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as keeper:
            assert keeper.stdin is not None
            assert keeper.stdout is not None
            keeper.stdin.write(json.dumps(order).encode() + b"\n")
            keeper.stdin.close()
            children = []
            try:
                keeper.wait(0.1 + 0.2 * step)
            except subprocess.TimeoutExpired:
                children = psutil.Process(keeper.pid).children(recursive=True)
            keeper.kill()
            came_up.append(b"entry" in keeper.stdout.read())
        await_ends(*children)
        done(prfaas("link", "down"))
        assert shown(prfaas) == []
    assert not came_up[0]


def test_two_links_do_not_touch_each_other(prfaas: Call) -> None:
    first = json.loads(done(prfaas("link", "up", "one", *WAN, "--backend", "relay", "--json")))
    first_keeper = psutil.Process(first["pid"])
    second = json.loads(done(prfaas("link", "up", "two", *WAN, "--backend", "relay", "--json")))
    refused(prfaas("link", "verify"), 2, "name one of the links that are up: one, two")
    refused(prfaas("link", "up", "one", *WAN), 3, "'one' is up already", "down one")
    done(prfaas("link", "down", "one"))
    assert ended(first_keeper)
    (left,) = shown(prfaas)
    assert (left["name"], left["pid"]) == ("two", second["pid"])
    done(shell("link", "run", "--", "true"))


def test_a_keeper_ends_by_itself_when_its_time_is_over(prfaas: Call) -> None:
    up = json.loads(
        done(prfaas("link", "up", "brief", *WAN, "--backend", "relay", "--for", "300ms", "--json"))
    )
    keeper = psutil.Process(up["pid"])
    await_ends(keeper)
    assert shown(prfaas) == []


def test_a_link_that_varies_says_what_it_became(prfaas: Call, tmp_path: Path) -> None:
    file = tmp_path / "dips.toml"
    file.write_text(
        'rate = "100mbit"\nrtt = "1ms"\n[[variation.change]]\nat = "0s"\nrate = "10mbit"\n'
    )
    done(prfaas("link", "up", "--file", str(file), "--vary", "--backend", "relay"))
    (link,) = shown(prfaas)
    assert link["name"] == "dips"
    assert [change["change"] for change in link["counters"]["schedule"]] == [
        "rate 100mbit to 10mbit"
    ]


@pytest.mark.netadmin
def test_a_user_without_rights_has_the_link_in_a_user_namespace() -> None:
    front = (sys.executable, str(Path(__file__).with_name("unprivileged.py")))
    interpreter = f"{sys.executable} -B -m netem"
    script = (
        "export PRFAAS_RUNTIME_DIR=$(mktemp -d)\n"
        f"{interpreter} link up wan --rate 100mbit --rtt 10ms --json || exit 1\n"
        f"{interpreter} link run -- sh -c 'id -u >&2; ls /proc/self/ns >/dev/null; exit 5'\n"
        "echo status $?\n"
        f"{interpreter} link down\n"
        "rm -r $PRFAAS_RUNTIME_DIR\n"
    )
    result = subprocess.run(
        [*front, "bash", "-s"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=PATIENCE_S,
        env={key: value for key, value in os.environ.items() if key != "TMPDIR"},
    )
    assert result.returncode == 0, result.stderr
    document, _, rest = result.stdout.partition("\n}\n")
    up = json.loads(document + "}")
    assert up["rootless"]
    assert up["backend"] in ("netem", "forwarder")
    assert any("rootless: without CAP_SYS_ADMIN and CAP_NET_ADMIN" in note for note in up["notes"])
    assert result.stderr.split() == ["0"]  # root inside, over nothing else
    assert rest == "status 5\nremoved wan\n"


#: Drops every capability, and the rights to have one again, then runs the rest.
POWERLESS = (
    "import ctypes, os, sys; "
    "[ctypes.CDLL(None).prctl(24, number, 0, 0, 0) for number in range(64)]; "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.mark.netadmin  # Root, to have capabilities to drop.
def test_without_capabilities_the_lack_and_the_fallback_are_named() -> None:
    """Root whose capabilities were taken cannot map itself: no user namespace either."""
    front = (sys.executable, "-c", POWERLESS)
    up = json.loads(done(shell("link", "up", "wan", *WAN, "--json", front=front)))
    assert (up["backend"], up["rootless"]) == ("relay", False)
    notes = " ".join(up["notes"])
    assert "CAP_SYS_ADMIN and CAP_NET_ADMIN and rootless not either" in notes
    wanted = shell("link", "up", "real", *WAN, "--backend", "forwarder", front=front)
    refused(wanted, 3, "CAP_SYS_ADMIN and CAP_NET_ADMIN", "auto would try relay")
    node = shell("link", "up", "node", *WAN, "--nic", "eth1", "--peer", "10.0.0.1", front=front)
    refused(node, 3, "eth1", "needs CAP_NET_ADMIN")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("up",), ["describe the link"]),
        (("up", "--profile", "same_metr"), ["same_metr", "same_metro"]),
        (("up", "--rate", "5", "--rtt", "1ms"), ["'rate'", "100gbit"]),
        (("up", "--rate", "1gbit"), ["'rtt'"]),
        (("up", "--file", "nowhere.toml"), ["nowhere.toml"]),
        (("up", "a/b", *WAN), ["a/b"]),
        (("up", "", *WAN), ["''"]),
        (("up", *WAN, "--loss", "200%"), ["'loss'", "200%"]),
        (("up", *WAN, "--for", "soon"), ["--for", "soon"]),
        (("up", *WAN, "--for", "0s"), ["--for", "no time"]),
        (("up", *WAN, "--vary"), ["no [variation]"]),
        (("up", *WAN, "--peer", "10.0.0.1"), ["--nic"]),
        (("up", *WAN, "--nic", "eth1"), ["1 to 256 peers"]),
        (("up", *WAN, "--nic", "eth1", "--peer", "there"), ["'there'"]),
        (("run",), ["needs a command"]),
        (("run", "--name", "x", *WAN, "--", "true"), ["--name"]),
        (("run", "--", "true"), ["no link is up"]),
        (("verify",), ["no link is up"]),
        (("show", "wan"), ["'wan'", "none"]),
        (("down", "wan"), ["'wan'"]),
        (("profiles", "wan"), ["'wan'", "same_metro"]),
    ],
)
def test_bad_usage_is_named(prfaas: Call, arguments: tuple[str, ...], said: list[str]) -> None:
    refused(prfaas("link", *arguments), 2, *said)


@pytest.mark.parametrize("flows", ["0", "-3", "65", "x"])
def test_a_number_of_flows_that_is_none_is_refused(prfaas: Call, flows: str) -> None:
    result = prfaas("link", "verify", "--flows", flows)
    assert result.returncode == 2
    assert f"'{flows}' is no number between 1 and 64" in result.stderr


@pytest.mark.parametrize(
    ("table", "said"),
    [("dip = 1", "Unknown key 'dip'"), ("[[variation.change]]\nat = '1s'", "changes nothing")],
)
def test_a_variation_is_checked_also_where_it_is_not_followed(
    prfaas: Call, tmp_path: Path, table: str, said: str
) -> None:
    file = tmp_path / "wan.toml"
    file.write_text(f'rate = "100mbit"\nrtt = "1ms"\n[variation]\n{table}\n')
    refused(prfaas("link", "up", "--file", str(file)), 2, said, "[variation]", "wan.toml")


def test_a_damaged_record_is_told_and_stops_no_other_link(prfaas: Call, folder: Path) -> None:
    done(prfaas("link", "up", "good", *WAN, "--backend", "relay"))
    (folder / "odd.json").write_text("{")
    result = prfaas("link", "show")
    assert result.stdout.startswith("good: ")
    assert "odd.json is not the record of a link" in result.stderr
    refused(prfaas("link", "down", "odd"), 3, "down odd --forget")
    taken = prfaas("link", "up", "odd", *WAN, "--backend", "relay")
    assert (taken.returncode, taken.stdout) == (3, "")
    assert done(prfaas("link", "down", "odd", "--forget")) == "removed the record odd\n"
    assert prfaas("link", "down", "good") == Said(0, "removed good\n", "")


@pytest.mark.parametrize(
    "arguments",
    [("show",), ("profiles",), ("run", *WAN, "--backend", "relay", "--", "true"), ("down",)],
    ids=lambda arguments: arguments[0],
)
def test_a_closed_standard_output_is_no_fault(arguments: tuple[str, ...]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "harness", "link", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        preexec_fn=lambda: os.close(1),
    )
    assert (result.returncode, "Traceback" in result.stderr) == (0, False)


def test_profiles_are_listed_with_where_each_value_is_from(prfaas: Call) -> None:
    listed = json.loads(done(prfaas("link", "profiles", "--json")))
    assert tuple(sorted(listed)) == profile_names()
    file = tomllib.loads((ROOT / "netem/profiles/cross_az_capped.toml").read_text())
    assert listed["cross_az_capped"]["values"]["per_flow_cap"] == file["per_flow_cap"]
    text = done(prfaas("link", "profiles", "cross_az_capped"))
    assert f"per_flow_cap = 5gbit (documented: {file['per_flow_cap']['source']})" in text

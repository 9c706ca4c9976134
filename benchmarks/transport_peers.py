"""What the transport is compared with: iperf3, and Mooncake's transfer engine over TCP.

Both run between the same two namespaces as the transport, near sending to far. CPU seconds are the
user and system time of the two processes over all that they carried, a warm-up included, since
they do not tell it for a window.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from resource import struct_rusage
from typing import Any

from benchmarks.transport_links import Wire
from netem.control import helper
from netem.link import LinkError
from netem.site import Site

IPERF3_PORT = 5201
_LISTENS_WITHIN_S, _ENDS_WITHIN_S = 10.0, 20.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class PeerRun:
    """What a peer's tool reached in one run."""

    goodput_bytes_per_s: float
    cpu_s_per_gb: float
    retransmits: int | None


def iperf3_version() -> str:
    """LinkError when there is none."""
    if shutil.which("iperf3") is None:
        raise LinkError("iperf3 is not installed, and the benchmark compares with it; install it")
    told = subprocess.run(["iperf3", "--version"], capture_output=True, text=True, check=True)
    return told.stdout.split("\n")[0]


def run_iperf3(
    wire: Wire, connections: int, window_s: int, omit_s: int, congestion_control: str | None
) -> PeerRun:
    """``iperf3 -P connections``; its goodput is what the server received after ``omit_s``.

    It is the sum of the server's own intervals: the client's summary of what was received may hold
    bytes of the omitted time when the ends are not scheduled alike.
    """
    client_options = ["-P", connections, "-t", window_s, "-O", omit_s, "--connect-timeout", 5000]
    if congestion_control is not None:
        client_options += ["-C", congestion_control]
    host, port = wire.far.address, str(IPERF3_PORT)
    with _process(wire.far, ["iperf3", "-s", "-1", "-J", "-B", host, "-p", port]) as server:
        _await_listening(server, IPERF3_PORT)
        command = ["iperf3", "-c", host, "-p", port, "-J", *map(str, client_options)]
        with _process(wire.near, command) as client:
            sent = _told(client)
            client_usage = _reap(client, _ENDS_WITHIN_S)
        received = _told(server)
        server_usage = _reap(server, _ENDS_WITHIN_S)
    cpu_s = sum(one.ru_utime + one.ru_stime for one in (client_usage, server_usage))
    intervals = [interval["sum"] for interval in received["intervals"]]
    window = [interval for interval in intervals if not interval["omitted"]]
    goodput = sum(one["bytes"] for one in window) / sum(one["seconds"] for one in window)
    carried_bytes = sum(one["bytes"] for one in intervals)
    return PeerRun(
        goodput, cpu_s / (carried_bytes / 1e9), sent["end"]["sum_sent"].get("retransmits")
    )


def mooncake_lack(python: str) -> str | None:
    """Why Mooncake cannot be run by that interpreter; None when it can."""
    try:
        tried = subprocess.run(
            [python, "-c", "import mooncake.engine"], capture_output=True, text=True, timeout=60
        )
    except OSError as error:
        return f"{python} cannot be started: {error.strerror}"
    if tried.returncode == 0:
        return None
    words = tried.stderr.strip().split("\n")[-1]
    return (
        f"{words}; `pip install mooncake-transfer-engine-non-cuda` gives it, to an interpreter "
        "that --mooncake-python names"
    )


def run_mooncake(wire: Wire, python: str, transfer_bytes: int, window_s: float) -> PeerRun:
    """Synchronous writes of ``transfer_bytes`` by four threads into the peer's memory."""
    with _mooncake(wire.far, python, transfer_bytes) as (target, ready):
        peer = {"peer": ready["session"], "address": ready["address"]}
        with _mooncake(wire.near, python, transfer_bytes) as (source, _):
            before = [end.ask({"op": "usage"}) for end in (source, target)]
            done = source.ask({"op": "write", "window_s": window_s, **peer})
            after = [end.ask({"op": "usage"}) for end in (source, target)]
    cpu_s = sum(late["cpu_s"] - early["cpu_s"] for late, early in zip(after, before, strict=True))
    carried_bytes: int = done["bytes"]
    return PeerRun(carried_bytes / done["seconds"], cpu_s / (carried_bytes / 1e9), None)


@contextmanager
def _mooncake(site: Site, python: str, transfer_bytes: int) -> Iterator[Any]:
    """A process with the engine in a site; the interpreter is the one that has the wheel."""

    def popen(argv: list[str], **options: Any) -> "subprocess.Popen[Any]":
        return site.popen([python, *argv[1:]], **options)

    with helper(
        f"Mooncake's transfer engine in site {site.name}",
        ["benchmarks.transport_mooncake"],
        {"host": site.address, "bytes": transfer_bytes},
        popen=popen,
        timeout_s=120.0,
    ) as running:
        yield running


@contextmanager
def _process(site: Site, argv: list[str]) -> "Iterator[subprocess.Popen[str]]":
    """A process in a site, apart from this one's Ctrl-C; killed when the context ends before it."""
    process = site.popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _told(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The JSON that an iperf3 prints before it ends."""
    assert process.stdout is not None
    told: dict[str, Any] = json.loads(process.stdout.read())
    if "error" in told:
        raise LinkError(f"iperf3 failed: {told['error']}")
    return told


def _await_listening(process: "subprocess.Popen[str]", port: int) -> None:
    """Until a socket of the process' network namespace listens (state 0A of proc_net_tcp(5))."""
    deadline_s = time.monotonic() + _LISTENS_WITHIN_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
        except OSError:  # it has just ended
            break
        fields = [line.split() for line in lines]
        if any(one[1].endswith(f":{port:04X}") and one[3] == "0A" for one in fields):
            return
        time.sleep(_POLL_S)
    raise LinkError(f"iperf3 does not listen on port {port}")


def _reap(process: "subprocess.Popen[str]", within_s: float) -> struct_rusage:
    """Wait for the end and take the process' rusage, which ``Popen.wait`` throws away."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return usage
        time.sleep(_POLL_S)
    raise LinkError(f"iperf3 (pid {process.pid}) did not end within {within_s:g} s")

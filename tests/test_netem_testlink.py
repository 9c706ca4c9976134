"""Real links on every backend: what processes in the two sites see, and what is left afterwards.

The netem backend is tested where the kernel has tc-netem; ``python tests/uml.py -- python -m
pytest tests/test_netem_testlink.py -k '[netem]'`` boots one that does and requires it.
"""

import fcntl
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from own_children import own_children

from netem.check import measure_path
from netem.link import LinkError, LinkSpec, symmetric
from netem.link_file import load_profile
from netem.probes import probes
from netem.reaping import reap_stale
from netem.testlink import BackendName, Site, link_failures, open_link
from netem.units import parse_duration_s, parse_rate_bytes_per_s

PEER = str(Path(__file__).with_name("netem_peer.py"))
PATIENCE_S = 60
#: A queue that holds all that a test sends, so that only what the test asks for is lost.
DEEP = 100_000


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``backend`` is each backend there can be here; ``packet_backend`` those with real packets."""
    packets: list[Any] = [pytest.param("forwarder", marks=pytest.mark.netadmin)]
    if netem_is_here():
        packets.append(pytest.param("netem", marks=pytest.mark.netadmin))
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", ["relay", *packets])
    if "packet_backend" in metafunc.fixturenames:
        metafunc.parametrize("packet_backend", packets)


def netem_is_here() -> bool:
    """Whether this kernel shapes with tc-netem; true where it has to, so that a lack fails."""
    if "PRFAAS_REQUIRE_NETEM" in os.environ:
        return True
    try:
        with open_link(spec(), "netem"):
            return True
    except LinkError:
        return False


def spec(rate: str = "200mbit", rtt: str = "10ms", **more: Any) -> LinkSpec:
    return symmetric("test", parse_rate_bytes_per_s(rate), parse_duration_s(rtt), **more)


class Peer:
    """A process of ``netem_peer`` in a site."""

    def __init__(self, site: Site, *arguments: object) -> None:
        self.process = site.popen(
            [sys.executable, PEER, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, f"the peer ended with status {self.process.wait(PATIENCE_S)}"
        message: dict[str, Any] = json.loads(line)
        return message

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def test_the_measured_link_is_the_applied_one(backend: BackendName) -> None:
    with open_link(spec("20mbit"), backend) as link:
        assert link.backend == backend
        assert link.applied.rtt_s == pytest.approx(0.010)
        failures: tuple[str, ...] = ("not measured",)
        for _ in range(3):
            # A busy machine takes from a rate and adds to a round trip, for a while.
            if failures:
                check = measure_path(link.path, bulk_s=0.4)
                failures = link_failures(check, link.applied, rtt_tolerance_s=0.005)
                assert check.rtt_min_s >= 0.0098
        assert failures == ()


def test_a_delay_below_the_floor_runs_at_the_floor_and_says_so(backend: BackendName) -> None:
    with open_link(spec(rtt="0"), backend) as link:
        if backend == "netem":  # The kernel adds no process to the path.
            assert link.applied.rtt_s == 0
        else:
            assert 0 < link.applied.rtt_s <= 0.5e-3
            assert any("floor" in note for note in link.notes)


def test_bytes_arrive_whole_in_both_directions_and_are_counted(backend: BackendName) -> None:
    size = 3_000_000
    with open_link(spec(), backend) as link:
        for server_site, client_site in ((link.far, link.near), (link.near, link.far)):
            before = link.counters()
            with Peer(server_site, "serve", server_site.address) as server:
                host, port = link.expose(server_site, server.says()["port"])
                with Peer(client_site, "send", host, port, size) as client:
                    said = client.says()
            assert said["answer"] == {"bytes": size, "sha256": said["sha256"]}
            # The way out takes size / rate, the way back one more delay.
            assert said["end_s"] - said["start_s"] >= 0.95 * (size / 25e6 + 0.010)
            after = link.counters()
            towards = "near_to_far" if server_site is link.far else "far_to_near"
            back = "far_to_near" if server_site is link.far else "near_to_far"
            carried = getattr(after, towards).bytes - getattr(before, towards).bytes
            assert size <= carried <= 1.3 * size
            assert getattr(after, back).bytes - getattr(before, back).bytes < 0.2 * size
            assert after.mono_ns > before.mono_ns


def test_connections_share_one_rate(backend: BackendName) -> None:
    size, flows = 1_500_000, 4
    with (
        open_link(spec(rtt="2ms"), backend) as link,
        Peer(link.far, "serve", link.far.address) as one,
    ):
        host, port = link.expose(link.far, one.says()["port"])
        clients = [Peer(link.near, "send", host, port, size) for _ in range(flows)]
        said = [client.says() for client in clients]
        for client in clients:
            client.__exit__()
        assert all(answer["answer"]["bytes"] == size for answer in said)
        # Processes of one host share the monotonic clock.
        first_s = min(answer["start_s"] for answer in said)
        assert max(answer["end_s"] for answer in said) - first_s >= 0.9 * flows * size / 25e6


def test_a_site_does_not_reach_itself_across_the_link(packet_backend: BackendName) -> None:
    size = 10_000_000
    with open_link(spec("10mbit", "100ms"), packet_backend) as link:
        with Peer(link.far, "serve", link.far.address) as server:
            port = server.says()["port"]
            with Peer(link.far, "send", link.far.address, port, size) as client:
                assert client.says()["answer"]["bytes"] == size
        counters = link.counters()
        assert counters.near_to_far.bytes + counters.far_to_near.bytes < 10_000


def test_loss_has_its_rate_and_is_counted(packet_backend: BackendName) -> None:
    sent, loss = 20_000, 0.02
    with open_link(spec(loss=loss, limit_packets=DEEP), packet_backend) as link:
        before = link.counters().near_to_far.dropped
        with Peer(link.far, "count", link.far.address) as receiver:
            port = receiver.says()["port"]
            with Peer(link.near, "number", link.far.address, port, sent) as sender:
                assert sender.says() == {"sent": sent}
                received = receiver.says()["received"]
        deviation = (sent * loss * (1 - loss)) ** 0.5
        assert abs((sent - received) - sent * loss) < 5 * deviation
        assert link.counters().near_to_far.dropped - before >= sent - received


def test_jitter_keeps_the_order(packet_backend: BackendName) -> None:
    steady = spec(rtt="20ms", limit_packets=DEEP)
    wanted = spec(rtt="20ms", jitter_s=0.005, limit_packets=DEEP)
    with open_link(wanted, packet_backend) as link:
        with Peer(link.far, "count", link.far.address) as receiver:
            port = receiver.says()["port"]
            with Peer(link.near, "number", link.far.address, port, 2000) as sender:
                sender.says()
                assert receiver.says() == {"received": 2000, "in_order": True}
        with probes(link.path) as ends:
            rtts_s = ends.rtts_s(0.6)
            link.apply(steady)
            steady_s = statistics.median(ends.rtts_s(0.3))
        # Shorter ones too: it is no delay that is added.
        assert min(rtts_s) < steady_s - 0.001
        assert statistics.median(rtts_s) == pytest.approx(steady_s, abs=0.003)


def test_tcp_survives_loss_in_offload_packets(packet_backend: BackendName) -> None:
    size = 4_000_000
    with open_link(spec(rtt="2ms", loss=0.01), packet_backend) as link:
        with Peer(link.far, "serve", link.far.address) as server:
            host, port = link.expose(link.far, server.says()["port"])
            with Peer(link.near, "send", host, port, size) as client:
                said = client.says()
        assert said["answer"] == {"bytes": size, "sha256": said["sha256"]}
        dropped = link.counters().near_to_far.dropped
        packets = size / 1448
        assert 0 < dropped < 3 * packets * 0.01 + 20


def test_a_short_queue_drops_and_the_drops_are_counted(packet_backend: BackendName) -> None:
    with open_link(spec("20mbit", "20ms", limit_packets=20), packet_backend) as link:
        with Peer(link.far, "serve", link.far.address) as server:
            host, port = link.expose(link.far, server.says()["port"])
            with Peer(link.near, "send", host, port, 1_000_000) as client:
                assert client.says()["answer"]["bytes"] == 1_000_000
        assert link.counters().near_to_far.dropped > 0


@pytest.mark.netadmin
def test_auto_takes_the_best_there_is_and_says_why_not_better() -> None:
    with open_link(load_profile("cross_az_capped").scaled(10, 1000)) as link:
        assert link.backend in ("netem", "forwarder")
        if link.backend == "forwarder":
            assert any("netem is not used" in note and "sch_netem" in note for note in link.notes)
        assert link.applied.per_flow_cap_bytes_per_s == 50e6 / 8


def test_an_unknown_backend_names_those_there_are() -> None:
    with (
        pytest.raises(LinkError, match="'carrier_pigeon'; one of netem, forwarder, relay"),
        open_link(spec(), "carrier_pigeon"),  # type: ignore[arg-type]  # wrong on purpose
    ):
        pass


def test_a_dead_helper_is_reported_not_waited_for(backend: BackendName) -> None:
    with open_link(spec(), backend) as link:
        helpers = own_children()
        assert len(helpers) == (0 if backend == "netem" else 1)
        for helper in helpers:
            helper.kill()
            with pytest.raises(LinkError, match=r"ended with status -9"):
                link.counters()


def test_closing_leaves_no_process_and_no_descriptor(backend: BackendName) -> None:
    before = descriptors()
    for _ in range(5):
        with open_link(spec(), backend) as link:
            link.counters()
        assert own_children() == []
    assert descriptors() == before


def descriptors() -> int:
    return psutil.Process().num_fds()


@pytest.mark.netadmin
def test_the_forwarders_devices_have_a_queue_that_does_not_drop() -> None:
    """Also where the kernel takes none of 50,000 packets: Debian's 6.1.192 does not."""

    def queue_packets() -> int:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16si20x", b"link0", 0)
            answer = fcntl.ioctl(any_socket, 0x8942, request)  # SIOCGIFTXQLEN, linux/sockios.h
            return int(struct.unpack_from("i", answer, 16)[0])

    with open_link(spec(), "forwarder") as link:
        for site in (link.near, link.far):
            assert site.namespace is not None
            assert site.namespace.run(queue_packets) >= 10_000


def test_an_idle_helper_sleeps(backend: BackendName) -> None:
    with open_link(spec(), backend) as link:
        link.counters()
        helpers = own_children()
        before = [helper.num_ctx_switches().voluntary for helper in helpers]
        threading.Event().wait(0.5)
        after = [helper.num_ctx_switches().voluntary for helper in helpers]
        assert all(late - early < 10 for early, late in zip(before, after, strict=True))


#: Drops every capability, then runs the rest of the command line.
POWERLESS = """
    import ctypes, os, sys
    PR_CAPBSET_DROP = 24
    for capability in range(64):
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.execv(sys.argv[1], sys.argv[1:])
"""
CHOOSER = """
    from netem.testlink import open_link
    from netem.link import symmetric
    with open_link(symmetric("test", 25e6, 0.01)) as link:
        print(link.backend, *link.notes, sep="\\n")
"""


@pytest.mark.netadmin  # Root, to have capabilities to drop.
def test_without_capabilities_auto_takes_the_relay_and_says_why() -> None:
    command = [sys.executable, "-c", textwrap.dedent(CHOOSER)]
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(POWERLESS), *command],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
        env=importable(),
    ).stdout.splitlines()
    assert said[0] == "relay"
    for backend in ("netem", "forwarder"):
        assert any(f"{backend} is not used" in note and "CAP_SYS_ADMIN" in note for note in said)


def importable() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}


HOLDER = """
    import sys, threading
    from netem.testlink import open_link
    from netem.link import symmetric
    with open_link(symmetric("held", 25e6, 0.01), sys.argv[1]) as link:
        print(link.backend, flush=True)
        threading.Event().wait()
"""


def test_two_harnesses_do_not_touch_each_others_links(backend: BackendName) -> None:
    """Another process opens a link and is killed, its remains are removed: this one goes on."""
    size = 100_000
    with open_link(spec(rtt="2ms"), backend) as link:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(HOLDER), backend],
                stdout=subprocess.PIPE,
                text=True,
                env=importable(),
            ) as other:
                assert other.stdout is not None
                assert other.stdout.readline().strip() == backend
                before = link.counters()
                with Peer(link.far, "serve", link.far.address) as server:
                    host, port = link.expose(link.far, server.says()["port"])
                    with Peer(link.near, "send", host, port, size) as client:
                        assert client.says()["answer"]["bytes"] == size
                assert link.counters().near_to_far.bytes - before.near_to_far.bytes >= size
                other.send_signal(signum)
            reap_stale()
            assert link.counters().near_to_far.bytes >= size


def test_sigkill_leaves_no_process_and_no_interface(backend: BackendName) -> None:
    interfaces = set(os.listdir("/sys/class/net"))
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), backend],
        stdout=subprocess.PIPE,
        text=True,
        env=importable(),
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == backend
        helpers = psutil.Process(holder.pid).children(recursive=True)
        assert len(helpers) == (0 if backend == "netem" else 1)
        holder.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(helpers, timeout=PATIENCE_S)
    assert alive == []
    assert set(os.listdir("/sys/class/net")) == interfaces

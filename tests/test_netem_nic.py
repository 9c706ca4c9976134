"""Shaping an interface of a node: what is shaped, and what is refused.

The nodes are namespaces of the test's own. Delay and loss need tc-netem and are tested where the
kernel has it (``nox -s netem``); the rate and the filters need HTB, u32 and ifb only.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from netem_nodes import (
    ALSO_THERE,
    HERE,
    PATIENCE_S,
    THERE,
    Node,
    down,
    down_all,
    listener,
    refused,
    send,
    shaped,
    snapshot,
    two_nodes,
    until,
    up,
)
from netem_packets import DELAY_TOLERANCE_S, EARLY_S, medians_s
from pyroute2 import IPRoute

from netem.link import LinkError, LinkSpec, symmetric
from netem.nic_plan import NicPlan
from netem.nic_tree import Ifb, build_ifb, network
from netem.rtnetlink import RTM_GETTCLASS, Rtnetlink, attributes, tc_attributes, tc_message
from netem.saved_qdiscs import interface_index
from netem.variation import OUTAGE_LOSS

pytestmark = pytest.mark.netadmin
SHAPED = ("--nic", "v0", "--peer", THERE, "--rate", "100mbit", "--rtt", "0")


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path) as both:
        monkeypatch.setenv("PRFAAS_RUNTIME_DIR", str(both[0].folder))
        yield both
        both[0].run(down_all)


@pytest.mark.quiet
def test_the_rate_to_the_peer_is_the_links_and_the_interface_comes_back(
    nodes: tuple[Node, Node],
) -> None:
    here, there = nodes
    before = here.snapshot()
    assert here.link("up", "wan", *SHAPED).returncode == 0
    assert here.snapshot() != before
    result = here.link(
        "verify", "--json", "--peer-shell", there.shell, "--peer-address", THERE,
        "--peer-python", sys.executable,
    )  # fmt: skip
    assert result.stdout, result.stderr
    answer = json.loads(result.stdout)
    assert result.returncode == bool(answer["failures"])
    for name in ("near_to_far", "far_to_near"):
        # Never above; a busy machine may be slower, though not by as much as what is unshaped.
        share = answer["check"][f"rate_{name}_bytes_per_s"] / (12.5e6 * 1448 / 1500)
        assert 0.7 < share < 1.03
    assert here.link("down", "wan").returncode == 0
    assert here.snapshot() == before


def test_only_the_peers_traffic_is_shaped(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    with ExitStack() as stack:
        link = here.run(lambda: stack.enter_context(shaped()))
        for address, size, least, most in (
            (ALSO_THERE, 3_000_000, 0, 0),
            (THERE, 1_000_000, 1_000_000, 1_200_000),
        ):
            before = link.counters().near_to_far.bytes
            with listener(there, address) as server:
                port = server.getsockname()[1]
                sender = threading.Thread(target=send, args=(here, address, port, size))
                sender.start()
                connection, _ = server.accept()
                with connection:
                    while connection.recv(1 << 18):
                        pass
                sender.join()
            assert least <= link.counters().near_to_far.bytes - before <= most


def test_ipv6_peers_are_shaped_too(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    near, far = "fd00:1::1", "fd00:1::2"

    def give(interface: str, address: str) -> None:
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("0")
        with IPRoute() as route:
            index = route.link_lookup(ifname=interface)[0]
            without_detection = 2  # IFA_F_NODAD: usable at once
            route.addr("add", index=index, address=address, prefixlen=64, flags=without_detection)

    here.run(lambda: give("v0", near))
    there.run(lambda: give("v1", far))
    with ExitStack() as stack:
        link = here.run(lambda: stack.enter_context(shaped(peers=[f"{far}/128", THERE])))
        server = stack.enter_context(listener(there, far, family=socket.AF_INET6))
        sender = threading.Thread(target=send, args=(here, far, server.getsockname()[1], 500_000))
        sender.start()
        with server.accept()[0] as connection:
            while connection.recv(1 << 18):
                pass
        sender.join()
        assert 500_000 <= link.counters().near_to_far.bytes < 600_000
        assert link.counters().far_to_near.bytes > 0


def test_a_node_of_several_has_its_share(nodes: tuple[Node, Node]) -> None:
    def look() -> tuple[float, tuple[str, ...]]:
        with shaped(nodes=4) as link:
            return link.applied.rate_bytes_per_s, link.notes

    rate, notes = nodes[0].run(look)
    assert rate == 12.5e6 / 4
    assert any("1/4" in note for note in notes)


def test_every_queue_has_its_share_and_the_interface_keeps_its_queues(
    nodes: tuple[Node, Node],
) -> None:
    here, _ = nodes
    before = here.snapshot()

    def look() -> list[Any]:
        with shaped(sharing="mq"):
            return snapshot()["qdiscs"]

    qdiscs = here.run(look)
    assert set(before["qdiscs"]) < set(qdiscs)
    kinds = [kind for *_, kind in qdiscs]
    assert kinds.count("htb") == 2 * 4
    assert kinds.count("mq") == 2
    assert here.snapshot() == before


def test_two_links_on_one_interface_do_not_touch_each_other(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes
    before = here.snapshot()
    one = up(here, "one")
    alone = here.snapshot()
    down(here, up(here, "two", peers=[ALSO_THERE]))
    assert here.snapshot() == alone
    three = up(here, "three", peers=[ALSO_THERE])
    down(here, one)
    assert here.snapshot() != before
    down(here, three)
    assert here.snapshot() == before


def test_an_interface_with_a_default_route_is_refused(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes

    def add_route() -> None:
        with IPRoute() as route:
            route.route("add", dst="0.0.0.0/0", gateway=THERE)

    here.run(add_route)
    assert "the default route goes by it" in refused(here)


def test_a_port_of_a_bridge_with_the_default_route_is_refused(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes

    def enslave() -> None:
        with IPRoute() as route:
            port = route.link_lookup(ifname="v0")[0]
            route.link("add", ifname="br0", kind="bridge")
            bridge = route.link_lookup(ifname="br0")[0]
            route.link("set", index=port, master=bridge)
            route.link("set", index=bridge, state="up")
            route.addr("add", index=bridge, address="10.9.0.1", prefixlen=24)
            route.route("add", dst="0.0.0.0/0", gateway="10.9.0.2")

    here.run(enslave)
    assert "br0 runs over it, and the default route" in refused(here)


def test_peers_that_an_ssh_session_comes_from_are_refused(
    nodes: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = nodes
    result = here.link("up", *SHAPED, environment={"SSH_CONNECTION": f"{THERE} 50000 {HERE} 22"})
    assert result.returncode == 3
    assert f"hold {THERE}" in result.stderr
    assert "SSH session of this shell" in result.stderr
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    with (
        listener(here, HERE, 22) as server,
        there.run(lambda: socket.create_connection((HERE, 22), timeout=PATIENCE_S)),
    ):
        connection, _ = server.accept()
        with connection:
            assert f"an SSH session from {THERE} to port 22" in refused(here)
            assert "more narrowly" in refused(here, peers=["10.1.0.2/31"])
            # The other address of that node is no session's.
            here.run(lambda: open_and_close(peers=[ALSO_THERE]))


def open_and_close(**changed: Any) -> None:
    with shaped(**changed):
        pass


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"peers": ["10.1.0.0/24"]}, "10.1.0.1, which is this node's own"),
        ({"peers": ["192.0.2.1"]}, "leaves by no interface"),
        ({"peers": ["224.0.0.1"]}, "no addresses of another node"),
        ({"peers": ["10.1.0.300"]}, "no address or network"),
        ({"interface": "v7"}, "no interface 'v7'; interfaces: lo, v0"),
        ({"interface": "lo"}, "loopback"),
        ({"sharing": "router_node"}, "does not route"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    nodes: tuple[Node, Node], changed: dict[str, Any], said: str
) -> None:
    assert said in refused(nodes[0], **changed)


def class_rates(interface: str) -> list[int]:
    """The rate and the ceiling of every HTB class of an interface."""
    rates = []
    with Rtnetlink() as route:
        index = interface_index(route, interface)
        assert index is not None
        for body in route.dump(RTM_GETTCLASS, tc_message(index)):
            options = attributes(tc_attributes(body)[2])
            for wide, at in ((6, 8), (7, 20)):
                narrow = options[1][at : at + 4]  # of struct tc_htb_opt
                rates.append(int.from_bytes(options.get(wide, narrow), "little"))
    return rates


def test_a_fast_class_is_encoded_and_read_back(nodes: tuple[Node, Node]) -> None:
    """400 Gbit/s is above what 32 bits hold; HTB counts 14 bytes more of every packet."""

    def build() -> list[int]:
        with Rtnetlink() as route:
            ifb = Ifb("fast", "egress", "near_to_far", 1)
            build_ifb(route, ifb, symmetric("fast", 50e9, 0.0), "a test")
        return class_rates("fast")

    assert nodes[0].run(build) == [round(50e9 * 1514 / 1500)] * 2


def test_a_running_link_takes_another_rate_and_no_other_tree(nodes: tuple[Node, Node]) -> None:
    def change() -> None:
        with shaped(nodes=2) as link:
            link.apply(symmetric("held", 50e6, 0.0))
            assert link.applied.rate_bytes_per_s == 25e6
            assert link.applied.mtu_bytes == 1500
            for ifb in link.ifbs:
                assert class_rates(ifb.name) == [round(25e6 * 1514 / 1500)] * 2
            with pytest.raises(LinkError, match="opened with a rate only"):
                link.apply(symmetric("held", 50e6, 1e-3))
            # The first direction takes its rate, the second cannot have its delay: neither has.
            slow, late = symmetric("held", 1e6, 0.0), symmetric("held", 1e6, 1e-3)
            with pytest.raises(LinkError, match="opened with a rate only"):
                link.apply(LinkSpec("held", slow.near_to_far, late.far_to_near))
            assert link.applied.rate_bytes_per_s == 25e6
            for ifb in link.ifbs:
                assert class_rates(ifb.name) == [round(25e6 * 1514 / 1500)] * 2

    nodes[0].run(change)


def test_threads_that_change_a_link_at_once_leave_one_of_their_links(
    nodes: tuple[Node, Node],
) -> None:
    fast, slow = symmetric("held", 50e6, 0.0), symmetric("held", 5e6, 0.0)
    together = threading.Barrier(2)

    def change() -> None:
        def apply(spec: LinkSpec) -> None:
            together.wait()
            link.apply(spec)

        with shaped(fast) as link, ThreadPoolExecutor(2) as pool:
            for _ in range(50):
                list(pool.map(apply, (fast, slow)))
                rate = round(link.applied.rate_bytes_per_s * 1514 / 1500)
                assert [class_rates(ifb.name) for ifb in link.ifbs] == [[rate] * 2] * 2

    nodes[0].run(change)


@pytest.mark.netem
@pytest.mark.parametrize("sharing", ["per_node_share"], ids=["netem"])
def test_delay_and_loss_meet_packets_and_not_offload_packets(
    nodes: tuple[Node, Node], sharing: str
) -> None:
    here, there = nodes
    loss, rtt_s, size = 0.01, 4e-3, 8_000_000
    with ExitStack() as stack:
        spec = symmetric("held", 125e6, rtt_s, loss=loss, limit_packets=100_000)
        link = here.run(lambda: stack.enter_context(shaped(spec, sharing=sharing)))
        with peer(there, "serve", THERE) as server, ExitStack() as clients:
            port = says(server)["port"]
            before = link.counters().near_to_far
            client = clients.enter_context(peer(here, "send", THERE, port, size))
            said = says(client)
            assert said["answer"] == {"bytes": size, "sha256": said["sha256"]}
        after = link.counters().near_to_far
        packets = size / 1448
        lost = after.dropped - before.dropped
        assert abs(lost - packets * loss) < 5 * (packets * loss) ** 0.5
        # An outage, and its end: no packet passes, then all do.
        link.apply(symmetric("held", 125e6, rtt_s, loss=OUTAGE_LOSS))
        before = link.counters().near_to_far
        with here.run(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as datagrams:
            for _ in range(100):
                datagrams.sendto(b"lost", (THERE, 9))
        until(lambda: link.counters().near_to_far.dropped - before.dropped >= 100)
        assert link.counters().near_to_far.packets == before.packets
        specs = [symmetric("held", 125e6, each_s) for each_s in (1e-3, rtt_s)]
        short_s, long_s = medians_s(link, specs, lambda: here.run(lambda: round_trips_s(there)))
        assert long_s >= rtt_s - EARLY_S
        # Whatever a process of this machine takes to answer is in both.
        assert long_s - short_s == pytest.approx(rtt_s - 1e-3, abs=DELAY_TOLERANCE_S)


def round_trips_s(there: Node) -> list[float]:
    """Of a byte over TCP."""
    with ExitStack() as stack:
        server = stack.enter_context(listener(there, THERE))
        address = server.getsockname()
        near = stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
        far = stack.enter_context(server.accept()[0])
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rtts_s = []
        for _ in range(50):
            start_s = time.monotonic()
            near.sendall(b"x")
            far.sendall(far.recv(1))
            near.recv(1)
            rtts_s.append(time.monotonic() - start_s)
    return rtts_s


def peer(node: Node, *arguments: object) -> "subprocess.Popen[str]":
    """A process of ``netem_peer`` on a node; it ends with its standard input."""
    script = str(Path(__file__).with_name("netem_peer.py"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return node.popen(script, *map(str, arguments), **pipes)


def says(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    message: dict[str, Any] = json.loads(process.stdout.readline())
    return message


def test_a_plan_without_peers_is_refused() -> None:
    with pytest.raises(LinkError, match="1 to 256 peers"):
        NicPlan("v0", ())
    with pytest.raises(LinkError, match="routes for all"):
        NicPlan("v0", (network(THERE),), sharing="router_node", nodes=2)

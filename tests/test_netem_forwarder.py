"""The forwarder: any bytes through its loop, and real traffic through its namespaces."""

import hashlib
import io
import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from netem_frames import tcp_frame, udp_frame

from netem.datagrams import receiver, send
from netem.direction_json import settings_to_json
from netem.forwarder import Carrier, forward
from netem.link import Direction, LinkError, LinkSpec, symmetric
from netem.loss import GilbertElliott, IndependentLoss
from netem.probes import probes
from netem.site import Site
from netem.tunnelled import ForwarderPath, open_forwarder
from netem.variation import Change, LinkSchedule, outage
from netem.variation_run import ScheduleRun
from netem.way import Way, WaySettings

PATIENCE_S = 60
DEEP = 200_000


@contextmanager
def devices() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A stand-in for a TUN device: its kernel's side and its user's; one message, one frame."""
    kernel, user = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with kernel, user:
        user.setblocking(False)
        kernel.settimeout(PATIENCE_S)
        yield kernel, user


@given(
    st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=100),
            st.just(tcp_frame(bytes(3000), 1000)),
            st.just(udp_frame(b"x")),
        ),
        max_size=20,
    )
)
@settings(max_examples=50)
def test_no_bytes_stop_the_forwarder(frames: list[bytes]) -> None:
    with devices() as (near_kernel, near), devices() as (far_kernel, far):
        way = Way(WaySettings(Direction(1e12, 0.0, loss=IndependentLoss(0.3)), DEEP), "seed")
        carrier = Carrier(near.fileno(), far.fileno(), way)
        for frame in frames:
            near_kernel.send(frame)
            carrier.take()
        while way.next_event_s() is not None:
            carrier.deliver()
        arrived = 0
        far_kernel.setblocking(False)
        while True:
            try:
                far_kernel.recv(1 << 17)
            except BlockingIOError:
                break
            arrived += 1
        counters = way.counters()
        assert arrived <= counters["packets"]
        assert counters["packets"] + counters["dropped"] == sum(
            3 if frame == tcp_frame(bytes(3000), 1000) else 1 for frame in frames
        )


def test_the_loop_forwards_answers_and_ends_with_its_requests() -> None:
    one = WaySettings(Direction(1e9, 0.001), 1000)
    configuration = {"seed": 1} | dict.fromkeys(
        ("near_to_far", "far_to_near"), settings_to_json(one)
    )
    other = settings_to_json(WaySettings(Direction(1e6, 0.0), 1000))
    change = {"op": "apply", "near_to_far": other, "far_to_near": other}
    output = io.StringIO()
    with devices() as (near_kernel, near), devices() as (far_kernel, far):
        reading, writing = os.pipe()
        arguments = near.fileno(), far.fileno(), configuration, reading
        with redirect_stdout(output):
            loop = threading.Thread(target=forward, args=arguments)
            loop.start()
            near_kernel.send(b"nonsense")
            for kernel, peer in ((near_kernel, far_kernel), (far_kernel, near_kernel)):
                kernel.send(udp_frame(b"hello"))
                assert peer.recv(1 << 17) == udp_frame(b"hello")
            os.write(writing, json.dumps(change).encode() + b'\n{"op": "coun')
            near_kernel.send(udp_frame(b"again"))
            assert far_kernel.recv(1 << 17) == udp_frame(b"again")
            os.write(writing, b'ters"}\n')
            os.close(writing)
            loop.join(PATIENCE_S)
        os.close(reading)
    assert not loop.is_alive()
    applied, counters = map(json.loads, output.getvalue().splitlines())
    assert set(applied) == {"mono_ns"}
    assert counters["near_to_far"]["packets"] == 2
    assert counters["far_to_near"]["packets"] == 1
    assert counters["malformed"] == 1


@contextmanager
def opened(rate: float = 25e6, rtt_s: float = 0.010, **more: Any) -> Iterator[ForwarderPath]:
    with open_forwarder(symmetric("test", rate, rtt_s, **more)) as path:
        yield path


def inside(site: Site, function: Any) -> Any:  # Any: whatever the function gives
    """Call a function in a site's namespace; sockets it makes stay there."""
    assert site.namespace is not None
    return site.namespace.run(function)


def survivors(path: ForwarderPath, count: int, per_s: float = 20_000) -> list[int]:
    """The numbers of the datagrams that cross from near to far, in the order of their arrival."""
    with inside(path.far, lambda: receiver(path.far.address)) as sink:
        before = judged(path)
        inside(path.near, lambda: send(sink.getsockname(), count, per_s))
        deadline_s = time.monotonic() + PATIENCE_S
        while judged(path) < before + count and time.monotonic() < deadline_s:
            pass  # Each look asks the forwarder.
        return [int.from_bytes(datagram[:4]) for datagram in received(sink)]


def judged(path: ForwarderPath) -> int:
    """Packets from near that have arrived or been dropped."""
    counters = path.counters().near_to_far
    return counters.packets + counters.dropped


def received(sink: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            yield sink.recv(64)
        except BlockingIOError:
            return


@pytest.mark.netadmin
def test_bursts_of_loss_on_a_real_path_are_those_of_the_model_and_of_the_seed() -> None:
    loss, count = GilbertElliott(p=0.03, r=0.2), 12_000
    patterns = []
    for seed in (5, 5, 6):
        with opened(loss=loss, limit_packets=DEEP, seed=seed) as path:
            assert path.applied.seed == seed
            patterns.append(survivors(path, count))
    assert patterns[0] == patterns[1]
    assert patterns[0] != patterns[2]
    for arrived in patterns[1:]:
        lost = sorted(set(range(count)) - set(arrived))
        bursts = sum(1 for number in lost if number - 1 not in set(lost))
        assert len(lost) / count == pytest.approx(loss.mean_rate, rel=0.2)
        assert len(lost) / bursts == pytest.approx(loss.mean_burst_packets, rel=0.2)


@pytest.mark.netadmin
def test_without_a_seed_one_is_drawn_and_recorded() -> None:
    with opened() as one, opened() as other:
        assert one.applied.seed is not None
        assert one.applied.seed != other.applied.seed


@pytest.mark.netadmin
def test_tcp_gets_every_byte_through_damage_copies_and_overtaking() -> None:
    payload = random.Random(1).randbytes(2_000_000)
    with opened(125e6, 0.004, corrupt=0.005, duplicate=0.01, reorder=0.01, loss=0.002) as path:
        server = inside(path.far, lambda: socket.create_server((path.far.address, 0)))
        with server:
            address = server.getsockname()
            seen = hashlib.sha256()

            def swallow() -> None:
                connection, _ = server.accept()
                with connection:
                    while data := connection.recv(1 << 16):
                        seen.update(data)

            receiving = threading.Thread(target=swallow)
            receiving.start()
            with inside(path.near, lambda: socket.create_connection(address, PATIENCE_S)) as client:
                client.sendall(payload)
            receiving.join(PATIENCE_S)
        assert seen.digest() == hashlib.sha256(payload).digest()
        assert path.counters().near_to_far.dropped > 0
        assert path.oddities()["malformed"] == 0


@pytest.mark.netadmin
def test_every_connection_meets_its_cap_and_several_have_more() -> None:
    cap = 2.5e6
    with opened(25e6, 0.004, per_flow_cap_bytes_per_s=cap) as path, probes(path) as ends:
        single = ends.rate("near_to_far", 1, 0.5)
        several = ends.rate("near_to_far", 3, 0.5)
        # Far from what they would have without the cap; a busy machine moves both.
        assert 0.5 * cap < single < 1.3 * cap
        assert 1.5 * single < several < 3.9 * cap


@pytest.mark.netadmin
def test_directions_have_rates_and_delays_of_their_own() -> None:
    spec = LinkSpec("odd", Direction(2.5e6, 0.001), Direction(12.5e6, 0.009))
    with open_forwarder(spec) as path, probes(path) as ends:
        assert path.applied.rtt_s == pytest.approx(0.010)
        assert min(ends.rtts_s(0.2)) >= 0.0098
        assert 1.2e6 < ends.rate("near_to_far", 2, 0.5) < 1.3 * 2.5e6
        assert 6e6 < ends.rate("far_to_near", 2, 0.5) < 1.3 * 12.5e6


@pytest.mark.netadmin
def test_a_running_link_follows_its_schedule_through_an_outage() -> None:
    base = symmetric("wan", 25e6, 0.002, seed=3, limit_packets=DEEP)
    schedule = LinkSchedule(
        (
            Change(0.0, rate_bytes_per_s=12.5e6, delay_s=0.010, jitter_s=0.001),
            outage(0.3, 0.8),
        )
    )
    with open_forwarder(base) as path:
        with ScheduleRun(path, base, schedule) as run:
            arrived = survivors(path, 10_000, 10_000)
            assert run.wait(PATIENCE_S)
            assert path.applied.rtt_s == pytest.approx(0.020)
            assert path.applied.loss_rate == 0
        assert [one.change for one in run.log] == [
            "rate 200mbit to 100mbit, delay 1ms to 10ms, jitter 0ns to 1ms",
            "loss 0% to 100%",
            "loss 100% to 0%",
        ]
        # One gap, which is about as long as the outage; a busy machine may shift its ends.
        missing = sorted(set(range(10_000)) - set(arrived))
        assert missing == list(range(missing[0], missing[-1] + 1))
        assert arrived[0] == 0
        assert arrived == sorted(arrived)
        assert path.applied == base
        assert survivors(path, 500) == list(range(500))


@pytest.mark.netadmin
def test_what_cannot_change_on_a_running_link_is_refused() -> None:
    with opened(seed=1) as path:
        with pytest.raises(LinkError, match="the mtu of a running link cannot be changed"):
            path.apply(symmetric("test", 25e6, 0.01, mtu_bytes=9000))
        with pytest.raises(LinkError, match="the seed of a running link cannot be changed"):
            path.apply(symmetric("test", 25e6, 0.01, seed=2))
        path.apply(symmetric("test", 12.5e6, 0.01))
        assert path.applied.rate_bytes_per_s == 12.5e6
        assert path.applied.seed == 1

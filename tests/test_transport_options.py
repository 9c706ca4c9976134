"""The socket options of a KV connection: what was asked for is what the kernel reports."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.core import TransportError
from harness.transport.channel import PlainChannel
from harness.transport.socket_options import (
    SocketOptions,
    available_congestion_controls,
    buffer_shortfalls,
    effective,
    kernel_tcp,
    set_pacing,
    settle_tcp,
    tune_before_connect,
    tune_connected,
)
from netem.namespace import Namespace, namespace

IPV4 = Path("/proc/sys/net/ipv4")
MIB = 2**20


def connected(stack: ExitStack, options: SocketOptions) -> tuple[socket.socket, socket.socket]:
    """A loopback connection tuned at both ends, and what it accepts with."""
    listener = stack.enter_context(socket.socket())
    client = stack.enter_context(socket.socket())
    tune_before_connect(listener, options)
    tune_before_connect(client, options)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    client.connect(listener.getsockname())
    accepted = stack.enter_context(listener.accept()[0])
    for each in (client, accepted):
        tune_connected(each, options)
    return client, accepted


def in_own_namespace(function: Callable[[Namespace], None]) -> None:
    with namespace() as fresh:
        fresh.run(lambda: function(fresh))


def set_most(name: str, most_bytes: int) -> None:
    least, default, _ = (IPV4 / name).read_text().split()
    default = str(min(int(default), most_bytes))
    (IPV4 / name).write_text(f"{least} {default} {most_bytes}")


def test_what_was_asked_for_is_what_the_kernel_reports() -> None:
    options = SocketOptions("reno", 3e6, None, 100_000, 8.0)
    with ExitStack() as stack:
        for each in connected(stack, options):
            found = effective(each)
            assert found["congestion_control"] == "reno"
            assert found["pacing_bytes_per_s"] == 3_000_000
            assert found["notsent_lowat_bytes"] == 100_000
            assert found["user_timeout_s"] == 8.0
            for option, value in (
                (socket.TCP_NODELAY, 1),
                (socket.TCP_KEEPIDLE, 2),
                (socket.TCP_KEEPINTVL, 2),
            ):
                assert each.getsockopt(socket.IPPROTO_TCP, option) == value
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            set_pacing(each, 12.5e9)  # beyond 32 bits
            assert effective(each)["pacing_bytes_per_s"] == 12_500_000_000


def test_what_was_not_asked_for_is_left_to_the_kernel() -> None:
    with ExitStack() as stack:
        untouched = stack.enter_context(socket.socket())
        client, _ = connected(stack, SocketOptions())
        found = effective(client)
        assert found["pacing_bytes_per_s"] is None
        assert found["congestion_control"] == effective(untouched)["congestion_control"]
        assert found["congestion_control"] == kernel_tcp().congestion_control


def test_a_large_batch_passes_the_low_water_mark_in_one_call() -> None:
    """What bounds the unsent bytes says when a connection asks, not how much it then takes."""
    batch, lowat_bytes = memoryview(bytes(4 * MIB)), 16_384
    taken = {}
    for passes in (False, True):
        with ExitStack() as stack:
            options = SocketOptions(notsent_lowat_bytes=lowat_bytes)
            client, _ = connected(stack, options)  # whose peer reads nothing
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 150_000)
            channel = PlainChannel(client, lowat_bytes if passes else None)
            while channel.send([batch[:1024]], 1024) is not None:
                continue  # until the peer's buffer and the mark are full
            taken[passes] = channel.send([batch], len(batch))
            assert channel.send([batch[:1024]], 1024) is None
            assert effective(client)["notsent_lowat_bytes"] == lowat_bytes
    assert taken[False] is None
    assert (taken[True] or 0) > 2 * lowat_bytes


def test_pacing_paces() -> None:
    total, rate = 3_000_000, 6e6
    with ExitStack() as stack:
        client, accepted = connected(stack, SocketOptions(pacing_bytes_per_s=rate))
        start_s = time.monotonic()
        client.setblocking(False)
        sent = received = 0
        payload = bytes(64 * 1024)
        accepted.settimeout(10.0)
        while received < total:
            try:
                sent += client.send(payload)
            except BlockingIOError:
                received += len(accepted.recv(MIB))
        # An initial burst is free; the rest is not.
        assert time.monotonic() - start_s > 0.7 * total / rate


def test_a_congestion_control_that_the_kernel_lacks_is_named_with_what_it_has() -> None:
    with socket.socket() as sock, pytest.raises(TransportError) as caught:
        tune_before_connect(sock, SocketOptions("nosuchcc"))
    message = str(caught.value)
    assert "modprobe tcp_nosuchcc" in message
    assert all(name in message for name in available_congestion_controls())
    assert "reno" in available_congestion_controls()


def test_autotuning_that_reaches_the_window_is_left_alone() -> None:
    most_bytes = min(kernel_tcp().tcp_wmem_max_bytes, kernel_tcp().tcp_rmem_max_bytes)
    with socket.socket() as untouched, socket.socket() as sock:
        assert tune_before_connect(sock, SocketOptions(bdp_bytes=most_bytes // 2)) == ()
        assert effective(sock) == effective(untouched)


@pytest.mark.netadmin
def test_a_buffer_that_autotuning_keeps_below_the_window_is_set_to_it() -> None:
    def check(_: Namespace) -> None:
        for name in ("tcp_wmem", "tcp_rmem"):
            set_most(name, MIB)
        bdp_bytes = 40 * MIB  # beyond net.core.wmem_max of most systems, which root may pass
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket())
            assert tune_before_connect(listener, SocketOptions(bdp_bytes=bdp_bytes)) == ()
            assert effective(listener)["send_buffer_bytes"] == 2 * bdp_bytes
            client, accepted = connected(stack, SocketOptions(bdp_bytes=bdp_bytes))
            for each in (client, accepted):
                assert effective(each)["send_buffer_bytes"] == 2 * bdp_bytes
                assert effective(each)["receive_buffer_bytes"] == 2 * bdp_bytes

    in_own_namespace(check)


UNPRIVILEGED = """
import os, socket, sys
from harness.transport.socket_options import (
    SocketOptions, effective, kernel_tcp, settle_tcp, tune_before_connect)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
before = effective(sock := socket.socket())
notes = tune_before_connect(sock, SocketOptions(bdp_bytes=900 << 20))
assert [("net.core.%s_max" % name) in note for name, note in zip(("wmem", "rmem"), notes)] == \
    [True, True], notes
after = effective(sock)
tcp = kernel_tcp()
for side, most in (("send", tcp.tcp_wmem_max_bytes), ("receive", tcp.tcp_rmem_max_bytes)):
    # Either untouched, or larger than what autotuning reaches: never a loss.
    key = side + "_buffer_bytes"
    assert after[key] == before[key] or after[key] > most, (before, after)
try:
    settle_tcp()
except Exception as error:
    assert type(error).__name__ == "TransportError" and "sysctl -w net.ipv4.tcp_" in str(error)
else:
    raise SystemExit("it was permitted")
"""


@pytest.mark.netadmin
def test_without_the_right_the_buffer_is_never_made_smaller_and_the_lack_is_told() -> None:
    """As nobody, in a namespace where the settings are the kernel's defaults."""
    with namespace() as fresh:
        fresh.run(lambda: [set_most(name, 4 * MIB) for name in ("tcp_wmem", "tcp_rmem")])
        child = fresh.popen([sys.executable, "-c", UNPRIVILEGED], stderr=subprocess.PIPE, text=True)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors


@pytest.mark.netadmin
def test_settling_tcp_reports_both_states_and_stays_in_its_namespace() -> None:
    outside = kernel_tcp()

    def check(_: Namespace) -> None:
        (IPV4 / "tcp_slow_start_after_idle").write_text("1")
        (IPV4 / "tcp_no_metrics_save").write_text("0")
        before, after = settle_tcp()
        assert (before.tcp_slow_start_after_idle, before.tcp_no_metrics_save) == (1, 0)
        assert (after.tcp_slow_start_after_idle, after.tcp_no_metrics_save) == (0, 1)
        assert settle_tcp() == (after, after)

    in_own_namespace(check)
    assert kernel_tcp() == outside


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"pacing_bytes_per_s": 0.0}, "pacing_bytes_per_s"),
        ({"pacing_bytes_per_s": float("nan")}, "pacing_bytes_per_s"),
        ({"bdp_bytes": 2**31}, "bdp_bytes"),
        ({"notsent_lowat_bytes": 0}, "notsent_lowat_bytes"),
        ({"dead_after_s": 0.0}, "dead_after_s"),
        ({"congestion_control": "cubic; rm"}, "congestion_control"),
    ],
)
def test_impossible_options_are_refused_by_name(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(TransportError, match=named):
        SocketOptions(**wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_what_a_connection_would_lack_is_known_before_there_is_one() -> None:
    options = SocketOptions(bdp_bytes=1000 * MIB)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        assert buffer_shortfalls(options) == tune_before_connect(sock, options)
    assert buffer_shortfalls(SocketOptions(bdp_bytes=1)) == ()

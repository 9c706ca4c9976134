"""The socket options of a KV connection, and the kernel settings that colour the next run.

Buffers: TCP grows its own up to ``tcp_wmem[2]`` and ``tcp_rmem[2]``, and that is left alone where
it reaches 2 x BDP: half of a receive buffer becomes window, and a sender keeps what is not yet
acknowledged. Below that the buffers are set to 2 x BDP before ``connect`` or ``listen``, which ends
autotuning for the connection; sizes count what the kernel accounts, overhead included.

Pacing is SO_MAX_PACING_RATE: TCP keeps the rate itself, no queueing discipline is needed. All of
it is Linux (socket(7), tcp(7), Documentation/networking/ip-sysctl.rst); where an option that was
asked for does not exist, a TransportError says so.
"""

import errno
import math
import os
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.core import TransportError

#: include/uapi/asm-generic/socket.h; the socket module names none of them.
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_MAX_PACING_RATE = 32, 33, 47
_UNLIMITED_U64 = 2**64 - 1
_MOST_INT = 2**31 - 1
#: Twice as much still fits the socket option.
MAX_BDP_BYTES = _MOST_INT // 2
_IPV4 = Path("/proc/sys/net/ipv4")
#: A silent peer is asked this often within ``dead_after_s``.
_KEEPALIVE_PROBES = 3
#: What a run sets, so that neither a pause nor an earlier connection decides how fast it sends.
_SETTLED = {"tcp_slow_start_after_idle": 0, "tcp_no_metrics_save": 1}


class SocketLike(Protocol):
    """What is asked of a socket: asyncio's and uvloop's stand-ins both offer it."""

    def getsockopt(self, level: int, option: int, buflen: int, /) -> bytes: ...
    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None: ...


@dataclass(frozen=True, slots=True)
class SocketOptions:
    """Of each connection by itself; None leaves the choice to the kernel.

    ``bdp_bytes`` is the rate one connection shall reach times the round trip.
    ``notsent_lowat_bytes``: a connection asks for more when less than half of it waits unsent in
    the kernel, which keeps the choice of connection late: a slow one is offered less and a short
    transfer does not wait behind a long one. A connection whose peer takes or answers nothing for
    ``dead_after_s`` is given up, a peer that keeps its window shut included.
    """

    congestion_control: str | None = None
    pacing_bytes_per_s: float | None = None
    bdp_bytes: int | None = None
    notsent_lowat_bytes: int = 256 * 1024
    dead_after_s: float = 60.0

    def __post_init__(self) -> None:
        pacing = self.pacing_bytes_per_s
        if self.congestion_control is not None and not self.congestion_control.isidentifier():
            raise TransportError(
                f"congestion_control is {self.congestion_control!r}; give a name, such as 'cubic'"
            )
        if pacing is not None and not (math.isfinite(pacing) and pacing > 0):
            raise TransportError(f"pacing_bytes_per_s is {pacing}; give more than 0")
        if self.bdp_bytes is not None and not 0 < self.bdp_bytes <= MAX_BDP_BYTES:
            raise TransportError(f"bdp_bytes is {self.bdp_bytes}; give 1 to {MAX_BDP_BYTES}")
        if not 0 < self.notsent_lowat_bytes <= _MOST_INT:
            raise TransportError(
                f"notsent_lowat_bytes is {self.notsent_lowat_bytes}; give 1 to {_MOST_INT}"
            )
        if not 0 < self.dead_after_s <= 86_400:
            raise TransportError(f"dead_after_s is {self.dead_after_s}; give above 0, to a day")


@dataclass(frozen=True, slots=True)
class KernelTcp:
    """The settings of TCP in one network namespace that decide how fast a connection sends."""

    tcp_slow_start_after_idle: int
    tcp_no_metrics_save: int
    congestion_control: str
    tcp_wmem_max_bytes: int
    tcp_rmem_max_bytes: int


def available_congestion_controls() -> tuple[str, ...]:
    """What the kernel offers now; it may load more by name."""
    return tuple(_read("tcp_available_congestion_control").split())


def tune_before_connect(sock: socket.socket, options: SocketOptions) -> tuple[str, ...]:
    """Set what must stand before ``connect`` or ``listen``; connections of a listener inherit it.

    Returns what the kernel did not give, in words for the record: a buffer that stays below
    2 x BDP caps the connection's rate. TransportError for a congestion control it lacks.
    """
    if options.congestion_control is not None:
        _set_congestion_control(sock, options.congestion_control)
    if options.bdp_bytes is None or sys.platform != "linux":
        return ()
    wanted_bytes = 2 * options.bdp_bytes
    return tuple(
        shortfall
        for name, option, force in (
            ("wmem", socket.SO_SNDBUF, _SO_SNDBUFFORCE),
            ("rmem", socket.SO_RCVBUF, _SO_RCVBUFFORCE),
        )
        if (shortfall := _size_buffer(sock, name, option, force, wanted_bytes)) is not None
    )


def buffer_shortfalls(options: SocketOptions) -> tuple[str, ...]:
    """What ``tune_before_connect`` would not get for a connection made here and now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return tune_before_connect(probe, options)


def tune_connected(sock: SocketLike, options: SocketOptions) -> None:
    """No Nagle, a small unsent backlog, death of a silent peer noticed, pacing if asked for."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    between_s = max(1, round(options.dead_after_s / (_KEEPALIVE_PROBES + 1)))
    for name, value in (
        ("TCP_NOTSENT_LOWAT", options.notsent_lowat_bytes),
        ("TCP_USER_TIMEOUT", max(1, round(options.dead_after_s * 1e3))),
        ("TCP_KEEPIDLE", between_s),
        ("TCP_KEEPINTVL", between_s),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):  # some systems lack some; none changes what is delivered
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if options.pacing_bytes_per_s is not None:
        set_pacing(sock, options.pacing_bytes_per_s)


def set_pacing(sock: SocketLike, bytes_per_s: float) -> None:
    """Cap the connection's own sending rate, from now on."""
    if sys.platform != "linux":
        raise TransportError(f"pacing needs SO_MAX_PACING_RATE, which {sys.platform} lacks")
    rate = min(max(1, int(bytes_per_s)), _UNLIMITED_U64 - 1)
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("=Q", rate))


def effective(sock: SocketLike) -> dict[str, str | int | float | None]:
    """What the socket really has, for the record; a None is "no limit", or not to be had here."""
    linux = sys.platform == "linux"
    return {
        "congestion_control": _congestion_control(sock) if linux else None,
        "pacing_bytes_per_s": _pacing(sock) if linux else None,
        "send_buffer_bytes": _integer(sock, socket.SOL_SOCKET, socket.SO_SNDBUF),
        "receive_buffer_bytes": _integer(sock, socket.SOL_SOCKET, socket.SO_RCVBUF),
        "notsent_lowat_bytes": _tcp_integer(sock, "TCP_NOTSENT_LOWAT"),
        "user_timeout_s": None
        if (timeout_ms := _tcp_integer(sock, "TCP_USER_TIMEOUT")) is None
        else timeout_ms / 1e3,
    }


def kernel_tcp() -> KernelTcp:
    """The settings in the calling thread's network namespace."""
    return KernelTcp(
        **{name: int(_read(name)) for name in _SETTLED},
        congestion_control=_read("tcp_congestion_control"),
        tcp_wmem_max_bytes=_most_bytes("wmem"),
        tcp_rmem_max_bytes=_most_bytes("rmem"),
    )


def settle_tcp() -> tuple[KernelTcp, KernelTcp]:
    """Keep one run from colouring the next; the settings before and after, for the manifest.

    In the calling thread's network namespace: no slow start after a pause, and no path metrics
    kept from ended connections (those kept so far stay until ``ip tcp_metrics flush all``).
    TransportError where this process may not.
    """
    before = kernel_tcp()
    for name, value in _SETTLED.items():
        if getattr(before, name) == value:
            continue
        try:
            (_IPV4 / name).write_text(str(value))
        except OSError as error:
            raise TransportError(
                f"net.ipv4.{name} is {getattr(before, name)} and cannot be set to {value} "
                f"({error.strerror}), so an earlier connection or a pause would change how fast "
                f"KV is sent; run `sysctl -w net.ipv4.{name}={value}` as root"
            ) from error
    return before, kernel_tcp()


def _set_congestion_control(sock: SocketLike, name: str) -> None:
    if sys.platform != "linux":
        raise TransportError(f"a congestion control can be chosen on Linux, not on {sys.platform}")
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        has = ", ".join(available_congestion_controls())
        if error.errno == errno.EPERM:
            problem = (
                f"may not be used by this user; `sysctl net.ipv4.tcp_allowed_congestion_control` "
                f"lists what may, of {has}"
            )
        else:
            problem = (
                f"is not in this kernel ({os.strerror(error.errno or errno.ENOENT)}); it has "
                f"{has}. `modprobe tcp_{name}` as root loads it where the kernel ships it"
            )
        raise TransportError(f"congestion control {name} {problem}") from error


def _size_buffer(
    sock: SocketLike, name: str, option: int, force: int, wanted_bytes: int
) -> str | None:
    """Make one buffer ``wanted_bytes`` where autotuning would stop below; what is lacking."""
    most_bytes = _most_bytes(name)
    if most_bytes >= wanted_bytes:
        return None
    # What the kernel would give is asked of another socket: a size once set stays, and may be less
    # than what autotuning reaches.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        granted_by, granted_bytes = _granted(probe, option, force, wanted_bytes)
    if granted_bytes > most_bytes:
        sock.setsockopt(socket.SOL_SOCKET, granted_by, wanted_bytes // 2)  # the kernel doubles it
    if granted_bytes >= wanted_bytes:
        return None
    return (
        f"a {'send' if name == 'wmem' else 'receive'} buffer of "
        f"{max(granted_bytes, most_bytes)} bytes where 2 x BDP is {wanted_bytes}: raise "
        f"net.core.{name}_max to {wanted_bytes // 2} or net.ipv4.tcp_{name}[2] to {wanted_bytes}"
    )


def _granted(probe: SocketLike, option: int, force: int, wanted_bytes: int) -> tuple[int, int]:
    """The option that gets most, and how much it gets."""
    for each in (force, option):
        try:
            probe.setsockopt(socket.SOL_SOCKET, each, wanted_bytes // 2)
        except PermissionError:  # beyond net.core.*mem_max takes CAP_NET_ADMIN
            continue
        break
    return each, _integer(probe, socket.SOL_SOCKET, option)


def _congestion_control(sock: SocketLike) -> str:
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)  # TCP_CA_NAME_MAX
    return name.partition(b"\0")[0].decode()


def _pacing(sock: SocketLike) -> int | None:
    raw = sock.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 8)
    (rate,) = struct.unpack("=Q", raw)
    return None if rate == _UNLIMITED_U64 else int(rate)


def _integer(sock: SocketLike, level: int, option: int) -> int:
    (value,) = struct.unpack("=i", sock.getsockopt(level, option, 4))
    return int(value)


def _tcp_integer(sock: SocketLike, name: str) -> int | None:
    if not hasattr(socket, name):
        return None
    return _integer(sock, socket.IPPROTO_TCP, getattr(socket, name))


def _most_bytes(name: str) -> int:
    """Up to where autotuning grows a buffer: ``wmem`` or ``rmem``."""
    return int(_read(f"tcp_{name}").split()[2])


def _read(name: str) -> str:
    try:
        return (_IPV4 / name).read_text().strip()
    except OSError as error:
        raise TransportError(
            f"net.ipv4.{name} cannot be read ({error.strerror}): the settings of TCP are read "
            "from /proc/sys, which Linux has"
        ) from error

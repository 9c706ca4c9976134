"""Ports of the servers, which have to be known before a server is launched and taken long after.

A server loads its weights for minutes before it listens. A port that the kernel gave out and took
back could be a connection's by then, so ports are taken from below those that the kernel gives.
"""

import contextlib
import errno
import random
import socket
from collections.abc import Sequence
from pathlib import Path

from harness.core import EngineError
from harness.engine.sglang.config import ServerConfig

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 20_000
TRIES = 200


def choose_ports(address: str, servers: Sequence[ServerConfig], seed: int) -> None:
    """Give every server its port, and a prefill server one for its bootstrap server, in place.

    EngineError of phase port where one that was asked for is taken, or none is left.
    """
    draw = random.Random(seed)
    taken = {port for one in servers for port in (one.port, one.bootstrap_port) if port}
    for one in servers:
        if one.port:
            _check_free(address, one.port, one.name)
        else:
            one.port = _free_port(address, draw, taken)
        if one.role != "prefill":
            continue
        if one.bootstrap_port:
            _check_free(address, one.bootstrap_port, one.name)
        else:
            one.bootstrap_port = _free_port(address, draw, taken)


def _free_port(address: str, draw: random.Random, taken: set[int]) -> int:
    highest = LOWEST + 10_000
    with contextlib.suppress(OSError, ValueError, IndexError):
        highest = int(_RANGE.read_text().split()[0])
    lowest = min(LOWEST, max(1024, highest // 2))
    for _ in range(TRIES):
        port = draw.randrange(lowest, max(highest, lowest + 1))
        if port not in taken and _fault(address, port) is None:
            taken.add(port)
            return port
    raise EngineError(
        f"SGLang cannot run in phase port: of {TRIES} ports from {lowest} to {highest} on "
        f"{address} none is free; end what holds them"
    )


def _check_free(address: str, port: int, name: str) -> None:
    if fault := _fault(address, port):
        raise EngineError(
            f"SGLang server {name} failed in phase port: {address}:{port} {fault}; free it, or "
            "let the testbed choose a port"
        )


def _fault(address: str, port: int) -> str | None:
    """Why a server could not listen there."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            return "is taken by another process" if taken else f"cannot be had: {error.strerror}"
    return None

"""Measures a path with real TCP connections, from processes inside the two sites.

    python -m netem.probe serve      < {"host": ...}
    python -m netem.probe measure    < {"host", "port", "flows", "warm_up_s", "bulk_s"}

Both are helpers (see ``netem.control``). The server's ready line has its port. A connection opens
with a mode byte and the two durations: ``e`` echoes; ``s`` swallows, and at the peer's end answers
with the bytes it counted; ``b`` sends for as long as the peer reads. Whoever receives counts the
payload that arrives in the window of ``bulk_s`` after ``warm_up_s``; the rate of all flows is the
sum over ``bulk_s``. The first echoes are discarded. What the network does to a measurement is
answered as ``{"error": ...}``, which says what was being measured.
"""

import json
import os
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

_BUFFER_BYTES = 1 << 18
_PING_BYTES = 64
_WARM_UP_PINGS, _MAX_PINGS, _PINGS_S = 5, 200, 0.6
_TIMEOUT_S = 10.0
_OPENING = struct.Struct("!cdd")
_COUNT = struct.Struct("!Q")


def serve(configuration: dict[str, Any]) -> None:
    """Answer probe connections until standard input ends."""
    with socket.create_server((configuration["host"], 0), backlog=64) as listener:
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        _say({"event": "ready", "port": listener.getsockname()[1]})
        while sys.stdin.readline():
            _say({"error": "the probe server takes no requests"})


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection:
        connection.settimeout(_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mode, warm_up_s, bulk_s = _OPENING.unpack(_exactly(connection, _OPENING.size))
        if mode == b"e":
            while data := connection.recv(_PING_BYTES):
                connection.sendall(data)
        elif mode == b"s":
            count = _count_arrivals(connection, warm_up_s, bulk_s)
            for _ in _chunks(connection):
                pass  # What the sender had in flight at the end of the window.
            connection.sendall(_COUNT.pack(count))
        else:
            _send_until(connection, time.monotonic() + _TIMEOUT_S)


def measure(configuration: dict[str, Any]) -> None:
    """Measure once for every request line."""
    _say({"event": "ready"})
    while sys.stdin.readline():
        try:
            _say(_measurement(configuration))
        except _MeasurementError as error:
            _say({"error": str(error)})


class _MeasurementError(Exception):
    """The path failed under a measurement."""


def _measurement(configuration: dict[str, Any]) -> dict[str, float]:
    flows = configuration["flows"]
    with _measuring("round trips over a connection to the other site", configuration):
        rtts_s = _echo(configuration)
    with _measuring(f"the rate of {flows} connections from the other site", configuration):
        received_bytes_per_s = _bulk(configuration, b"b")
    with _measuring(f"the rate of {flows} connections to the other site", configuration):
        sent_bytes_per_s = _bulk(configuration, b"s")
    return {
        "rtt_min_s": min(rtts_s),
        "rtt_p50_s": statistics.median(rtts_s),
        "rtt_samples": len(rtts_s),
        "received_bytes_per_s": received_bytes_per_s,
        "sent_bytes_per_s": sent_bytes_per_s,
    }


@contextmanager
def _measuring(what: str, configuration: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # TimeoutError is one
        raise _MeasurementError(
            f"measuring {what} at {configuration['host']}:{configuration['port']} failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _echo(configuration: dict[str, Any]) -> list[float]:
    """Round trips of small messages over one connection, in seconds."""
    rtts_s: list[float] = []
    with _open(configuration, b"e") as connection:
        for _ in range(_WARM_UP_PINGS):
            _ping(connection)
        end_s = time.monotonic() + _PINGS_S
        while len(rtts_s) < _MAX_PINGS and (time.monotonic() < end_s or len(rtts_s) < 3):
            rtts_s.append(_ping(connection))
    return rtts_s


def _ping(connection: socket.socket) -> float:
    start_s = time.monotonic()
    connection.sendall(bytes(_PING_BYTES))
    _exactly(connection, _PING_BYTES)
    return time.monotonic() - start_s


def _bulk(configuration: dict[str, Any], mode: bytes) -> float:
    """Payload rate over all flows: ``b`` from the server to here, ``s`` from here to it."""
    flows = configuration["flows"]
    flow = _receive if mode == b"b" else _send
    with ThreadPoolExecutor(flows) as pool:
        counts = pool.map(lambda _: flow(configuration), range(flows))
    return sum(counts) / float(configuration["bulk_s"])


def _receive(configuration: dict[str, Any]) -> int:
    with _open(configuration, b"b") as connection:
        return _count_arrivals(connection, configuration["warm_up_s"], configuration["bulk_s"])


def _send(configuration: dict[str, Any]) -> int:
    with _open(configuration, b"s") as connection:
        # The receiver's window began later than ours by one way, and it must be full to its end.
        spare_s = configuration["warm_up_s"]
        window_s = configuration["warm_up_s"] + configuration["bulk_s"]
        _send_until(connection, time.monotonic() + window_s + spare_s)
        connection.shutdown(socket.SHUT_WR)
        count: int = _COUNT.unpack(_exactly(connection, _COUNT.size))[0]
        return count


def _open(configuration: dict[str, Any], mode: bytes) -> socket.socket:
    connection = socket.create_connection(
        (configuration["host"], configuration["port"]), timeout=_TIMEOUT_S
    )
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_OPENING.pack(mode, configuration["warm_up_s"], configuration["bulk_s"]))
    return connection


def _count_arrivals(connection: socket.socket, warm_up_s: float, bulk_s: float) -> int:
    count, start_s = 0, time.monotonic() + warm_up_s
    for size in _chunks(connection):
        now_s = time.monotonic()
        if now_s >= start_s + bulk_s:
            break
        if now_s >= start_s:
            count += size
    return count


def _chunks(connection: socket.socket) -> Iterator[int]:
    """Sizes of what arrives, until the peer's end."""
    buffer = bytearray(_BUFFER_BYTES)
    while size := connection.recv_into(buffer):
        yield size


def _send_until(connection: socket.socket, end_s: float) -> None:
    buffer = bytes(_BUFFER_BYTES)
    try:
        while time.monotonic() < end_s:
            connection.sendall(buffer)
    except (BrokenPipeError, ConnectionResetError):
        return  # The peer has what it wanted and closed: the end of mode "b".


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            raise ConnectionError("the probe's peer closed the connection early")
        data += received
    return data


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    configuration = json.loads(sys.stdin.readline())
    {"serve": serve, "measure": measure}[sys.argv[1]](configuration)


if __name__ == "__main__":
    main()
    # Threads that still hold a connection end here, with the process.
    os._exit(0)

"""Measures a path with real traffic: a helper in each site (see ``netem.control``).

    python -m netem.probe < {"host": the site's address} + requests

The ready line has the ports at which it answers connections (``port``) and returns datagrams
(``echo_port``). Requests; "peer" is the host and the port to go to:

    {"op": "rtt", "peer", "over": "datagrams" | "connection", "every_s", "span_s"}
    {"op": "rate", "peer", "flows", "warm_up_s", "bulk_s"}    TCP payload a second, from there
    {"op": "listen"}                                   -> {"port"}, for numbered datagrams
    {"op": "send", "peer", "count", "per_s"}           numbered datagrams
    {"op": "tally", "count"}                           what came since "listen"

A connection opens with a mode byte: ``e`` returns what it is sent, ``b`` sends for as long as the
peer reads. The receiver counts the payload that arrives in the window of ``bulk_s`` after
``warm_up_s`` and tells it over its standard output, not over the link; the rate is the sum of all
flows over ``bulk_s``. What the network does to a measurement is answered as ``{"error": ...}``,
which says what was being measured.
"""

import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from typing import Any

from netem import datagrams

_BUFFER_BYTES = 1 << 18
_PING = struct.Struct("!Q56x")
_WARM_UP_PINGS, _MIN_PINGS = 5, 3
#: Half of TCP's initial congestion window.
_MAX_FLYING = 5
_TIMEOUT_S = 10.0


class _MeasurementError(Exception):
    """The path failed under a measurement."""


class Probe:
    """One site's end of every measurement."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._sink: socket.socket | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request; _MeasurementError says what failed under which measurement."""
        match request:
            case {"op": "rtt", "peer": peer, "over": over, "every_s": every_s, "span_s": span_s}:
                measure = datagrams.round_trips_s if over == "datagrams" else _echoes_s
                with _measuring(f"round trips over a {over.removesuffix('s')}", peer):
                    return {"rtts_s": measure(tuple(peer), every_s, span_s)}
            case {"op": "rate", "peer": peer, "flows": flows}:
                with _measuring(f"the rate of {flows} connections", peer):
                    return {"bytes_per_s": _bulk(request)}
            case {"op": "send", "peer": peer, "count": count, "per_s": per_s}:
                with _measuring("the loss of datagrams", peer):
                    datagrams.send(tuple(peer), count, per_s)
                return {}
            case {"op": "listen"}:
                self.close()
                self._sink = datagrams.receiver(self._host)
                return {"port": self._sink.getsockname()[1]}
            case {"op": "tally", "count": count}:
                assert self._sink is not None, "listen first"
                return asdict(datagrams.tally(self._sink, count))
        raise ValueError(f"unknown request {request!r}")

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()


def serve(host: str) -> None:
    """Answer connections, datagrams and requests until standard input ends."""
    with ExitStack() as stack:
        family = datagrams.family(host)
        listener = stack.enter_context(socket.create_server((host, 0), family=family, backlog=64))
        echoer = stack.enter_context(datagrams.receiver(host))
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        threading.Thread(target=datagrams.echo, args=(echoer,), daemon=True).start()
        ports = {"port": listener.getsockname()[1], "echo_port": echoer.getsockname()[1]}
        _say({"event": "ready", **ports})
        probe = Probe(host)
        stack.callback(probe.close)
        while line := sys.stdin.readline():
            try:
                _say(probe.answer(json.loads(line)))
            except _MeasurementError as error:
                _say({"error": str(error)})
        # Threads that still hold a connection end here, with the process.
        os._exit(0)


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    # A peer that has what it wanted closes with data under way: the end of every mode.
    with connection, suppress(ConnectionError):
        connection.settimeout(_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _some(connection, 1) == b"e":
            while data := connection.recv(_PING.size):
                connection.sendall(data)
            return
        buffer = bytes(_BUFFER_BYTES)
        while True:
            connection.sendall(buffer)


@contextmanager
def _measuring(what: str, peer: list[Any]) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # TimeoutError is one
        raise _MeasurementError(
            f"measuring {what} at {peer[0]}:{peer[1]} failed: {type(error).__name__}: {error}"
        ) from error


def _echoes_s(peer: tuple[str, int], every_s: float, span_s: float) -> list[float]:
    """Round trips of small messages over one connection, in seconds; the first few are not told.

    One leaves every ``every_s``, for ``span_s`` or until three are back, but never are more on
    their way than TCP lets go at once.
    """
    rtts_s: list[float] = []
    sent_s: list[float] = []
    pending = b""
    with _open(peer, b"e") as connection:
        start_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            if now_s > start_s + span_s and len(rtts_s) >= _WARM_UP_PINGS + _MIN_PINGS:
                return rtts_s[_WARM_UP_PINGS:]
            due_s = start_s + len(sent_s) * every_s
            may_send = len(sent_s) - len(rtts_s) < _MAX_FLYING
            wait_s = max(0.0, due_s - now_s) if may_send else _TIMEOUT_S
            if select.select([connection], [], [], wait_s)[0]:
                pending += _some(connection, _BUFFER_BYTES)
                back_s = time.monotonic()
                while len(pending) >= _PING.size:
                    rtts_s.append(back_s - sent_s[_PING.unpack_from(pending)[0]])
                    pending = pending[_PING.size :]
            elif may_send:
                sent_s.append(time.monotonic())
                connection.sendall(_PING.pack(len(sent_s) - 1))
            else:
                raise TimeoutError("no echo came back")


def _bulk(request: dict[str, Any]) -> float:
    """Payload rate over all flows."""
    flows = request["flows"]
    with ThreadPoolExecutor(flows) as pool:
        counts = pool.map(lambda _: _receive(request), range(flows))
    return sum(counts) / float(request["bulk_s"])


def _receive(request: dict[str, Any]) -> int:
    """Payload of one connection in the window."""
    buffer = bytearray(_BUFFER_BYTES)
    count = 0
    with _open(request["peer"], b"b") as connection:
        start_s = time.monotonic() + request["warm_up_s"]
        end_s = start_s + request["bulk_s"]
        while (left_s := end_s - time.monotonic()) > 0:
            if select.select([connection], [], [], left_s)[0]:
                size = connection.recv_into(buffer)
                if not size:
                    raise ConnectionError("the probe's peer closed the connection early")
                count += size if time.monotonic() >= start_s else 0
    return count


def _open(peer: Any, mode: bytes) -> socket.socket:
    connection = socket.create_connection((peer[0], peer[1]), timeout=_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(mode)
    return connection


def _some(connection: socket.socket, most: int) -> bytes:
    received = connection.recv(most)
    if not received:
        raise ConnectionError("the probe's peer closed the connection early")
    return received


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    serve(json.loads(sys.stdin.readline())["host"])


if __name__ == "__main__":
    main()

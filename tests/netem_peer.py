"""Processes that talk across a link in the tests; each says what it saw as one JSON line.

serve HOST               TCP: answers each connection's bytes, at their end, with size and hash
send HOST PORT BYTES     TCP: sends, ends its half, reads the answer
count HOST               UDP: counts numbered datagrams until one says -1
number HOST PORT COUNT   UDP: sends numbered datagrams, then -1
hold HOST PORT           TCP: connects and keeps the connection until its standard input ends
"""

import hashlib
import json
import random
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

#: As SO_RCVBUF, beyond the system's limit (linux/asm/socket.h); needs CAP_NET_ADMIN.
_SO_RCVBUFFORCE = 33
_NUMBER = struct.Struct("!i")
#: Enough ends that one survives any loss the tests ask for.
_ENDS = 50


def serve(host: str) -> None:
    with socket.create_server((host, 0)) as listener:
        say({"port": listener.getsockname()[1]})
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        sys.stdin.read()


def accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=digest, args=(connection,), daemon=True).start()


def digest(connection: socket.socket) -> None:
    size, seen = 0, hashlib.sha256()
    with connection:
        while data := connection.recv(1 << 18):
            size += len(data)
            seen.update(data)
        connection.sendall(json.dumps({"bytes": size, "sha256": seen.hexdigest()}).encode())


def send(host: str, port: str, size: str) -> None:
    payload = random.Random(size).randbytes(int(size))
    start_s = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(payload)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while data := connection.recv(4096):
            answer += data
    say(
        {
            "answer": json.loads(answer),
            "sha256": hashlib.sha256(payload).hexdigest(),
            "start_s": start_s,
            "end_s": time.monotonic(),
        }
    )


def count(host: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 27)
        receiver.bind((host, 0))
        say({"port": receiver.getsockname()[1]})
        numbers = []
        while (number := _NUMBER.unpack(receiver.recv(64))[0]) >= 0:
            numbers.append(number)
    say({"received": len(numbers), "in_order": numbers == sorted(numbers)})


def number(host: str, port: str, total: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.connect((host, int(port)))
        start_s = time.monotonic()
        for index in range(int(total)):
            sender.send(_NUMBER.pack(index))
            # A pace of 20,000 a second, so that no socket buffer is the one that loses.
            while time.monotonic() < start_s + index / 20_000:
                time.sleep(0)
        with suppress(ConnectionRefusedError):  # The first end to arrive ends the receiver.
            for _ in range(_ENDS):
                sender.send(_NUMBER.pack(-1))
    say({"sent": int(total)})


def hold(host: str, port: str) -> None:
    with socket.create_connection((host, int(port)), timeout=60):
        say({"connected": True})
        sys.stdin.read()


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    roles = {"serve": serve, "send": send, "count": count, "number": number, "hold": hold}
    roles[sys.argv[1]](*sys.argv[2:])

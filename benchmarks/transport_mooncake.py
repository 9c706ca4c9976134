"""One end with Mooncake's transfer engine over TCP; a helper as ``benchmarks.transport_end``.

    {"op": "usage"}                                     -> {"cpu_s"}
    {"op": "write", "peer", "address", "window_s"}      -> {"bytes", "seconds"}

Its interpreter is the one that has the wheel, so it imports nothing of this project. Each writing
thread writes a part of the registered memory as one synchronous transfer, again and again; the
engine cuts it into slices and opens its own connections.
"""

import ctypes
import json
import resource
import sys
import threading
import time
from typing import Any

from mooncake.engine import TransferEngine  # type: ignore[import-not-found]  # not of this project

_THREADS = 4


def main() -> None:
    given = json.loads(sys.stdin.readline())
    size: int = given["bytes"]
    memory = (ctypes.c_char * size)()
    ctypes.memset(memory, 7, size)
    address = ctypes.addressof(memory)
    engine = TransferEngine()
    for name, status in (
        ("initialize", engine.initialize(given["host"], "P2PHANDSHAKE", "tcp", "")),
        ("register_memory", engine.register_memory(address, size)),
    ):
        if status != 0:
            raise SystemExit(f"Mooncake's {name} failed with status {status}")
    session = f"{given['host']}:{engine.get_rpc_port()}"
    say(event="ready", session=session, address=address)
    while line := sys.stdin.readline():
        order = json.loads(line)
        if order["op"] == "usage":
            usage = resource.getrusage(resource.RUSAGE_SELF)
            say(cpu_s=usage.ru_utime + usage.ru_stime)
        else:
            say(**write(engine, address, size, order))


def write(engine: Any, address: int, size: int, order: dict[str, Any]) -> dict[str, Any]:
    part = size // _THREADS
    written = [0] * _THREADS
    failures: list[int] = []
    start_s = time.monotonic()

    def repeat(number: int) -> None:
        offset = number * part
        while time.monotonic() - start_s < order["window_s"] and not failures:
            status = engine.transfer_sync_write(
                order["peer"], address + offset, order["address"] + offset, part
            )
            if status != 0:
                failures.append(status)
                return
            written[number] += part

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - start_s
    if failures:
        return {"error": f"a transfer failed with status {failures[0]}"}
    return {"bytes": sum(written), "seconds": seconds}


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()

"""A link that a keeper process keeps up, from outside: ordered, asked.

The keeper is ``netem.keeper``, which has the protocol. Here is what a command needs of it.
"""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from netem.link import LinkError
from netem.state import FOLDER_VARIABLE, Entry, ProcessId, check_name, runtime_folder
from netem.variation import LinkSchedule
from netem.variation_file import read_schedule, schedule_of

#: A verification takes its time, and waits for one under way; all else is told at once.
_START_TIMEOUT_S, _VERIFY_TIMEOUT_S, _ASK_TIMEOUT_S = 60.0, 120.0, 15.0
_MAX_DESCRIPTORS = 2
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class KeeperOrder:
    """What to keep up: a link's document (see ``netem.link_file``) and where.

    ``nic`` holds the fields of a ``NicPlan``, its peers as text; None is a link between sites.
    ``variation``: see ``schedule_from``; what repeats in it does so for ``duration_s`` or a day.
    """

    name: str
    document: Mapping[str, Any]
    backend: str = "auto"
    nic: Mapping[str, Any] | None = None
    duration_s: float | None = None
    variation: Mapping[str, Any] | None = None


def schedule_from(variation: Mapping[str, Any], duration_s: float | None) -> LinkSchedule:
    """The schedule in a "file", or of a "table" whose files are found from "folder"."""
    span_s = _DAY_S if duration_s is None else duration_s
    if "file" in variation:
        return read_schedule(Path(variation["file"]), span_s)
    return schedule_of(
        variation["table"], "the [variation] of the link", span_s, Path(variation["folder"])
    )


def start_keeper(order: KeeperOrder) -> Entry:
    """Run a keeper until its link is up; LinkError with its reason when it does not come up."""
    folder = runtime_folder()
    check_name(order.name)
    with (folder / f"{order.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "netem.keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd="/",
            env=os.environ
            | {
                "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
                FOLDER_VARIABLE: str(folder),
            },
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        process.stdin.close()
        answer = _first_line(process, folder / f"{order.name}.log")
    if "error" in answer:
        process.wait()
        raise LinkError(answer["error"])
    return Entry(**answer["entry"] | {"owner": ProcessId(**answer["entry"]["owner"])})


def ask(entry: Entry, request: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Ask the keeper of a link; its answer and the descriptors that came with it."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            verifies = request["op"] == "verify"
            connection.settimeout(_VERIFY_TIMEOUT_S if verifies else _ASK_TIMEOUT_S)
            with short_path(entry.socket_path) as path:
                connection.connect(path)
            connection.sendall(json.dumps(request).encode() + b"\n")
            data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, _MAX_DESCRIPTORS)
            while data and not data.endswith(b"\n"):
                received = connection.recv(1 << 16)
                data = data + received if received else b""
    except OSError as error:
        raise LinkError(
            f"the process {entry.owner.pid} that keeps the link {entry.name!r} does not answer: "
            f"{error}; `prfaas link down {entry.name}` removes what is left of it"
        ) from error
    answer: dict[str, Any] = json.loads(data) if data else {"error": "it gave no answer"}
    if "error" in answer:
        raise LinkError(f"the keeper of the link {entry.name!r}: {answer['error']}")
    return answer, list(descriptors)


def _first_line(process: "subprocess.Popen[bytes]", log: Path) -> dict[str, Any]:
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    line = process.stdout.readline() if poll.poll(_START_TIMEOUT_S * 1e3) else b""
    if not line:
        process.kill()
        fault = "the process that was to keep the link up died or hung while starting"
        return {"error": f"{fault}; what it said is in {log}"}
    answer: dict[str, Any] = json.loads(line)
    return answer


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """A name of a socket that fits into the 108 bytes a Unix address has."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)

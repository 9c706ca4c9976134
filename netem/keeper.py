"""The process that keeps a link up after the command that made it has ended.

    python -m netem.keeper < one JSON line, see ``netem.kept.KeeperOrder``

It claims the name (``netem.state``), opens the link, says so in one JSON line on standard output,
and then answers on a Unix socket until SIGTERM or the end of its time. Whatever ends it, the kernel
takes the namespaces back with it, helpers leave by their lifelines, and a dead-man gives a node's
interface back.

Requests are JSON lines, one a connection: ``counters``, ``verify``, ``expose``, and ``enter``,
whose answer carries the descriptors of the site's namespaces (SCM_RIGHTS).
"""

import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from netem.kept import KeeperOrder, schedule_from, short_path
from netem.link import LinkError, LinkSpec
from netem.link_file import read_link
from netem.namespace import capabilities_lacking, enter_user_namespace
from netem.nic import NicLink, open_nic
from netem.nic_plan import NicPlan
from netem.remote import measured
from netem.state import (
    MARK_VARIABLE,
    Entry,
    entries,
    held,
    write,
)
from netem.testlink import TestLink, open_link
from netem.variation_run import ScheduleRun

_ASK_TIMEOUT_S = 120.0
_LOOK_S, _LONG_S = 1.0, 3600.0
_SHOWN_CHANGES = 1000
_MAX_LINE_BYTES = 1 << 20


@dataclass(slots=True)
class Keeper:
    """An open link and how it answers."""

    entry: Entry
    link: TestLink | NicLink
    rootless: bool
    schedule: ScheduleRun | None = None
    _verifying: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        match request:
            case {"op": "counters"}:
                changes = () if self.schedule is None else self.schedule.log
                if self.schedule is not None and self.schedule.error is not None:
                    raise LinkError(f"its schedule ended early: {self.schedule.error}")
                told = {"schedule": [asdict(change) for change in changes[-_SHOWN_CHANGES:]]}
                return asdict(self.link.counters()) | told, []
            case {"op": "verify", "flows": int(flows)}:
                link = self._sites()
                # One at a time: two would measure each other.
                with self._verifying:
                    return measured(link.path, flows), []
            case {"op": "enter", "site": "near" | "far" as name}:
                return self._enter(name)
            case {"op": "expose", "site": "near" | "far" as name, "port": int(port)}:
                sites = self._sites()
                host, port = sites.expose(getattr(sites, name), port)
                return {"host": host, "port": port}, []
        return {"error": f"unknown request {request!r}"}, []

    def _enter(self, name: str) -> tuple[dict[str, Any], list[int]]:
        link = self._sites()
        site, other = (link.near, link.far) if name == "near" else (link.far, link.near)
        environment = {
            MARK_VARIABLE: self.entry.link_id,
            "PRFAAS_LINK": self.entry.name,
            "PRFAAS_LINK_ADDRESS": site.address,
            "PRFAAS_LINK_PEER_ADDRESS": other.address,
        }
        descriptors: list[int] = []
        if site.namespace is not None:
            descriptors.append(os.dup(site.namespace.descriptor))
            if self.rootless:
                descriptors.append(os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC))
        return {"environment": environment}, descriptors

    def _sites(self) -> TestLink:
        if isinstance(self.link, NicLink):
            raise LinkError(
                "this link shapes an interface of this node: it has no sites of its own, and "
                "commands run on the node itself meet it"
            )
        return self.link


@contextmanager
def _serving(keeper: Keeper) -> Iterator[None]:
    """Answer on the link's socket, each connection in a thread."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path = keeper.entry.socket_path
        path.unlink(missing_ok=True)
        with short_path(path) as short:
            listener.bind(short)
        listener.listen()
        threading.Thread(target=_accept, args=(listener, keeper), daemon=True).start()
        yield


def _accept(listener: socket.socket, keeper: Keeper) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed: the link goes down
            return
        threading.Thread(target=_converse, args=(connection, keeper), daemon=True).start()


def _converse(connection: socket.socket, keeper: Keeper) -> None:
    with connection, suppress(OSError):  # the asker may be gone
        connection.settimeout(_ASK_TIMEOUT_S)
        with connection.makefile("rb") as lines:
            line = lines.readline(_MAX_LINE_BYTES)
        if not line:
            return
        try:
            answer, descriptors = keeper.answer(json.loads(line))
        except (LinkError, ValueError) as error:
            answer, descriptors = {"error": str(error)}, []
        try:
            data = json.dumps(answer).encode() + b"\n"
            sent = socket.send_fds(connection, [data], descriptors)
            connection.sendall(data[sent:])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def keep(order: KeeperOrder, stop: int) -> None:
    """Open the link, say so, and answer until ``stop`` is readable or the time is over."""
    notes: list[str] = []
    rootless = order.nic is None and order.backend != "relay" and _become_capable(notes)
    with ExitStack() as stack:
        entry = stack.enter_context(held(order.name, {"keeper": True}))
        link = _open(order, entry, stack)
        details = entry.details | {
            "rootless": rootless,
            "backend": link.backend if isinstance(link, TestLink) else "nic",
            "description": str(link.applied),
            "notes": [*notes, *link.notes],
            "document": dict(order.document),
        }
        if isinstance(link, NicLink):
            details |= {"nic": _written(entry).details["nic"], "plan": dict(order.nic or {})}
        entry = replace(entry, details=details)
        schedule = None
        if order.variation is not None:
            wanted = schedule_from(order.variation, order.duration_s)
            schedule = ScheduleRun(link, _described(order), wanted)
        stack.enter_context(_serving(Keeper(entry, link, rootless, schedule)))
        write(entry)
        if schedule is not None:
            stack.enter_context(schedule)
        _say({"entry": asdict(entry)})
        _detach()
        _wait(stop, order.duration_s, link)


def _become_capable(notes: list[str]) -> bool:
    """Enter a user namespace where that is what it takes; whether it did."""
    lacking = capabilities_lacking()
    if not lacking:
        return False
    try:
        enter_user_namespace()
    except LinkError as error:
        notes.append(f"without {' and '.join(lacking)} and rootless not either: {error}")
        return False
    notes.append(f"rootless: without {' and '.join(lacking)}, in a user namespace of its own")
    return True


def _described(order: KeeperOrder) -> LinkSpec:
    return read_link(order.document, order.name, "the description of the link").spec


def _open(order: KeeperOrder, entry: Entry, stack: ExitStack) -> TestLink | NicLink:
    spec = _described(order)
    if order.nic is None:
        backend: Any = order.backend
        return stack.enter_context(open_link(spec, backend))
    plan = NicPlan.load(order.nic)
    log = stack.enter_context(entry.log_path.open("ab"))
    return stack.enter_context(open_nic(spec, plan, entry, log))


def _written(entry: Entry) -> Entry:
    (found,) = (each for each in entries() if each.link_id == entry.link_id)
    return found


def _detach() -> None:
    """Let go of the pipes of the command that started this process."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)


def _wait(stop: int, duration_s: float | None, link: TestLink | NicLink) -> None:
    """Until told, or the time is over, or the link is down by itself."""
    end_s = math.inf if duration_s is None else time.monotonic() + duration_s
    while (left_s := end_s - time.monotonic()) > 0:
        # A link of namespaces needs no looking after.
        wake_s = min(left_s, _LOOK_S) if isinstance(link, NicLink) else min(left_s, _LONG_S)
        if select.select([stop], [], [], wake_s)[0]:
            return
        if isinstance(link, NicLink) and not link.guard.is_watching:
            print("the dead-man gave the interface back: the link is down", file=sys.stderr)
            return


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> int:
    stop, stopped = os.pipe()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda _signum, _frame: os.write(stopped, b"s"))
    order = KeeperOrder(**json.loads(sys.stdin.readline()))
    try:
        keep(order, stop)
    except (LinkError, OSError) as error:
        # After the ready line this goes to the log: standard output is closed by then.
        with suppress(OSError):
            _say({"error": str(error)})
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())

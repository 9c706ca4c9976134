"""What is up on this machine: one JSON file a link, so that another command finds it.

Namespaces need no record to be cleaned up (see ``netem.namespace``): the kernel takes them back
with the last process inside. Recorded is what a second command has to find, a keeper process and
the shaped interface of a node, in ``runtime_folder()``:

    NAME.json   the entry: who holds the link, since when, what it is
    NAME.sock   where its keeper answers
    NAME.log    what the keeper wrote to standard error
    lock        held while an entry is taken or given back

An owner is a pid with its start time in clock ticks since boot (field 22 of /proc/PID/stat) and
the boot's id: a reused pid is another process, and an entry of an earlier boot has no owner. An
entry whose owner lives is never touched.
"""

import fcntl
import json
import os
import re
import secrets
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from netem.link import LinkError

#: Names the folder, in place of /run/prfaas (who may write there) and $XDG_RUNTIME_DIR/prfaas.
FOLDER_VARIABLE = "PRFAAS_RUNTIME_DIR"
#: Marks the processes that were started in a link's sites, in their environment.
MARK_VARIABLE = "PRFAAS_LINK_ID"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}\Z")
_START_FIELD = 19  # of what follows the parenthesised name
_GRACE_S = 5.0


class FolderError(LinkError):
    """Nothing can be recorded here, and so nothing is."""


class LeftBehindError(LinkError):
    """Something is not as it was, and the record of it must stay so that it can be tried again."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that cannot be taken for a later one of the same pid."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        """ProcessLookupError when there is none."""
        return cls(pid, _start_ticks(pid), _boot_id())

    def is_alive(self) -> bool:
        """Zombies are dead."""
        try:
            return ProcessId.of(self.pid) == self
        except ProcessLookupError:
            return False

    def end(self, grace_s: float = _GRACE_S) -> bool:
        """SIGTERM, then SIGKILL after ``grace_s``; False when it was gone already."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # The descriptor is of this process now, whatever becomes of the number.
            if not self.is_alive():
                return False
            for signum, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _GRACE_S)):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signum)
                if _ends_within(descriptor, patience_s):
                    return True
            raise LinkError(f"process {self.pid} does not end, not even by SIGKILL")
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Entry:
    """One link that is up, or was until its owner died.

    ``details``: "keeper" where the owner only keeps it; "nic" what was changed on an interface
    (``netem.restoration.NicRecord``); the rest is for showing.
    """

    name: str
    owner: ProcessId
    link_id: str
    since_unix_s: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def socket_path(self) -> Path:
        return runtime_folder() / f"{self.name}.sock"

    @property
    def log_path(self) -> Path:
        return runtime_folder() / f"{self.name}.log"


def folder_path() -> Path:
    """Where the folder is or would be. FolderError when there is no safe place for it."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if chosen:
        folder = Path(chosen)
    elif os.access("/run", os.W_OK):
        # Not root's XDG_RUNTIME_DIR: it goes with the last login session, the link does not.
        folder = Path("/run/prfaas")
    elif runtime:
        folder = Path(runtime) / "prfaas"
    else:
        raise FolderError(
            "there is no folder to record the link in: XDG_RUNTIME_DIR is not set; set it, or "
            f"set {FOLDER_VARIABLE} to a folder of your own"
        )
    if folder.exists() and not _is_ours_alone(folder):
        raise FolderError(
            f"the folder {folder} belongs to or can be written by someone else, so what is in it "
            f"cannot be trusted; set {FOLDER_VARIABLE} to a folder of your own"
        )
    return folder


def runtime_folder() -> Path:
    """The folder, made where it was not. FolderError as ``folder_path``."""
    folder = folder_path()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(
            f"the folder {folder} for the record of links cannot be made: {error.strerror}; "
            f"set {FOLDER_VARIABLE} to another"
        ) from error
    return folder


def _is_ours_alone(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def check_name(name: str) -> None:
    """LinkError when a link cannot be called so."""
    if not _NAME.match(name):
        raise LinkError(
            f"{name!r} cannot be the name of a link: up to 31 letters, digits, '.', '_' and '-', "
            "a letter or digit first"
        )


@contextmanager
def locked() -> Iterator[Path]:
    """The folder, to oneself: entries are taken and given back one at a time."""
    folder = runtime_folder()
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


def entries() -> tuple[Entry, ...]:
    """All entries by name, those of dead owners included; see ``unreadable`` for the rest."""
    return tuple(entry for entry in _records().values() if isinstance(entry, Entry))


def unreadable() -> dict[str, str]:
    """Names whose record says nothing of use, each with what is wrong with it."""
    return {name: str(fault) for name, fault in _records().items() if isinstance(fault, LinkError)}


def _records() -> dict[str, Entry | LinkError]:
    """By name, what is recorded or why it cannot be read: one does not hide others."""
    found: dict[str, Entry | LinkError] = {}
    for path in sorted(folder_path().glob("*.json")):
        try:
            entry = _read(path)
        except LinkError as error:
            found[path.stem] = error
        else:
            found |= {} if entry is None else {entry.name: entry}
    return found


def claim(name: str, owner: ProcessId, details: dict[str, Any] | None = None) -> Entry:
    """Take a name for ``owner``; the caller holds the lock. LinkError when it is taken."""
    check_name(name)
    present = _read(runtime_folder() / f"{name}.json")
    if present is not None:
        raise LinkError(
            f"a link named {name!r} is up already (process {present.owner.pid}); take it down by "
            f"`prfaas link down {name}`, or choose another name"
        )
    entry = Entry(name, owner, secrets.token_hex(8), time.time(), details or {})
    write(entry)
    return entry


@contextmanager
def held(name: str, details: dict[str, Any] | None = None) -> Iterator[Entry]:
    """A name for what this process opens inside; given back with it, unless something is left."""
    with locked():
        entry = claim(name, ProcessId.of(os.getpid()), details)
    try:
        yield entry
    except LeftBehindError:
        raise
    except BaseException:
        forget(entry)
        raise
    forget(entry)


def write(entry: Entry) -> None:
    """Put an entry on disk, whole or not at all."""
    path = runtime_folder() / f"{entry.name}.json"
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(entry), file, indent=1)
            file.flush()
            # A record of what was changed on an interface must survive what follows it.
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def forget(entry: Entry) -> None:
    """Remove what an entry has on disk; nothing when it is another's by now."""
    present = _read(runtime_folder() / f"{entry.name}.json")
    if present is None or present.link_id == entry.link_id:
        forget_name(entry.name)


def forget_name(name: str) -> None:
    """Remove what a name has on disk, whatever that is."""
    check_name(name)
    for suffix in ("sock", "log", "new", "json"):
        (runtime_folder() / f"{name}.{suffix}").unlink(missing_ok=True)


def marked_processes(link_id: str) -> tuple[ProcessId, ...]:
    """Processes started in the sites of a link, but for the caller and those it runs under."""
    mark = f"{MARK_VARIABLE}={link_id}".encode()
    spared = set(_ancestry(os.getpid()))
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid in spared:
            continue
        with suppress(OSError):  # gone by now, or another user's
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(ProcessId.of(pid))
    return tuple(found)


def _read(path: Path) -> Entry | None:
    try:
        document = json.loads(path.read_text())
        entry = Entry(**document | {"owner": ProcessId(**document["owner"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LinkError(_no_record(path, f"{type(error).__name__}: {error}")) from error
    if entry.name != path.stem or not _is_sound(entry):
        raise LinkError(_no_record(path, "another name's, or a field is of the wrong type"))
    return entry


def _no_record(path: Path, why: str) -> str:
    return (
        f"{path} is not the record of a link ({why}). When nothing of it is up, "
        f"`prfaas link down {path.stem} --forget` removes it"
    )


def _is_sound(entry: Entry) -> bool:
    """What comes from a file may be anything; the link's id marks processes that are ended."""
    owner = entry.owner
    return (
        all(isinstance(number, int) for number in (owner.pid, owner.start_ticks))
        and all(isinstance(text, str) and text for text in (owner.boot_id, entry.link_id))
        and isinstance(entry.since_unix_s, int | float)
        and isinstance(entry.details, dict)
    )


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat after the name in parentheses, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(pid) from None


def _start_ticks(pid: int) -> int:
    parts = _stat_fields(pid)
    if parts[0] in "ZX":
        raise ProcessLookupError(pid)
    return int(parts[_START_FIELD])


def _ancestry(pid: int) -> Iterator[int]:
    while pid > 0:
        yield pid
        try:
            pid = int(_stat_fields(pid)[1])
        except ProcessLookupError:
            return


def _ends_within(descriptor: int, patience_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(patience_s * 1e3))

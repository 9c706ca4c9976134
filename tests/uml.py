"""Runs a command under User-Mode Linux: a real kernel with tc-netem, as an ordinary process.

    python tests/uml.py [--with uml|qemu] [--kernel-root DIR] [--timeout S] [--memory 1G]
        -- COMMAND ARGUMENT...

Where User-Mode Linux is not installed or does not start, a stock kernel is emulated instead
(tests/qemu.py), with ten times the timeout; where that is not installed either, this fails. Any
kernel that was unpacked below a folder can be emulated by its name.

The guest sees this machine's files read-only, the current directory and most of the environment,
has a /run of its own, where TMPDIR is, and loads the networking modules the tests need. The
command's output is copied here and its exit status is this program's. ``linux.uml`` itself ends
with 0 whatever happened inside, so the guest writes the status to a file and a missing file is a
failure (125; 124 after a timeout). Debian and Ubuntu: ``apt-get install user-mode-linux``, or
``qemu-system-x86 linux-image-amd64``.
"""

import argparse
import ctypes
import fcntl
import json
import os
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import qemu

MODULES = (
    "sch_netem", "veth", "tun", "ifb", "dummy", "sch_fq", "sch_htb", "sch_tbf", "sch_ingress",
    "cls_u32", "cls_matchall", "act_mirred",
)  # fmt: skip
UML_MODULES = Path("/usr/lib/uml/modules")
MOUNTS = (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/run"))
RESULTS = Path("/mnt")

_FINIT_MODULE, _COMPRESSED = 313, 4  # x86-64, the one architecture user-mode-linux is built for
_RB_POWER_OFF = 0x4321FEDC
_NO_RESULT, _TIMED_OUT = 125, 124
_PROBE_S, _EMULATION_FACTOR = 30.0, 10

#: (folder, memory, where the kernel is) -> the command that boots and runs ``folder``/init.
Boot = Callable[[Path, str, Path], list[str]]
_ROOT = Path("/")


def uml_command(folder: Path, memory: str, _root: Path) -> list[str]:
    """Boots and hands over to ``folder``/init; the kernel is the program itself."""
    return [
        "linux.uml", f"mem={memory}", f"umid={folder.name}", f"uml_dir={folder}/",
        "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", f"init={folder}/init",
        "con=null", "con0=null,fd:1", "quiet", "panic=-1",
    ]  # fmt: skip


BOOTS: dict[str, Boot] = {"uml": uml_command, "qemu": qemu.command}


def choose() -> str:
    """Which kernel can be had here, known by a boot; ends the program when none."""
    if shutil.which("linux.uml") is None:
        fault = "linux.uml is not installed: apt-get install user-mode-linux"
    elif run(["true"], "uml", "256M", _PROBE_S) == 0:
        return "uml"
    else:
        fault = "linux.uml is installed, but does not start here"
    if (lacking := qemu.missing(_ROOT)) is None:
        print(f"{fault}; a kernel is emulated, which is slow", file=sys.stderr)
        return "qemu"
    sys.exit(f"no kernel with tc-netem can be had: {fault}; or to emulate one: {lacking}")


def run(command: list[str], kind: str, memory: str, timeout_s: float, root: Path = _ROOT) -> int:
    """Boot, run, copy the output, return the status."""
    with tempfile.TemporaryDirectory(prefix="uml-") as name:
        folder = Path(name)
        modules = UML_MODULES if kind == "uml" else root / qemu.MODULES
        write_guest(folder, command, kind, modules)
        with (folder / "console").open("wb") as console:
            guest = subprocess.Popen(
                BOOTS[kind](folder, memory, root),
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
            with suppress(OSError):
                # Ahead of other work, since a guest that waits for a processor measures that wait.
                # It has one processor, and the kernel keeps a part of each for others.
                os.sched_setscheduler(guest.pid, os.SCHED_RR, os.sched_param(1))
            try:
                in_time = follow(guest, folder / "output", time.monotonic() + timeout_s)
            finally:
                # The guest's processes are host processes of its session.
                if guest.poll() is None:
                    os.killpg(guest.pid, signal.SIGKILL)
                guest.wait()
        status = folder / "status"
        if status.exists():
            return int(status.read_text())
        end = "timed out" if not in_time else "ended without a result"
        tail = (folder / "console").read_text(errors="replace")[-2000:]
        print(f"the guest {end}; its console:\n{tail}", file=sys.stderr)
        return _NO_RESULT if in_time else _TIMED_OUT


def write_guest(folder: Path, command: list[str], kind: str, modules: Path) -> None:
    """What the guest needs: its init, the command with its environment, a file for the output."""
    init = folder / "init"
    guest = [sys.executable, str(Path(__file__).absolute()), "--guest", kind, str(folder)]
    init.write_text(f"#!/bin/sh\nexec {shlex.join(guest)}\n")
    init.chmod(0o755)
    environment = dict(os.environ) | {
        "HOME": "/run",
        "TMPDIR": "/run",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PRFAAS_REQUIRE_NETEM": "1",
    }
    if kind == "qemu":
        environment["PRFAAS_EMULATED"] = "1"
    job = {
        "command": command,
        "directory": os.getcwd(),
        "environment": environment,
        "modules": str(modules),
    }
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "output").touch()


def follow(guest: "subprocess.Popen[bytes]", output: Path, deadline_s: float) -> bool:
    """Copy the output while the guest runs; False when the deadline passed first."""
    with output.open("rb") as file:
        while time.monotonic() < deadline_s:
            with suppress(subprocess.TimeoutExpired):
                guest.wait(0.1)
            ended = guest.returncode is not None
            sys.stdout.buffer.write(file.read())
            sys.stdout.flush()
            if ended:
                return True
    return False


def be_guest(kind: str, folder: str) -> None:
    """The guest's init: prepare the machine, run the job, write its status, power off."""
    libc = ctypes.CDLL(None, use_errno=True)
    if kind == "uml":
        mount(libc, "hostfs", RESULTS, folder)
    else:
        mount(libc, "9p", RESULTS, qemu.TRANSPORT, "results")
    for system, place in MOUNTS:
        mount(libc, system, Path(place))
    loopback_up()
    job = json.loads((RESULTS / "job.json").read_text())
    with (RESULTS / "output").open("ab") as output:
        try:
            for module in MODULES:
                load(libc, Path(job["modules"]) / os.uname().release, module)
            os.environ.clear()
            os.environ.update(job["environment"])
            status = subprocess.run(
                job["command"],
                cwd=job["directory"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                check=False,
            ).returncode
            (RESULTS / "status.new").write_text(str(status))
            (RESULTS / "status.new").rename(RESULTS / "status")
        finally:
            os.sync()
            libc.reboot(_RB_POWER_OFF)


def mount(
    libc: ctypes.CDLL, kind: str, place: Path, options: str = "", source: str = "none"
) -> None:
    texts = (os.fsencode(text) for text in (source, place, kind))
    if libc.mount(*texts, 0, os.fsencode(options)) != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount {kind} on {place}")


def loopback_up() -> None:
    """SIOCGIFFLAGS and SIOCSIFFLAGS of linux/sockios.h on a struct ifreq."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH22x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, 0x8913, request)
        (flags,) = struct.unpack_from("H", answer, 16)
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH22x", b"lo", flags | 1))


def load(libc: ctypes.CDLL, base: Path, module: str) -> None:
    """Load a module after those it depends on; there is no modprobe for this kernel."""
    for line in (base / "modules.dep").read_text().splitlines():
        path, _, needed = line.partition(":")
        if Path(path).name.split(".")[0] != module:
            continue
        for each in (*reversed(needed.split()), path):
            with (base / each).open("rb") as file:
                flags = 0 if each.endswith(".ko") else _COMPRESSED
                done = libc.syscall(_FINIT_MODULE, file.fileno(), b"", flags)
            if done != 0 and ctypes.get_errno() != 17:  # EEXIST: loaded already
                raise OSError(ctypes.get_errno(), f"cannot load the module {each}")
        return
    if not qemu.is_built_in(base, module):
        raise FileNotFoundError(f"{base} has no module {module}")


def main() -> None:
    if sys.argv[1:2] == ["--guest"]:
        be_guest(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--with", choices=BOOTS, dest="kind", help="default: which there is")
    parser.add_argument(
        "--kernel-root", type=Path, default=_ROOT, metavar="DIR",
        help="emulate the kernel that DIR has in boot and lib/modules",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=600, metavar="S")
    parser.add_argument("--memory", default="1G")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    root = arguments.kernel_root
    kind = arguments.kind or ("qemu" if root != _ROOT else choose())
    if kind == "qemu" and (lacking := qemu.missing(root)) is not None:
        sys.exit(f"no kernel below {root} can be emulated: {lacking}")
    timeout_s = arguments.timeout * (_EMULATION_FACTOR if kind == "qemu" else 1)
    sys.exit(run(arguments.command, kind, arguments.memory, timeout_s, root.resolve()))


if __name__ == "__main__":
    main()

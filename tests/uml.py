"""Runs a command under User-Mode Linux: a real kernel with tc-netem, as an ordinary process.

    python tests/uml.py [--timeout S] [--memory 1G] -- COMMAND ARGUMENT...

The guest sees this machine's files read-only, the current directory and most of the environment,
has /run and /tmp of its own, and loads the networking modules the tests need. The command's output
is copied here and its exit status is this program's. ``linux.uml`` itself ends with 0 whatever
happened inside, so the guest writes the status to a file and a missing file is a failure (125;
124 after a timeout). Debian and Ubuntu: ``apt-get install user-mode-linux``.
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
from contextlib import suppress
from pathlib import Path

MODULES = (
    "sch_netem", "veth", "tun", "ifb", "dummy", "sch_fq", "sch_htb", "sch_tbf", "sch_ingress",
    "cls_u32", "cls_matchall", "act_mirred",
)  # fmt: skip
MODULE_ROOT = Path("/usr/lib/uml/modules")
MOUNTS = (("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/run"))
RESULTS = Path("/mnt")

_FINIT_MODULE = 313  # x86-64, the one architecture user-mode-linux is built for
_RB_POWER_OFF = 0x4321FEDC
_NO_RESULT, _TIMED_OUT = 125, 124
_NICENESS = -10


def run(command: list[str], memory: str, timeout_s: float) -> int:
    """Boot, run, copy the output, return the status."""
    kernel = shutil.which("linux.uml")
    if kernel is None:
        sys.exit("linux.uml is not installed: apt-get install user-mode-linux")
    with tempfile.TemporaryDirectory(prefix="uml-") as name:
        folder = Path(name)
        write_guest(folder, command)
        with (folder / "console").open("wb") as console:
            guest = subprocess.Popen(
                [
                    kernel, f"mem={memory}", f"umid={folder.name}", f"uml_dir={folder}/",
                    "root=/dev/root",
                    "rootfstype=hostfs", "rootflags=/", "ro", f"init={folder}/init",
                    "con=null", "con0=null,fd:1", "quiet", "panic=-1",
                ],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
            with suppress(OSError):
                # Ahead of other work: a guest that waits for a processor measures that wait. The
                # guest is a session of its own, and such may be weighed as a whole.
                os.setpriority(os.PRIO_PROCESS, guest.pid, _NICENESS)
                Path(f"/proc/{guest.pid}/autogroup").write_text(str(_NICENESS))
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


def write_guest(folder: Path, command: list[str]) -> None:
    """What the guest needs: its init, the command with its environment, a file for the output."""
    init = folder / "init"
    init.write_text(
        f"#!/bin/sh\nexec {shlex.join([sys.executable, __file__, '--guest', str(folder)])}\n"
    )
    init.chmod(0o755)
    environment = dict(os.environ) | {
        "HOME": "/run",
        "TMPDIR": "/run",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PRFAAS_REQUIRE_NETEM": "1",
    }
    job = {"command": command, "directory": os.getcwd(), "environment": environment}
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


def be_guest(folder: str) -> None:
    """The guest's init: prepare the machine, run the job, write its status, power off."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, place in MOUNTS:
        mount(libc, kind, place, b"")
    mount(libc, "hostfs", str(RESULTS), folder.encode())
    loopback_up()
    job = json.loads((RESULTS / "job.json").read_text())
    with (RESULTS / "output").open("ab") as output:
        try:
            for module in MODULES:
                load(libc, module)
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


def mount(libc: ctypes.CDLL, kind: str, place: str, options: bytes) -> None:
    if libc.mount(b"none", place.encode(), kind.encode(), 0, options) != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount {kind} on {place}")


def loopback_up() -> None:
    """SIOCGIFFLAGS and SIOCSIFFLAGS of linux/sockios.h on a struct ifreq."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH22x", b"lo", 0)
        answer = fcntl.ioctl(any_socket, 0x8913, request)
        (flags,) = struct.unpack_from("H", answer, 16)
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH22x", b"lo", flags | 1))


def load(libc: ctypes.CDLL, module: str) -> None:
    """Load a module after those it depends on; there is no modprobe for this kernel."""
    base = MODULE_ROOT / os.uname().release
    for line in (base / "modules.dep").read_text().splitlines():
        path, _, needed = line.partition(":")
        if Path(path).stem != module:
            continue
        for each in (*reversed(needed.split()), path):
            with (base / each).open("rb") as file:
                done = libc.syscall(_FINIT_MODULE, file.fileno(), b"", 0)
            if done != 0 and ctypes.get_errno() != 17:  # EEXIST: loaded already
                raise OSError(ctypes.get_errno(), f"cannot load the module {each}")
        return
    raise FileNotFoundError(f"{base} has no module {module}")


def main() -> None:
    if sys.argv[1:2] == ["--guest"]:
        be_guest(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--timeout", type=float, default=600, metavar="S")
    parser.add_argument("--memory", default="1G")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    sys.exit(run(arguments.command, arguments.memory, arguments.timeout))


if __name__ == "__main__":
    main()

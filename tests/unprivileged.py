"""Runs a command as a user without rights, with this interpreter and checkout in reach.

    python tests/unprivileged.py COMMAND ARGUMENT...

Needs root. An interpreter under a home folder that others may not enter is made reachable in a
mount namespace of the command's own: an empty folder in place of the closed one, with the parts
that are needed bound into it. /dev/net/tun is open to all there, as distributions have it. Nothing
changes outside.
"""

import ctypes
import os
import stat
import sys
from pathlib import Path

NOBODY = 65534
TUN = Path("/dev/net/tun")
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
NEEDED = (Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[1])


def main() -> None:
    call("unshare", _CLONE_NEWNS)
    mount("none", "/", _MS_REC | _MS_PRIVATE)
    for closed in sorted({place for path in NEEDED for place in closed_folders(path)}):
        parts = [path for path in NEEDED if closed in path.parents]
        # Held open, because the mount below hides them.
        held = [os.open(part, os.O_PATH) for part in parts]
        mount("none", str(closed), 0, b"tmpfs")
        closed.chmod(0o755)
        for part, descriptor in zip(parts, held, strict=True):
            part.mkdir(parents=True, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", str(part), _MS_BIND | _MS_REC)
    if TUN.exists():
        mount("none", str(TUN.parent), 0, b"tmpfs")
        os.mknod(TUN, 0o600 | stat.S_IFCHR, os.makedev(10, 200))
        TUN.chmod(0o666)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.execvp(sys.argv[1], sys.argv[1:])


def closed_folders(path: Path) -> list[Path]:
    """The outermost folder on the way to ``path`` that others may not enter; at most one."""
    way = [*reversed(path.parents), path]
    return [folder for folder in way if not folder.stat().st_mode & 0o001][:1]


def mount(source: str, target: str, flags: int, kind: bytes | None = None) -> None:
    call("mount", source.encode(), target.encode(), kind, flags, None)


def call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


if __name__ == "__main__":
    main()

"""A stock kernel under qemu's emulation, for tests/uml.py where User-Mode Linux cannot start.

The kernel and its modules are those of the package ``linux-image-amd64``, or of any that was
unpacked below a folder; nothing of it has to run on this machine. The guest's root is this
machine's file system over 9p, read-only. A stock kernel has 9p as modules, so it starts from an
archive (cpio "newc") of a shell, ``mount``, ``insmod``, ``switch_root``, the libraries they need
and the modules of 9p, and goes on from there.

Emulated (TCG), not virtualised: it works inside any virtual machine, and is some 15 times slower.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

PACKAGES = "qemu-system-x86 linux-image-amd64"
EMULATOR = "qemu-system-x86_64"
MODULES = Path("lib/modules")
TRANSPORT = "trans=virtio,version=9p2000.L,msize=512000"
#: What the start archive loads, each after what it needs.
_MODULES = ("virtio_pci", "9pnet_virtio", "9p")
_PROGRAMS = ("sh", "mount", "insmod", "switch_root")
_MAGIC, _DIRECTORY, _FILE = "070701", 0o040755, 0o100755
_INIT = """#!/bin/sh
for module in /modules/*; do insmod $module; done
mount -t 9p -o ro,cache=loose,{transport} root /root
mount -t devtmpfs none /root/dev
exec switch_root /root {init}
"""


def kernel(root: Path) -> Path | None:
    """The newest kernel below a folder that has its modules; None without one."""
    found = [
        path
        for path in (root / "boot").glob("vmlinuz-*")
        if (root / MODULES / path.name.removeprefix("vmlinuz-") / "modules.dep").exists()
    ]
    return max(found, key=_version, default=None)


def _version(image: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", image.name)]


def missing(root: Path) -> str | None:
    """What has to be installed; None when nothing has."""
    return None if shutil.which(EMULATOR) and kernel(root) else f"apt-get install {PACKAGES}"


def command(folder: Path, memory: str, root: Path) -> list[str]:
    """Boots and hands over to ``folder``/init, with ``folder`` to be mounted as "results"."""
    image = kernel(root)
    assert image is not None, missing(root)
    archive = folder / "start.cpio"
    base = root / MODULES / image.name.removeprefix("vmlinuz-")
    archive.write_bytes(start_archive(base, folder / "init"))
    share = "-virtfs", "local,security_model=none,multidevs=remap,"
    return [
        EMULATOR, "-accel", "tcg", "-cpu", "max", "-m", memory, "-display", "none",
        "-monitor", "none", "-serial", "stdio", "-no-reboot", "-nic", "none",
        "-kernel", str(image), "-initrd", str(archive), "-append", "console=ttyS0 quiet panic=-1",
        share[0], f"{share[1]}path=/,mount_tag=root,readonly=on",
        share[0], f"{share[1]}path={folder},mount_tag=results",
    ]  # fmt: skip


def start_archive(base: Path, init: Path) -> bytes:
    """The archive the kernel unpacks before it has a file system; ``base`` has its modules."""
    files = {"init": _INIT.format(transport=TRANSPORT, init=init).encode()}
    for program in _PROGRAMS:
        path = shutil.which(program)
        assert path is not None, f"{program} is part of every distribution"
        files[f"bin/{program}"] = Path(path).read_bytes()
        for library in libraries(path):
            files[library.lstrip("/")] = Path(library).read_bytes()
    for number, module in enumerate(modules_in_order(base)):
        files[f"modules/{number:02}-{module.name}"] = module.read_bytes()
    folders = {"root"} | {str(one) for name in files for one in Path(name).parents} - {"."}
    entries = [(name, _DIRECTORY, b"") for name in sorted(folders)]
    entries += [(name, _FILE, content) for name, content in files.items()]
    return b"".join(_entry(*one) for one in [*entries, ("TRAILER!!!", 0, b"")])


def libraries(program: str) -> list[str]:
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return re.findall(r"(/\S+) \(0x", told)


def modules_in_order(base: Path) -> list[Path]:
    """Each after what it needs."""
    lines = (base / "modules.dep").read_text().splitlines()
    needs = dict(line.split(":", 1) for line in lines)
    found: list[str] = []
    for wanted in _MODULES:
        if is_built_in(base, wanted):
            continue
        (path,) = (path for path in needs if Path(path).name.split(".")[0] == wanted)
        found += [*reversed(needs[path].split()), path]
    return [base / each for each in dict.fromkeys(found)]


def is_built_in(base: Path, module: str) -> bool:
    """Whether the kernel whose modules ``base`` has holds one itself; which ones changes."""
    listed = (base / "modules.builtin").read_text().splitlines()
    return any(Path(line).name == f"{module}.ko" for line in listed)


def _entry(name: str, mode: int, content: bytes) -> bytes:
    """One file: 13 numbers of 8 hexadecimal digits, the name, the content, each padded to 4."""
    numbers = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    head = _MAGIC.encode() + b"".join(b"%08x" % number for number in numbers)
    head += os.fsencode(name) + b"\0"
    return _padded(head) + _padded(content)


def _padded(part: bytes) -> bytes:
    return part + bytes(-len(part) % 4)

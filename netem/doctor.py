"""What this machine has for shaped links, what it lacks, and how to get it.

What can be tried is tried, not guessed from versions: a child process makes a namespace (in a user
namespace where that takes one), puts each qdisc on an interface in it, opens the TUN device, and
opens a link as ``auto`` would. The child and all it made are gone afterwards.
"""

import ctypes
import errno
import fcntl
import ipaddress
import json
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from netem.link import LinkError, symmetric
from netem.namespace import (
    capabilities_lacking,
    congestion_control,
    enter_user_namespace,
    namespace,
    user_namespace_fault,
)
from netem.nic_tree import Ifb, redirect
from netem.rtnetlink import (
    CREATE,
    RTM_NEWQDISC,
    TC_H_CLSACT,
    TC_H_INGRESS,
    TC_H_ROOT,
    TCA_KIND,
    Rtnetlink,
    tc_message,
    text_attribute,
)
from netem.saved_qdiscs import interface_index, make_ifb
from netem.testlink import open_link
from netem.units import format_size_bytes

State = Literal["ok", "limited", "missing"]

_PROBE_S = 60.0
_WANTED_FILES, _WANTED_CORES = 4096, 4
#: Four bandwidth-delay products of 10 Gbit/s over 6.7 ms.
_WANTED_BUFFER_BYTES = 32 << 20
_MODULES = (
    "load it by `modprobe {}`; where that finds none, it is in linux-modules-extra-$(uname -r) "
    "(Ubuntu), kernel-modules-extra (Fedora, RHEL) or a kernel with CONFIG_{}"
)
#: Qdiscs and the like that are tried: what each is for, and its kernel option.
_QDISCS = {
    "sch_netem": "netem",
    "sch_fq": "fq",
    "sch_htb": "htb",
    "sch_tbf": "tbf",
    "sch_ingress": "clsact",
}
_NOBODY = ipaddress.IPv4Network("192.0.2.1")
_PARTS = {
    "sch_netem": ("the netem backend: delay, jitter, loss", "NET_SCH_NETEM"),
    "sch_fq": ("a cap on every flow under netem", "NET_SCH_FQ"),
    "sch_htb": ("a link on a real node's interface: the rate", "NET_SCH_HTB"),
    "sch_tbf": ("a link on a real node's interface: loss by packet", "NET_SCH_TBF"),
    "sch_ingress": ("a link on a real node's interface: its hooks", "NET_SCH_INGRESS"),
    "cls_u32": ("a link on a real node's interface: its filters (with act_mirred)", "NET_CLS_U32"),
    "ifb": ("a link on a real node's interface: where it shapes", "IFB"),
}
# linux/ethtool.h, linux/sockios.h
_SIOCETHTOOL, _GET_TSO, _GET_GSO, _GET_GRO = 0x8946, 0x1E, 0x23, 0x2B


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``lacks`` is what cannot be done for want of it, ``remedy`` how to."""

    name: str
    state: State
    found: str
    lacks: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings, and the backend that ``auto`` would choose (None: nothing can run)."""

    findings: tuple[Finding, ...]
    backend: str | None
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "notes": list(self.notes),
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine() -> Examination:
    """Look at everything; takes a second or two. Call it before any thread is started."""
    if sys.platform != "linux":
        lacks = "namespaces, tc-netem and TUN devices exist on Linux only; the relay can run"
        return Examination((Finding("kernel", "missing", platform.platform(), lacks),), "relay", ())
    probe = _probe()
    findings = (
        _kernel(), _python(), _capabilities(), _user_namespaces(), *_kernel_parts(probe),
        _tun(probe), _buffers(), _congestion_control(), _offloads(), _files(), _cores(),
        _kernel_for_tests(), _gpus(), _rdma(),
    )  # fmt: skip
    return Examination(findings, probe["backend"], tuple(probe["notes"]))


def print_examination(examination: Examination, *, as_json: bool = False) -> None:
    """For people one line a finding, and under it what is lacking; or one JSON document."""
    if as_json:
        print(json.dumps(examination.document(), indent=2))
        return
    marks = {"ok": "ok     ", "limited": "limited", "missing": "missing"}
    for one in examination.findings:
        print(f"{marks[one.state]}  {one.name}: {one.found}")
        if one.lacks:
            print(f"         without it: {one.lacks}")
        if one.remedy:
            print(f"         to get it: {one.remedy}")
    print(f"link backend that 'auto' chooses here: {examination.backend or 'none can run'}")
    for note in examination.notes:
        print(f"         {note}")


def _probe() -> dict[str, Any]:
    """What a child process found by trying: qdiscs, the TUN device, the backend."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            os.write(writing, json.dumps(_try_all()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read()
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        raise LinkError("the process that was to try what this kernel can do died")
    found: dict[str, Any] = json.loads(said)
    return found


def _try_all() -> dict[str, Any]:
    if capabilities_lacking():
        with suppress(LinkError):
            enter_user_namespace()
    found: dict[str, Any] = {"parts": {}, "backend": None}
    try:
        with namespace() as place:
            found["parts"] = place.run(_try_parts)
    except LinkError as error:
        found["parts"] = dict.fromkeys((*_PARTS, "tun"), str(error))
    try:
        with open_link(symmetric("doctor", 125e6, 1e-3)) as link:
            found |= {"backend": link.backend, "notes": list(link.notes)}
    except LinkError as error:
        found["notes"] = [str(error)]
    return found


def _try_parts() -> dict[str, str | None]:
    """Each part with what came of trying it: None when it works."""
    with Rtnetlink() as route:
        index = interface_index(route, "lo")
        assert index is not None
        found = {part: _try_qdisc(route, index, kind) for part, kind in _QDISCS.items()}
        found["ifb"] = _refusal(lambda: make_ifb(route, "probe", 1))
        found["cls_u32"] = "cannot be tried without sch_ingress and ifb"
        if found["sch_ingress"] is None and found["ifb"] is None:
            ifb = Ifb("probe", "egress", "near_to_far", 1)
            found["cls_u32"] = _refusal(lambda: redirect(route, index, ifb, (_NOBODY,), {4: 1}))
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
        found["tun"] = None
    except OSError as error:
        found["tun"] = error.strerror
    return found


def _refusal(call: Callable[[], None]) -> str | None:
    try:
        call()
    except (LinkError, OSError) as error:
        return str(error)
    return None


def _try_qdisc(route: Rtnetlink, index: int, kind: str) -> str | None:
    """A kind the kernel does not have is ENOENT; any other answer means that it looked at it."""
    hook = kind == "clsact"
    place = tc_message(index, TC_H_CLSACT if hook else 0, TC_H_INGRESS if hook else TC_H_ROOT)
    try:
        route.request(RTM_NEWQDISC, place + text_attribute(TCA_KIND, kind), CREATE)
    except OSError as error:
        return error.strerror if error.errno in (errno.ENOENT, errno.EPERM) else None
    return None


def _kernel() -> Finding:
    return Finding("kernel", "ok", f"{platform.system()} {platform.release()}")


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def _capabilities() -> Finding:
    lacking = capabilities_lacking()
    if not lacking:
        return Finding("capabilities", "ok", "CAP_SYS_ADMIN and CAP_NET_ADMIN")
    return Finding(
        "capabilities",
        "limited",
        f"without {' and '.join(lacking)}",
        "links need a user namespace; an interface of this node cannot be shaped",
        "run as root, or in a container with --cap-add for these",
    )


def _user_namespaces() -> Finding:
    fault = user_namespace_fault()
    if fault is None:
        return Finding("user namespaces", "ok", "can be made: links work without root")
    why, _, remedy = fault.partition("; ")
    lacks = "links without root have only the relay"
    return Finding("user namespaces", "limited", why, lacks, remedy)


def _kernel_parts(probe: dict[str, Any]) -> Iterator[Finding]:
    for part, (purpose, option) in _PARTS.items():
        fault = probe["parts"].get(part)
        if fault is None:
            yield Finding(part, "ok", purpose)
        else:
            yield Finding(part, "missing", fault, purpose, _MODULES.format(part, option))


def _tun(probe: dict[str, Any]) -> Finding:
    fault = probe["parts"].get("tun")
    if fault is None:
        return Finding("/dev/net/tun", "ok", "the forwarder backend")
    remedy = (
        "`modprobe tun`; in a container --device /dev/net/tun; for users without root mode 0666"
    )
    return Finding("/dev/net/tun", "missing", fault, "the forwarder backend", remedy)


def _buffers() -> Finding:
    most = {
        name: int(Path(f"/proc/sys/net/ipv4/{name}").read_text().split()[2])
        for name in ("tcp_rmem", "tcp_wmem")
    }
    found = ", ".join(f"{name} up to {format_size_bytes(size)}" for name, size in most.items())
    if min(most.values()) >= _WANTED_BUFFER_BYTES:
        return Finding("socket buffers", "ok", found)
    return Finding(
        "socket buffers",
        "limited",
        found,
        "one TCP flow of this node is held back over a long fast link (a link's own namespaces "
        "are given what they need)",
        f'`sysctl net.ipv4.tcp_rmem="4096 131072 {_WANTED_BUFFER_BYTES}"`, and tcp_wmem alike',
    )


def _congestion_control() -> Finding:
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    others = ", ".join(name for name in available if name != congestion_control())
    return Finding("congestion control", "ok", f"{congestion_control()} (also: {others or 'none'})")


def _offloads() -> Finding:
    told = []
    for _, name in socket.if_nameindex():
        on = [
            what
            for what, command in (("TSO", _GET_TSO), ("GSO", _GET_GSO), ("GRO", _GET_GRO))
            if _feature(name, command)
        ]
        if name != "lo" and on:
            told.append(f"{name}: {' '.join(on)}")
    found = "; ".join(told) or "none on"
    return Finding("offloads", "ok", f"{found} (links cut offload packets where one is one draw)")


def _feature(interface: str, command: int) -> bool:
    """struct ethtool_value behind the pointer of a struct ifreq."""
    value = ctypes.create_string_buffer(struct.pack("=II", command, 0), 8)
    request = struct.pack("16sQ16x", interface.encode(), ctypes.addressof(value))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, suppress(OSError):
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
        return bool(struct.unpack("=II", value.raw)[1])
    return False


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (hard limit {hard})"
    if soft >= _WANTED_FILES:
        return Finding("open files", "ok", found)
    lacks = "a load of thousands of connections runs out of descriptors"
    return Finding("open files", "limited", found, lacks, f"`ulimit -n {_WANTED_FILES}`")


def _cores() -> Finding:
    usable, all_cores = len(os.sched_getaffinity(0)), os.cpu_count()
    found = f"{usable} usable of {all_cores}"
    if usable >= _WANTED_CORES:
        return Finding("cores", "ok", found)
    lacks = "the processes of a link and of its load wait for each other: wake-ups come late"
    return Finding("cores", "limited", found, lacks, "a machine with more, or a smaller load")


def _kernel_for_tests() -> Finding:
    """Where this kernel has no netem the tests boot another: see tests/uml.py."""
    name = "a kernel for tests"
    for program in ("linux.uml", "qemu-system-x86_64"):
        if (path := shutil.which(program)) is not None:
            return Finding(name, "ok", f"{path}: the tests can boot one with netem")
    lacks = "the tests of the netem backend, where this kernel has no netem"
    remedy = (
        "`apt-get install user-mode-linux`, or where that does not start "
        "`apt-get install qemu-system-x86 linux-image-amd64`"
    )
    return Finding(name, "limited", "neither linux.uml nor qemu-system-x86_64", lacks, remedy)


def _gpus() -> Finding:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding("GPUs", "ok", "no nvidia-smi; emulated and CPU engines need none")
    said = subprocess.run(
        [program, "-L"], capture_output=True, text=True, check=False, timeout=_PROBE_S
    )
    if said.returncode != 0:
        fault = (said.stderr or said.stdout).strip().partition("\n")[0]
        lacks = "real engines on this node's GPUs"
        return Finding("GPUs", "limited", f"nvidia-smi fails: {fault}", lacks, "mend the driver")
    names = [line.partition(" (UUID")[0] for line in said.stdout.splitlines() if line[:3] == "GPU"]
    return Finding("GPUs", "ok", "; ".join(names) or "none")


def _rdma() -> Finding:
    folder = Path("/sys/class/infiniband")
    devices = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if not devices:
        return Finding("RDMA", "ok", "no devices")
    lacks = "RDMA passes by the kernel: no link of any backend shapes it"
    return Finding(
        "RDMA", "limited", ", ".join(devices), lacks, "send over TCP where it is to count"
    )

"""Anonymous network namespaces: made, entered and configured without a name in the file system.

``unshare(CLONE_NEWNET)`` in a throwaway thread makes one, an open /proc/thread-self/ns/net keeps
it. Nothing is mounted under /run/netns, so when the last descriptor and the last process inside
are gone the kernel removes it and its interfaces, whatever signal ended them. A process is started
inside by forking from a thread that has entered: Linux namespaces belong to threads, and the
thread ends right after, so the caller never leaves its own.

Making them needs CAP_SYS_ADMIN. A process without it gets it, over what it makes itself, in a
user namespace (``enter_user_namespace``), where the kernel lets it have one. That one belongs to
the whole process, is entered before it has threads, and is not left again.
"""

import ctypes
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pyroute2 import IPRoute

from netem.link import LinkError

Result = TypeVar("Result")

_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
#: Bits of CapEff in /proc/self/status (linux/capability.h).
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_SYSCTL = Path("/proc/sys/net")
#: The kernel refuses larger socket buffers than an int holds; this leaves room for its doubling.
_MAX_BUFFER_BYTES = 1 << 29


class Namespace:
    """A network namespace held by a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def run(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` in a thread inside the namespace; its exception is raised here."""

        def inside() -> Result:
            _system_call("setns", self.descriptor, _CLONE_NEWNET)
            return function()

        return _in_thread(inside)

    def popen(self, argv: list[str], **options: Any) -> "subprocess.Popen[Any]":
        return self.run(lambda: subprocess.Popen(argv, **options))


def capabilities_lacking() -> tuple[str, ...]:
    """What this process would need to make and configure network namespaces, and has not."""
    status = Path("/proc/self/status").read_text()
    (held,) = (int(line.split()[1], 16) for line in status.splitlines() if "CapEff" in line)
    wanted = {"CAP_SYS_ADMIN": _CAP_SYS_ADMIN, "CAP_NET_ADMIN": _CAP_NET_ADMIN}
    return tuple(name for name, bit in wanted.items() if not held >> bit & 1)


def enter_user_namespace() -> None:
    """Give this process every capability over the namespaces it makes from here on.

    Its user becomes root inside; files keep their owner outside. LinkError where the system does
    not allow it, or when the process has several threads.
    """
    if number := _try_user_namespace():
        raise LinkError(
            f"no user namespace can be had ({os.strerror(number)}); {_user_namespace_remedy()}"
        )
    try:
        _unshare_user()
    except OSError as error:
        raise LinkError(
            f"no user namespace can be had ({error.strerror}): enter it before any thread is "
            "started"
        ) from error


def user_namespace_fault() -> str | None:
    """Why ``enter_user_namespace`` would fail, and what to do; None when it would not."""
    number = _try_user_namespace()
    return f"{os.strerror(number)}; {_user_namespace_remedy()}" if number else None


def _try_user_namespace() -> int:
    """The error number of a child that tries: half-way in is no place to come back from."""
    child = os.fork()
    if child == 0:
        number = 0
        try:
            _unshare_user()
            # What a security module may allow in name only.
            _system_call("unshare", _CLONE_NEWNET)
        except OSError as error:
            number = error.errno or errno.EIO
        finally:
            os._exit(number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _unshare_user() -> None:
    user, group = os.geteuid(), os.getegid()
    _system_call("unshare", _CLONE_NEWUSER)
    # Without this first the kernel refuses the map of groups.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def join(user: int | None, network: int) -> None:
    """Move this single-threaded process into a network namespace, by descriptors.

    ``user`` is the user namespace that owns it, where that is not the caller's.
    """
    try:
        if user is not None:
            _system_call("setns", user, _CLONE_NEWUSER)
        _system_call("setns", network, _CLONE_NEWNET)
    except OSError as error:
        raise LinkError(f"the link's network namespace cannot be entered: {error}") from error


#: Settings that take user namespaces away, each with the value that gives them back.
_USER_NAMESPACE_SETTINGS = {
    "user/max_user_namespaces": ("0", "28633"),
    "kernel/unprivileged_userns_clone": ("0", "1"),
    "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
}


def _user_namespace_remedy() -> str:
    for name, (refusing, allowing) in _USER_NAMESPACE_SETTINGS.items():
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text().strip() == refusing:
            return f"an administrator allows them by `sysctl {name.replace('/', '.')}={allowing}`"
    return "run as root, or with CAP_SYS_ADMIN and CAP_NET_ADMIN"


@contextmanager
def namespace() -> Iterator[Namespace]:
    """A fresh namespace with ``lo`` up and IPv6 off. LinkError without the capability."""

    if sys.platform != "linux":
        raise LinkError("network namespaces exist on Linux only")

    def create() -> int:
        _system_call("unshare", _CLONE_NEWNET)
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    try:
        descriptor = _in_thread(create)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EINVAL, errno.ENOSPC, errno.ENOENT):
            raise
        raise LinkError(
            f"network namespaces cannot be made here ({error.strerror}): run as root, or with "
            "CAP_SYS_ADMIN and CAP_NET_ADMIN, on a Linux kernel with CONFIG_NET_NS"
        ) from error
    try:
        fresh = Namespace(descriptor)
        fresh.run(_prepare)
        yield fresh
    finally:
        os.close(descriptor)


def set_address(interface: str, address: str, prefix_length: int) -> None:
    """Give an interface of the current namespace its address and bring it up."""
    with IPRoute() as route:
        index = socket.if_nametoindex(interface)
        route.addr("add", index=index, address=address, prefixlen=prefix_length)
        route.link("set", index=index, state="up")


def allow_window(bdp_bytes: float) -> None:
    """Let TCP in the current namespace grow its buffers to what the path needs.

    TCP advertises about half of its receive buffer, and the sender keeps what is not yet
    acknowledged: four times the bandwidth-delay product serves both with room to spare.
    """
    wanted = min(int(4 * bdp_bytes), _MAX_BUFFER_BYTES)
    for name in ("tcp_rmem", "tcp_wmem"):
        path = _SYSCTL / "ipv4" / name
        least, default, most = map(int, path.read_text().split())
        if most < wanted:
            path.write_text(f"{least} {default} {wanted}")


def congestion_control() -> str:
    """What TCP in the current namespace uses."""
    return (_SYSCTL / "ipv4/tcp_congestion_control").read_text().strip()


def _prepare() -> None:
    # Router solicitations and the like would cross the link when nobody sends anything.
    ipv6 = _SYSCTL / "ipv6/conf/all/disable_ipv6"
    if ipv6.exists():
        ipv6.write_text("1")
    with IPRoute() as route:
        loopback = socket.if_nametoindex("lo")
        route.link("set", index=loopback, state="up")


def _system_call(name: str, *arguments: int) -> None:
    # os.unshare and os.setns exist from Python 3.12 only.
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _in_thread(function: Callable[[], Result]) -> Result:
    outcome: list[Result | BaseException] = []

    def call() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            outcome.append(error)

    thread = threading.Thread(target=call, name="netns")
    thread.start()
    thread.join()
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result

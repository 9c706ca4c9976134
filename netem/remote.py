"""A link of a node's interface as a path to be measured: the other end is another machine.

There processes are started by a command in front of theirs, such as ``ssh gpu-far-1``; the package
must be installed there, and the probes' ports reachable. Closing their standard input, which ssh
passes on, ends them.
"""

import shlex
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from netem.check import link_failures, link_warnings, measure_path
from netem.datagrams import family
from netem.link import LinkError, LinkSpec
from netem.site import LinkCounters, Path, Site, SiteName

_DISCARD_PORT = 9


@dataclass(frozen=True, slots=True)
class RemotePath:
    """This node and one of its peers. ``read`` asks whoever shapes for the counters."""

    applied: LinkSpec
    near: Site
    far: Site
    read: Callable[[], LinkCounters]
    notes: tuple[str, ...] = ()

    def expose(self, site: Site, port: int) -> tuple[str, int]:
        return site.address, port

    def withdraw(self, site: Site, port: int) -> None:
        """Nothing was set up by ``expose``."""

    def prepare(self, spec: LinkSpec) -> None:
        """Nothing of a change takes long here."""

    def apply(self, spec: LinkSpec) -> None:
        raise LinkError(f"the link {spec.name!r} is measured from here, not shaped from here")

    def counters(self) -> LinkCounters:
        return self.read()


def remote_path(
    applied: LinkSpec,
    here: SiteName,
    shell: str,
    peer_address: str,
    python: str,
    read: Callable[[], LinkCounters],
) -> RemotePath:
    """The path from this node, which is the end ``here``, to a peer reached by ``shell``."""
    prefix = shlex.split(shell)

    def popen(argv: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        # Their interpreter and environment are their own; nothing here needs quoting.
        return subprocess.Popen([*prefix, python, *argv[1:]], **options)

    own = Site(here, _own_address(peer_address), subprocess.Popen)
    other = Site("far" if here == "near" else "near", peer_address, popen)
    near, far = (own, other) if here == "near" else (other, own)
    return RemotePath(applied, near, far, read)


def measured(path: Path, flows: int) -> dict[str, Any]:
    """What ``link verify`` says of a path: the check, its failures and its warnings."""
    check = measure_path(path, flows)
    return {
        "check": asdict(check),
        "failures": list(link_failures(check, path.applied)),
        "warnings": list(link_warnings(check, path.applied)),
    }


def _own_address(peer_address: str) -> str:
    """The address this node sends from to the peer; nothing is sent to find it."""
    try:
        with socket.socket(family(peer_address), socket.SOCK_DGRAM) as probe:
            probe.connect((peer_address, _DISCARD_PORT))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LinkError(f"there is no way to {peer_address}: {error.strerror}") from error

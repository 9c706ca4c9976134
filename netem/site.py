"""The two ends of a link, what crossed it, and the seam between the link and its backends.

``near`` is where requests arrive, ``far`` is the other place. A server of a site binds to
``site.address``; the other site reaches it where ``expose`` says. Traffic inside a site does not
touch the link.
"""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from netem.link import LinkError, LinkSpec
from netem.namespace import Namespace

SiteName = Literal["near", "far"]


@dataclass(frozen=True, slots=True)
class Site:
    """One end. ``popen`` takes what ``subprocess.Popen`` takes; the caller owns the process.

    A process still running inside when the link closes stays alive, without a network.
    """

    name: SiteName
    address: str
    popen: Callable[..., "subprocess.Popen[Any]"]

    @property
    def namespace(self) -> Namespace | None:
        """The one ``popen`` starts processes in; None where that is the caller's own."""
        owner = getattr(self.popen, "__self__", None)
        return owner if isinstance(owner, Namespace) else None


@dataclass(frozen=True, slots=True)
class DirectionCounters:
    """One direction since the start: what arrived, what was dropped, what is held now.

    Packets are MTU-sized IP packets and bytes are IP bytes, except on the relay, where packets
    are chunks and bytes are TCP payload.
    """

    bytes: int
    packets: int
    dropped: int
    queued_bytes: int


@dataclass(frozen=True, slots=True)
class LinkCounters:
    """Both directions at ``mono_ns``."""

    mono_ns: int
    near_to_far: DirectionCounters
    far_to_near: DirectionCounters


class Path(Protocol):
    """What a backend gives: two sites and a shaped way between them.

    ``applied`` is what runs, which may be less than what was asked for; ``notes`` says why.
    ``apply`` changes the running link: what is held stays held, counters go on, ``applied``
    follows. It raises LinkError for what the backend cannot do, and the link is as it was then.
    Threads that apply at once do so one after the other.
    """

    @property
    def applied(self) -> LinkSpec: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def near(self) -> Site: ...

    @property
    def far(self) -> Site: ...

    def expose(self, site: Site, port: int) -> tuple[str, int]: ...

    def withdraw(self, site: Site, port: int) -> None: ...

    def prepare(self, spec: LinkSpec) -> None: ...

    def apply(self, spec: LinkSpec) -> None: ...

    def counters(self) -> LinkCounters: ...


@contextmanager
def put_back_on_failure(put_back: Callable[[], None]) -> Iterator[None]:
    """A change in several steps: when one fails, those before it are taken back.

    LinkError says so when that fails too, since then the link is neither what it was nor what it
    was to be.
    """
    try:
        yield
    except (LinkError, OSError) as error:
        try:
            put_back()
        except (LinkError, OSError) as failure:
            raise LinkError(
                f"the link could be changed in part only ({error}) and not be put back "
                f"({failure}): what runs is no description of it; close it and open another"
            ) from error
        raise


def counters_from_answer(answer: dict[str, Any]) -> LinkCounters:
    """The counters a helper process reports."""
    return LinkCounters(
        answer["mono_ns"],
        DirectionCounters(**answer["near_to_far"]),
        DirectionCounters(**answer["far_to_near"]),
    )

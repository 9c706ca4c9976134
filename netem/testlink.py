"""The link under test: opened on the best backend the machine can give, measured, counted.

Order: tc-netem between namespaces; the packet forwarder over TUN between namespaces; the TCP
relay. The first that can be built is used, and the link's notes say why a better one was not.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from pyroute2.netlink.exceptions import NetlinkError

from netem.check import (
    FLOWS,
    RATE_TOLERANCE_ABOVE,
    RATE_TOLERANCE_BELOW,
    RTT_TOLERANCE,
    RTT_TOLERANCE_S,
    LinkCheck,
    link_failures,
    measure_path,
)
from netem.link import LinkError, LinkSpec
from netem.reaping import reap_stale
from netem.relayed import open_relay
from netem.routed import open_netem
from netem.site import LinkCounters, Path, Site, SiteName
from netem.tunnelled import open_forwarder
from netem.variation import LinkSchedule
from netem.variation_run import ScheduleRun

__all__ = [
    "BACKENDS",
    "RATE_TOLERANCE_ABOVE",
    "RATE_TOLERANCE_BELOW",
    "RTT_TOLERANCE",
    "RTT_TOLERANCE_S",
    "BackendName",
    "LinkCheck",
    "LinkCounters",
    "LinkError",
    "LinkSpec",
    "Site",
    "SiteName",
    "TestLink",
    "link_failures",
    "open_link",
]

BackendName = Literal["netem", "forwarder", "relay"]

Opener = Callable[[LinkSpec], AbstractContextManager[Path]]

#: Best first.
BACKENDS: dict[BackendName, Opener] = {
    "netem": open_netem,
    "forwarder": open_forwarder,
    "relay": open_relay,
}


@dataclass(frozen=True)
class TestLink:
    """An open link. ``notes`` says where and why what runs departs from ``spec``.

    ``why`` are those of them that were known before it was built: warnings, backends not used.
    """

    __test__ = False  # pytest takes the name for a test case

    spec: LinkSpec
    backend: BackendName
    why: tuple[str, ...]
    path: Path

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.why, *self.path.notes)

    @property
    def applied(self) -> LinkSpec:
        return self.path.applied

    @property
    def near(self) -> Site:
        return self.path.near

    @property
    def far(self) -> Site:
        return self.path.far

    def expose(self, site: Site, port: int) -> tuple[str, int]:
        """Where the other site reaches a server that listens on ``(site.address, port)``."""
        return self.path.expose(site, port)

    def withdraw(self, site: Site, port: int) -> None:
        """The server that was exposed is gone; connections that stand are not touched."""
        self.path.withdraw(site, port)

    def prepare(self, spec: LinkSpec) -> None:
        """Do beforehand what of ``apply`` can be done."""
        self.path.prepare(spec)

    def apply(self, spec: LinkSpec) -> None:
        """Change the running link; ``applied`` follows. LinkError for what only a new one has."""
        self.path.apply(spec)

    def run_schedule(
        self, schedule: LinkSchedule, start_mono_s: float | None = None
    ) -> ScheduleRun:
        """A context manager in which the link changes as ``schedule`` says; it keeps a log.

        The schedule counts from ``start_mono_s`` of time.monotonic(), by default from its entry.
        """
        return ScheduleRun(self, self.spec, schedule, start_mono_s)

    def counters(self) -> LinkCounters:
        """Totals since the link was opened, the probes of ``verify`` included."""
        return self.path.counters()

    def verify(self, flows: int = FLOWS) -> LinkCheck:
        """Measure round trips, rates and datagrams with processes in both sites (about 6 s)."""
        return measure_path(self.path, flows)


@contextmanager
def open_link(
    spec: LinkSpec, backend: Literal["auto"] | BackendName = "auto"
) -> Iterator[TestLink]:
    """Build the link; everything is gone when the context ends, or the process.

    First what a killed process left of its link is removed. LinkError when the link cannot be
    built: the message says what the machine lacks.
    """
    notes = [*map(str, reap_stale()), *spec.not_applied, *spec.warnings()]
    with ExitStack() as stack:
        if backend == "auto":
            chosen, path = _best(spec, stack, notes)
        else:
            chosen, path = backend, _asked_for(spec, backend, stack)
        yield TestLink(spec, chosen, tuple(notes), path)


def _best(spec: LinkSpec, stack: ExitStack, notes: list[str]) -> tuple[BackendName, Path]:
    for name, opener in BACKENDS.items():
        try:
            return name, _enter(opener, spec, stack)
        except LinkError as error:
            notes.append(f"{name} is not used: {error}")
    raise LinkError("no backend can build this link: " + "; ".join(notes))


def _enter(opener: Opener, spec: LinkSpec, stack: ExitStack) -> Path:
    """Build; what the system refuses on the way, whatever it is, makes the backend unusable."""
    try:
        return stack.enter_context(opener(spec))
    except (OSError, NetlinkError) as error:
        raise LinkError(f"the system refused a step of setting it up: {error}") from error


def _asked_for(spec: LinkSpec, backend: BackendName, stack: ExitStack) -> Path:
    if backend not in BACKENDS:
        raise LinkError(f"there is no link backend {backend!r}; one of {', '.join(BACKENDS)}")
    try:
        return _enter(BACKENDS[backend], spec, stack)
    except LinkError as error:
        names = list(BACKENDS)
        weaker = names[names.index(backend) + 1 :]
        advice = f"; auto would try {' and then '.join(weaker)}" if weaker else ""
        raise LinkError(f"the {backend} backend cannot build the link: {error}{advice}") from error

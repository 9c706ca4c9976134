"""The master's view of a run: its workers, what each has said, and what is lost with one.

A worker is lost when its process ends before it has said ``ended``, or when it has been silent for
``LOST_AFTER_S``. Its rows stay; the rest of its requests have none, and are counted as ``lost``:

    planned = completed + failed + unsent + lost

over all workers. The other workers go on, since their requests are their own.
"""

import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gevent
import msgspec
from gevent import subprocess
from gevent.event import Event

from harness.core import LoadError, Outcome, PrfaasError, ScenarioError
from harness.load.clocks import MAX_BOUND_S, ROUND_TRIPS, SHARED, Offset, drift_fault, offset_of
from harness.load.master import LoadMaster
from harness.load.replay import lag_p99_s
from harness.load.spool import Row, Spool

#: Silence after which a worker counts as lost: it sends a heartbeat a second.
LOST_AFTER_S = 20.0
_WATCH_S = 0.2
#: One answer to a question about the clock.
_ANSWER_S = 5.0
_INSTANTS = (
    "planned_mono_ns",
    "sent_mono_ns",
    "first_byte_mono_ns",
    "first_token_mono_ns",
    "end_mono_ns",
)


@dataclass(slots=True)
class Member:
    """One worker. One that is ``here`` has a process; rows of the others come to ``spool``."""

    worker: int
    here: bool
    spool_path: Path
    num_planned: int = 0
    process: "subprocess.Popen[bytes] | None" = None
    name: str | None = None
    host: str = ""
    shared_clock: bool = True
    clock: Offset = SHARED
    clock_after: Offset = SHARED
    spool: Spool | None = None
    samples: Any = None
    listening: bool = False
    prepared: bool = False
    ended: bool = False
    lost: str | None = None
    #: It looked lost the last time; what it said before may still be on its way.
    fading: bool = False
    counts: dict[str, int] = field(
        default_factory=lambda: {"sent": 0, "completed": 0, "failed": 0, "unsent": 0}
    )
    lags_ns: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def over(self) -> bool:
        return self.ended or self.lost is not None


class Crew:
    """All workers of one run; what a single ``Replay`` is where there is one."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.runner: LoadMaster | None = None
        self.error: BaseException | None = None
        self._changed = Event()
        self._asked = 0
        self._answered = Event()
        self._answer_ns = 0
        self._halted = False
        self._started = False

    @property
    def num_sent(self) -> int:
        return self._total("sent")

    @property
    def num_completed(self) -> int:
        return self._total("completed")

    @property
    def num_failed(self) -> int:
        return self._total("failed")

    @property
    def num_unsent(self) -> int:
        return self._total("unsent")

    @property
    def num_lost(self) -> int:
        """Requests without a row, once all is over."""
        planned = sum(member.num_planned for member in self.members)
        return planned - self.num_completed - self.num_failed - self.num_unsent

    @property
    def send_lag_p99_s(self) -> float | None:
        """Over all workers that ended; a lost one's lags are in its rows."""
        together = array("q")
        for member in self.members:
            together.extend(member.lags_ns)
        return lag_p99_s(together)

    @property
    def lost(self) -> list[Member]:
        return [member for member in self.members if member.lost is not None]

    def start_at(self, start_mono_ns: int) -> None:
        """Let planned time 0 be ``start_mono_ns`` of this host's CLOCK_MONOTONIC everywhere."""
        if self._started:
            self.fail(LoadError("the run was started twice; start_mono_ns is given once."))
            return
        self._started = True
        for member in self.members:
            self._tell(member, "begin", {"start_mono_ns": start_mono_ns + member.clock.offset_ns})

    def stop(self) -> None:
        """Halt every worker; each writes its rows and ends. Repeatable."""
        if not self._halted:
            self._halted = True
            for member in self.members:
                self._tell(member, "halt", {})
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Stop the run because of ``error``, which ``wait`` then raises."""
        if self.error is None:
            self.error = error
        self.stop()

    def give_up(self) -> None:
        """Whoever is not ready when the run is stopped will not be waited for."""
        for member in self.members:
            if not member.prepared and not member.over:
                member.lost = "the run was stopped before it was ready"

    def wait(self) -> None:
        """Until every worker has ended or is lost. Raises what made the run fail."""
        while not all(member.over for member in self.members):
            self._wait_for_change()
        if self.error is not None:
            raise self.error
        for member in self.lost:
            member.counts |= _counted(member.spool_path)
        if len(self.lost) == len(self.members):
            raise LoadError(
                f"every load worker was lost, the first because {self.members[0].lost}; the rows "
                "of what had ended are in the spools."
            )

    def wait_until(self, attribute: str, patience_s: float, what: str) -> bool:
        """Until each member has it; False when the run is halted first. LoadError when a worker is
        lost on the way or time is up."""
        give_up_s = time.monotonic() + patience_s
        while not all(getattr(member, attribute) for member in self.members):
            if self._halted:
                return False
            for member in self.lost:
                raise LoadError(
                    f"load worker {member.worker} was lost before the run: {member.lost}."
                )
            if time.monotonic() > give_up_s:
                waiting = [m.worker for m in self.members if not getattr(m, attribute)]
                raise LoadError(f"load workers {waiting} did not {what} within {patience_s:g} s.")
            self._wait_for_change()
        return not self._halted

    def admit(self, name: str, said: dict[str, Any], identity: str | None) -> str | None:
        """Give a worker that proved to know the token its place; else why it gets none."""
        number = said.get("worker")
        started_here = number is not None
        free = [one for one in self.members if one.name is None and one.here == started_here]
        places = [one for one in free if not started_here or one.worker == number]
        if not places:
            return "the run has no place left for it"
        place = places[0]
        place.name = name
        place.host = str(said.get("host"))[:255]
        place.shared_clock = identity is not None and said.get("clock") == identity
        self._changed.set()
        return None

    def heard(self, name: str, kind: str, data: Any) -> None:
        """What a worker said. Called by Locust's listener, which would swallow an exception."""
        (member,) = [one for one in self.members if one.name == name]
        try:
            self._take(member, kind, data)
        except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            self.fail(LoadError(f"load worker {member.worker}: {kind}: {error!r}"))
        self._changed.set()

    def watch(self) -> None:
        """Notice who is lost. A greenlet of its own."""
        assert self.runner is not None
        while True:
            gevent.sleep(_WATCH_S)
            for member in self.members:
                if not member.over:
                    lost = self._why_lost(member, self.runner)
                    if lost is not None and member.fading:
                        member.lost = lost
                        self._changed.set()
                    member.fading = lost is not None

    def measure_clocks(self, attribute: str) -> None:
        """Measure the offset of each worker that does not share this host's clock.

        LoadError where a bound is too wide; a worker that is lost is passed over.
        """
        for member in self.members:
            if member.shared_clock or member.lost is not None:
                continue
            trips: list[tuple[int, int, int]] = []
            while len(trips) < ROUND_TRIPS and (trip := self._round_trip(member)):
                trips.append(trip)
            if not trips:
                if member.lost is None and attribute == "clock":
                    raise LoadError(f"load worker {member.worker} does not tell its clock.")
                continue
            offset = offset_of(trips)
            setattr(member, attribute, offset)
            if offset.bound_ns > MAX_BOUND_S * 1e9:
                raise LoadError(
                    f"the clock of load worker {member.worker} on {member.host} is known only "
                    f"to {offset.bound_ns / 1e6:.1f} ms, bound {MAX_BOUND_S * 1e3:g} ms: the way "
                    "to it is too long or too busy. Take a worker that is nearer."
                )

    def clock_faults(self) -> dict[int, str]:
        """What is wrong with whose clock, by worker, after the run."""
        faults = {}
        for member in self.members:
            if not member.shared_clock and member.lost is None:
                fault = (
                    "its clock could not be measured after the run"
                    if member.clock_after is SHARED
                    else drift_fault(member.clock, member.clock_after)
                )
                if fault is not None:
                    faults[member.worker] = f"on {member.host}, {fault}"
        return faults

    def _take(self, member: Member, kind: str, data: Any) -> None:
        if kind in ("listening", "prepared"):
            setattr(member, kind, True)
        elif kind == "clock":
            if data["number"] == self._asked:  # not one that was given up
                self._answer_ns = int(data["mono_ns"])
                self._answered.set()
        elif kind in ("progress", "ended"):
            member.counts = {name: int(data[name]) for name in member.counts}
            if kind == "ended":
                member.lags_ns = array("q", data["lags_ns"])
                member.ended = True
        elif kind == "rows" and member.spool is not None:
            for line in data["lines"]:
                member.spool.append(_shifted(msgspec.json.decode(line, type=Row), member.clock))
        elif kind == "sample" and member.samples is not None:
            one = msgspec.json.decode(data["line"], type=dict[str, Any])
            member.samples.write(one | {"mono_ns": one["mono_ns"] - member.clock.offset_ns})
        elif kind == "broken":
            error = ScenarioError if data["status"] == ScenarioError.exit_status else LoadError
            raised: PrfaasError = error(f"load worker {member.worker}: {data['why']}")
            self.error = self.error or raised
            self.stop()

    def _why_lost(self, member: Member, runner: LoadMaster) -> str | None:
        if member.process is not None and (status := member.process.poll()) is not None:
            how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
            return f"its process {how}"
        heard_s = runner.heard_s.get(member.name or "")
        if heard_s is not None and time.monotonic() - heard_s > LOST_AFTER_S:
            return f"nothing was heard of it for {LOST_AFTER_S:g} s"
        return None

    def _round_trip(self, member: Member) -> tuple[int, int, int] | None:
        self._asked += 1
        self._answered.clear()
        sent_ns = time.monotonic_ns()
        self._tell(member, "clock", {"number": self._asked})
        if not self._answered.wait(_ANSWER_S):
            return None
        return sent_ns, self._answer_ns, time.monotonic_ns()

    def _tell(self, member: Member, kind: str, data: dict[str, Any]) -> None:
        if self.runner is not None and member.name is not None:
            self.runner.send_message(kind, data, member.name)

    def _total(self, name: str) -> int:
        return sum(member.counts[name] for member in self.members)

    def _wait_for_change(self) -> None:
        self._changed.wait(1.0)
        self._changed.clear()


class _Ended(msgspec.Struct):
    outcome: Outcome


def _counted(path: Path) -> dict[str, int]:
    """The outcomes in a lost worker's spool; its last line may have no end."""
    counts = {"completed": 0, "failed": 0, "unsent": 0}
    decode = msgspec.json.Decoder(_Ended).decode
    if path.exists():
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    counts[decode(line).outcome] += 1
                except msgspec.DecodeError as error:
                    raise LoadError(f"{path} holds a line that is no row: {error}.") from error
    return counts


def _shifted(row: Row, clock: Offset) -> Row:
    """A row whose instants are of the worker's clock, in the master's."""
    if clock.offset_ns:
        for name in _INSTANTS:
            at_ns = getattr(row, name)
            if at_ns is not None:
                setattr(row, name, at_ns - clock.offset_ns)
        row.chunk_mono_ns = [at_ns - clock.offset_ns for at_ns in row.chunk_mono_ns]
    return row

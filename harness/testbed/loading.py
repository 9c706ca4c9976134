"""The load of one cell: started at the near site, begun with the gateway, followed to its end.

The load process answers for its workers, if it has several (``harness.load.distributed``). A worker
that is lost does not end the run: its records stay, and the verdict says that it was lost.
"""

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness.core import LoadError
from harness.load.plan import Plan, write_plan
from harness.record.run_directory import Cell, RunDirectory
from harness.scenario import Scenario
from harness.testbed.children import GRACE_S, Child, Children
from harness.testbed.sampler import LinkSampler
from netem.testlink import TestLink
from netem.variation import LinkSchedule
from netem.variation_run import Applied

#: Interpreter, imports, prompts, and for several workers that they find each other.
READY_TIMEOUT_S = 180.0
#: From the order to start until the first planned instant, so that no process is late for it.
LEAD_S = 0.5

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the load process said at its end, the run's planned origin, and how the link changed
    since, in wall seconds. ``lost`` requests have no row: their worker died. ``workers`` has one
    entry for each of several workers."""

    start_mono_ns: int
    end_mono_ns: int
    completed: int
    failed: int
    unsent: int
    link_changes: tuple[Applied, ...]
    lost: int = 0
    workers: tuple[dict[str, Any], ...] = ()

    def workers_lost(self) -> tuple[str, ...]:
        """One phrase for each worker that was lost."""
        return tuple(
            f"load worker {one['worker']} of {len(self.workers)}: {one['lost']}"
            for one in self.workers
            if one.get("lost")
        )

    def clock_faults(self) -> tuple[str, ...]:
        """One phrase for each worker whose clock moved."""
        return tuple(
            f"load worker {one['worker']} {one['clock_fault']}"
            for one in self.workers
            if one.get("clock_fault")
        )


@dataclass(frozen=True, slots=True)
class Loading:
    """A cell's load and what it meets: the gateway at ``address``, over an open link.

    ``web_fd``: a listening socket that shows Locust's web UI while the load runs.
    """

    scenario: Scenario
    run: RunDirectory
    cell: Cell
    link: TestLink
    children: Children
    gateway: Child
    address: tuple[str, int]
    api_key: str
    web_fd: int | None = None

    def replay(self, salt: str, progress: Progress, started: Callable[[int], None]) -> LoadResult:
        """Replay the run's schedule; ``started`` is told the planned origin. Raises PrfaasError."""
        load, watch = self._start(salt)
        start_ns = time.monotonic_ns() + round(LEAD_S * 1e9)
        link_spool = self.run.spool_path(self.cell, "link").absolute()
        with (
            LinkSampler(self.link, link_spool) as sampler,
            self.link.run_schedule(self._link_schedule(), start_ns / 1e9) as variation,
        ):
            started(start_ns)
            self.gateway.tell({"start_mono_ns": start_ns})
            load.tell({"start_mono_ns": start_ns})
            finished = watch.until_finished(sampler, progress, self._patience_s())
        if finished["unsent"]:
            raise LoadError(
                f"the load stopped with {finished['unsent']} requests unsent, which nobody asked "
                f"it to; {load.last_words()}"
            )
        end_ns = time.monotonic_ns()
        self.children.stop(load)
        return LoadResult(
            start_ns,
            end_ns,
            finished["completed"],
            finished["failed"],
            finished["unsent"],
            variation.log,
            finished["lost"],
            watch.all_workers(),
        )

    def _start(self, salt: str) -> tuple[Child, "_Watch"]:
        plan_path = self.run.cell_path(self.cell) / "plan.json"
        popen = self.link.near.popen
        if self.web_fd is not None:
            popen = functools.partial(popen, pass_fds=(self.web_fd,))
        realtime = self.scenario.testbed.realtime and sys.platform == "linux"
        try:
            write_plan(self._plan(salt), plan_path)
            load = self.children.start(
                "load",
                popen,
                ["-m", "harness.load", str(plan_path)],
                self.run.cell_path(self.cell) / "load.log",
                LoadError,
                1 if realtime else 0,
            )
            watch = _Watch(self.children, load, self.scenario.load.concurrency is not None)
            watch.until_ready()
        finally:
            plan_path.unlink(missing_ok=True)  # it holds the gateway's key
        return load, watch

    def _plan(self, salt: str) -> Plan:
        scenario, (host, port) = self.scenario, self.address
        return Plan(
            host=host,
            port=port,
            path="/v1/completions",
            api_key=self.api_key,
            model=scenario.model.name,
            time_scale=scenario.scale.time,
            schedule_path=str(self.run.schedule_path.absolute()),
            spool_path=str(self.run.spool_path(self.cell, "client").absolute()),
            samples_path=str(self.run.spool_path(self.cell, "load").absolute()),
            salt=salt,
            request_timeout_s=scenario.testbed.request_timeout_s / scenario.scale.time,
            concurrency=scenario.load.concurrency,
            think_time_s=scenario.load.think_time_s,
            workers=scenario.load.workers,
            web_fd=self.web_fd,
        )

    def _link_schedule(self) -> LinkSchedule:
        """The link's changes on the wall clock; none where it is steady."""
        scale, schedule = self.scenario.scale, self.scenario.link_schedule
        return LinkSchedule(()) if schedule is None else schedule.scaled(scale.time, scale.bytes)

    def _patience_s(self) -> float:
        """How long it may be until the load ends or, in a closed loop, until the next change."""
        scenario = self.scenario
        last_s = self.run.read_schedule()[-1].planned_s + scenario.load.think_time_s
        most_s = last_s + scenario.testbed.request_timeout_s
        return LEAD_S + most_s / scenario.scale.time + GRACE_S


@dataclass(slots=True)
class _Watch:
    """What the load says, while all children are watched: who dies ends the run."""

    children: Children
    load: Child
    closed_loop: bool
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)

    def until_ready(self) -> None:
        self._await("ready", READY_TIMEOUT_S, None, None)

    def until_finished(
        self, sampler: LinkSampler, progress: Progress, patience_s: float
    ) -> dict[str, Any]:
        return self._await("finished", patience_s, sampler, progress)

    def all_workers(self) -> tuple[dict[str, Any], ...]:
        return tuple(self.workers[number] for number in sorted(self.workers))

    def _await(
        self,
        event: str,
        patience_s: float,
        sampler: LinkSampler | None,
        progress: Progress | None,
    ) -> dict[str, Any]:
        deadline_s = time.monotonic() + patience_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if sampler is not None and sampler.error is not None:
                raise sampler.error
            news = self.children.next_event(min(left_s, 1.0))
            if news is None or news[0] is not self.load:
                continue
            said = news[1]
            if said["event"] == event:
                return said
            if said["event"] in ("worker", "worker_after"):
                one = {key: value for key, value in said.items() if key != "event"}
                if said["event"] == "worker_after":
                    one["offset_after_ns"] = one.pop("offset_ns")
                    one["bound_after_ns"] = one.pop("bound_ns")
                self.workers.setdefault(said["worker"], {}).update(one)
            elif said["event"] == "progress" and progress is not None:
                progress(said["sent"], said["completed"], said["failed"])
                if self.closed_loop:  # how long it takes is the server's to say
                    deadline_s = time.monotonic() + patience_s
        raise LoadError(
            f"the load said nothing of {event!r} in time: every request should have ended by then, "
            f"whatever became of it; {self.load.last_words()}"
        )

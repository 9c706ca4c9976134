"""Applies a schedule to a running link, on time, and keeps a log of what was applied when.

A thread waits for each step and applies it; whatever has an ``apply`` can be changed. Steps that
are late are applied all the same and in order, and the log tells how late each was: a change takes
about a millisecond, so what is meant to last less lasts longer. When the run ends, early or not,
the link becomes what it was before.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from netem.link import LinkError, LinkSpec
from netem.variation import LinkSchedule, Step


class Changeable(Protocol):
    """A running link."""

    def prepare(self, spec: LinkSpec) -> None:
        """Do beforehand what of ``apply`` can be done."""

    def apply(self, spec: LinkSpec) -> None: ...


@dataclass(frozen=True, slots=True)
class Applied:
    """One step: when it was due and when the link had taken it, from the start, and what it was."""

    planned_s: float
    applied_s: float
    change: str


class ScheduleRun:
    """A schedule under way, as a context manager; LinkError at its end when a step failed.

    ``base`` is the link as described, which runs when it begins; ``start_mono_s`` is the instant
    of time.monotonic() from which the schedule counts, by default that of the entry.
    """

    def __init__(
        self,
        link: Changeable,
        base: LinkSpec,
        schedule: LinkSchedule,
        start_mono_s: float | None = None,
    ) -> None:
        self._link, self._base = link, base
        self._steps: Sequence[Step] = schedule.steps(base)
        self._start_mono_s = start_mono_s
        self._stop = threading.Event()
        self._done = threading.Event()
        self._log: list[Applied] = []
        #: What ended the schedule early; raised at the end of the context.
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="link-schedule", daemon=True)

    @property
    def log(self) -> tuple[Applied, ...]:
        """What was applied so far."""
        return tuple(self._log)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the last step is applied or one failed; False when the time is up before."""
        return self._done.wait(timeout_s)

    def __enter__(self) -> Self:
        if self._start_mono_s is None:
            self._start_mono_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._log:
            try:
                self._link.apply(self._base)
            except (LinkError, OSError) as failure:
                self.error = self.error or failure  # the first failure is the one to see
        if self.error is not None and error is None:
            raise self.error

    def _run(self) -> None:
        assert self._start_mono_s is not None
        try:
            for step in self._steps:
                self._link.prepare(step.spec)
                due_s = self._start_mono_s + step.at_s
                if self._stop.wait(max(0.0, due_s - time.monotonic())):
                    return
                self._link.apply(step.spec)
                applied_s = time.monotonic() - self._start_mono_s
                self._log.append(Applied(step.at_s, applied_s, step.words))
        except (LinkError, OSError) as failure:
            # A thread's exception reaches nobody; the end of the context raises it.
            self.error = failure
        finally:
            self._done.set()

"""The requests of a decode instance that step together: what continuous batching does.

    step k of the instance lasts T_decode(batch, mean context)

where batch is how many requests run in it and context is prompt plus generated tokens: the plan of
the emulated engine (``harness.engine.stepped``). A step takes those who were granted a slot before
it began; who comes meanwhile joins the next one. An instance that was idle begins with whoever is
granted a slot at that instant.

Between two changes, that somebody joins or ends, the batch stays and the mean context grows by a
token a step. All steps of such a stretch are one cumulative sum; only its end is an event.
"""

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from harness.profile import Profile
from harness.simulator.agenda import Agenda
from harness.simulator.records import Live

FloatArray = npt.NDArray[np.float64]

#: Steps that are planned at once: a bound on memory, and on what a newcomer makes void.
_MOST_STEPS = 1024
#: So few steps are faster one by one.
_FEW_STEPS = 6


class SteppingBatch:
    """One instance's. ``ended`` is called with each request at the end of its last step."""

    def __init__(
        self, agenda: Agenda, profile: Profile, ended: Callable[[Live, float], None]
    ) -> None:
        self._agenda = agenda
        self._profile = profile
        self._ended = ended
        #: By the last step of each, then in the order in which they joined.
        self._running: list[tuple[int, int, Live]] = []
        self._joining: list[Live] = []
        self._joined = 0
        #: Steps made before the stretch, and tokens of all contexts at its beginning.
        self._steps = self._tokens = 0
        #: When each of its steps begins, and the last ends  # [planned steps + 1]
        self._bounds: FloatArray = np.zeros(1)
        #: Steps to make before the next change, which the last of the plans expects.
        self._until = 0
        self._plan = 0
        self._factor = 1.0

    def join(self, live: Live, now_s: float) -> None:
        """A request of more than one token that was granted its slot now."""
        self._joining.append(live)
        if len(self._joining) > 1:
            return
        if not self._running:
            self._until, self._bounds = 0, np.array([now_s])
            self._expect(0)
            return
        step = int(np.searchsorted(self._bounds, now_s, side="right"))
        if step < self._until:
            self._expect(step)

    def stop(self) -> None:
        """The instance has died, and what was to happen with it."""
        self._plan += 1

    def slow(self, factor: float, now_s: float) -> None:
        """Steps that begin from now on take ``factor`` times as long as the profile says."""
        self._factor = factor
        if self._running:
            step = int(np.searchsorted(self._bounds, now_s, side="right"))
            if step < self._until:
                self._expect(step)

    def _expect(self, step: int) -> None:
        """The next change is at the end of a step of the stretch; any other expected is void."""
        self._until = step
        self._plan += 1
        self._agenda.at(float(self._bounds[step]), self._change, self._plan)

    def _change(self, plan: int, now_s: float) -> None:
        if plan != self._plan:
            return
        self._steps += self._until
        self._tokens += self._until * len(self._running)
        done: list[Live] = []
        while self._running and self._running[0][0] <= self._steps:
            live = heapq.heappop(self._running)[2]
            self._tokens -= live.input_tokens + live.output_tokens
            done.append(live)
        self._enter(now_s)
        # Slots are given on when the next step has begun: who gets one joins the step after it.
        for live in done:
            self._ended(live, now_s)

    def _enter(self, now_s: float) -> None:
        """Begin a stretch with those who run and those who join."""
        entering, self._joining = self._joining, []
        for live in entering:
            self._joined += 1
            end = self._steps + live.output_tokens - 1
            heapq.heappush(self._running, (end, self._joined, live))
            self._tokens += live.input_tokens + 1
        if not self._running:
            return
        self._bounds = self._planned(now_s, min(self._running[0][0] - self._steps, _MOST_STEPS))
        for live in entering:
            live.second_s = float(self._bounds[1])
        self._expect(len(self._bounds) - 1)

    def _planned(self, now_s: float, count: int) -> FloatArray:
        """When each of the next ``count`` steps begins, and the last ends."""  # [count + 1]
        batch, tokens, profile = len(self._running), self._tokens, self._profile
        bounds = np.empty(count + 1)
        bounds[0] = now_s
        if count <= _FEW_STEPS:
            for k in range(count):
                now_s += self._factor * profile.decode_step_s(batch, (tokens + batch * k) / batch)
                bounds[k + 1] = now_s
            return bounds
        contexts = (tokens + batch * np.arange(count)) / batch
        bounds[1:] = self._factor * profile.decode_step_s_array(batch, contexts)
        return np.cumsum(bounds)

"""What will happen in a simulation, in time order."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

#: What happens to something at an instant, in scenario seconds.
Happen = Callable[[Any, float], None]


class Agenda:
    """Events at one instant happen in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Happen, Any]] = []
        self._sequence = 0

    def at(self, when_s: float, happen: Happen, what: Any) -> None:
        """Let ``happen(what, when_s)`` be called then."""
        self._sequence += 1
        heappush(self._heap, (when_s, self._sequence, happen, what))

    def until(self, when_s: float) -> None:
        """Let happen what is due by an instant, which then is now."""
        heap = self._heap
        while heap and heap[0][0] <= when_s:
            self.now_s, _, happen, what = heappop(heap)
            happen(what, self.now_s)
        self.now_s = when_s

    def finish(self) -> None:
        """Let everything happen, and what comes of it."""
        heap = self._heap
        while heap:
            self.now_s, _, happen, what = heappop(heap)
            happen(what, self.now_s)

"""A closed loop: N requests in flight, of which each that ends lets the next one leave.

As the live client has it (``harness.load.replay``): N slots take the requests in order. A slot is
free at 0, then whenever its request is over, whatever became of it; the next request is planned for

    the instant the slot became free + think_time_s

and the first N for 0. So at most N are in flight, and over a long run, by Little's law,

    N = throughput x (mean time of a request + think_time_s).
"""

from collections.abc import Callable, Sequence

from harness.core import Request
from harness.simulator.agenda import Agenda

#: Takes (place in the schedule, now_s, input_tokens, output_tokens).
Arrive = Callable[[int, float, int, int], None]


class ClosedLoop:
    """Source of arrivals. ``planned_s`` of the schedule, which are all 0, say nothing."""

    def __init__(
        self,
        schedule: Sequence[Request],
        slots: int,
        think_time_s: float,
        agenda: Agenda,
        arrive: Arrive,
    ) -> None:
        self._schedule = schedule
        self._slots = slots
        self._think_time_s = think_time_s
        self._agenda = agenda
        self._arrive = arrive
        self._next = 0

    def begin(self) -> None:
        """All slots are free."""
        for _ in range(min(self._slots, len(self._schedule))):
            self._take(0.0)

    def ended(self, now_s: float) -> None:
        """A request is over: its slot takes the next one, where one is left."""
        if self._next < len(self._schedule):
            self._take(now_s + self._think_time_s)

    def _take(self, when_s: float) -> None:
        self._agenda.at(when_s, self._leave, self._next)
        self._next += 1

    def _leave(self, number: int, now_s: float) -> None:
        request = self._schedule[number]
        self._arrive(number, now_s, request.input_tokens, request.output_tokens)

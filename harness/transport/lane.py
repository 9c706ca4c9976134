"""Threads that move KV: each runs an event loop of its own, apart from its user's.

Reading into place, writing and checksums release the interpreter's lock, so lanes run in parallel;
a connection belongs to one lane for its life. One thread can fill a core, not every link: as a rule
of thumb 2 to 3 GB/s a lane.

The loop is asyncio's own: uvloop (libuv) watches a socket no more once it has been reset, so what
has not been read by then, the reset included, is never heard of. For some hundred events a second
it costs nothing that shows.

An error that nobody expected in a lane goes to the exception handler of its user's loop.
"""

import asyncio
import threading
from collections.abc import Callable
from itertools import cycle
from types import TracebackType
from typing import Any, Self


class Lane:
    """One thread and its loop. ``submit`` is the way in from other threads."""

    def __init__(self, name: str, user: asyncio.AbstractEventLoop) -> None:
        self.loop = asyncio.SelectorEventLoop()
        self.loop.set_exception_handler(lambda _, context: self.report(context))
        self._user = user
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def submit(self, call: Callable[[], object]) -> None:
        """Run ``call`` in the lane; order is kept."""
        self.loop.call_soon_threadsafe(call)

    def report(self, context: dict[str, Any]) -> None:
        """Tell the user's loop of an error, as a loop tells its exception handler."""
        try:
            self._user.call_soon_threadsafe(self._user.call_exception_handler, context)
        except RuntimeError:  # that loop has been closed
            self.loop.default_exception_handler(context)

    @property
    def here(self) -> bool:
        """Whether the caller runs in this lane."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the thread after what was submitted before."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


class Lanes:
    """Context manager: ``count`` lanes, handed out in turn; started when the first is asked for."""

    def __init__(self, count: int = 1, name: str = "kv") -> None:
        assert count >= 1
        self._count, self._name = count, name
        self._lanes: list[Lane] = []
        self._turns = cycle(range(count))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def next(self) -> Lane:
        """The lane whose turn it is; called on the user's loop, which hears of errors."""
        if not self._lanes:
            user = asyncio.get_running_loop()
            self._lanes = [Lane(f"{self._name}-{index}", user) for index in range(self._count)]
        return self._lanes[next(self._turns)]

    def stop(self) -> None:
        """End every thread. Connections must have been closed."""
        for lane in self._lanes:
            lane.stop()
        self._lanes = []

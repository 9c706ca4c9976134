"""Things that are due a constant time after they were noted: one timer for all of them.

A timer each would keep what it is about, and all that hangs on it, until it rings, long after it
has been dealt with.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """``expire`` is called on ``loop``, without the lock, with each key that nobody discarded."""

    def __init__(
        self,
        after_s: float,
        loop: asyncio.AbstractEventLoop,
        lock: threading.RLock,
        expire: Callable[[Key], None],
    ) -> None:
        self._after_s, self._loop, self._lock, self._expire = after_s, loop, lock, expire
        self._due_s: dict[Key, float] = {}  # in the order in which they are due
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, key: Key) -> None:
        """From any thread that holds the lock; a key that is there already starts anew."""
        self._due_s.pop(key, None)
        self._due_s[key] = time.monotonic() + self._after_s
        if len(self._due_s) == 1:
            self._loop.call_soon_threadsafe(self._arm)

    def discard(self, key: Key) -> None:
        """With the lock held; does nothing where the key is not there."""
        self._due_s.pop(key, None)

    def stop(self) -> None:
        """Forget every key; on the loop, with the lock held."""
        self._due_s.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        with self._lock:
            if self._timer is None and self._due_s:
                left_s = next(iter(self._due_s.values())) - time.monotonic()
                self._timer = self._loop.call_later(max(0.0, left_s), self._ring)

    def _ring(self) -> None:
        with self._lock:
            self._timer = None
            now_s = time.monotonic()
            expired = [key for key, due_s in self._due_s.items() if due_s <= now_s]
            for key in expired:
                del self._due_s[key]
        self._arm()
        for key in expired:
            self._expire(key)

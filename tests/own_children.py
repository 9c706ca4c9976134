"""The processes that a test has started, without those that Python itself keeps."""

import psutil


def own_children() -> list[psutil.Process]:
    """Children of this process. What ``multiprocessing`` leaves behind a pool for as long as the
    process lives (its resource tracker) is no test's."""
    tracker = "multiprocessing.resource_tracker"
    return [
        child
        for child in psutil.Process().children()
        if not any(tracker in word for word in child.cmdline())
    ]

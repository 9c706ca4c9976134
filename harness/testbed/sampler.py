"""Samples of the link's counters, written to the run while it goes on."""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.child import Spool
from netem.link import LinkError
from netem.testlink import TestLink

PERIOD_S = 0.05


class LinkSampler:
    """Context manager around a thread that appends both directions' counters to a spool."""

    def __init__(self, link: TestLink, path: Path) -> None:
        self._link = link
        self._path = path
        self._stop = threading.Event()
        #: What ended the sampling early; the run cannot go on without its link.
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._sample, name="link-sampler", daemon=True)

    def __enter__(self) -> Self:
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
        if self.error is not None and error is None:
            raise self.error

    def _sample(self) -> None:
        try:
            self._append_samples()
        except (LinkError, OSError) as failure:
            # A thread's exception reaches nobody: whoever watches the run raises it.
            self.error = failure

    def _append_samples(self) -> None:
        due_s = time.monotonic()
        with Spool(self._path) as spool:
            while not self._stop.is_set():
                counters = self._link.counters()
                for direction in ("far_to_near", "near_to_far"):
                    one = getattr(counters, direction)
                    spool.write(
                        {
                            "kind": "link",
                            "mono_ns": counters.mono_ns,
                            "direction": direction,
                            "bytes_total": one.bytes,
                            "packets_total": one.packets,
                            "dropped_total": one.dropped,
                            "queued_bytes": one.queued_bytes,
                        }
                    )
                due_s = max(due_s + PERIOD_S, time.monotonic())
                self._stop.wait(max(0.0, due_s - time.monotonic()))

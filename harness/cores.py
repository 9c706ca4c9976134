"""Calls spread over the cores of this machine, in processes of their own, results in order.

A worker is a new interpreter (spawn), so that a call sees nothing but its arguments: the same
results with any number of workers. It ignores Ctrl-C, which is its parent's to act on, and ends
when its parent does, however that died.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Self, TypeVar

from harness.core import PrfaasError

A = TypeVar("A")
R = TypeVar("R")


class Cores:
    """Context manager. With one worker calls run in this process, and nothing is started."""

    def __init__(self, workers: int | None = None) -> None:
        """``workers`` processes, by default one for each core that this process may use."""
        self.workers = workers or len(os.sched_getaffinity(0))
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        self._others = set(multiprocessing.active_children())
        if self.workers > 1:
            self._pool = self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is None:
            return
        if kind is not None:  # as after Ctrl-C: nobody waits for what is still being computed
            for child in set(multiprocessing.active_children()) - self._others:
                child.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_settle_in,
        )

    def map(self, call: Callable[[A], R], arguments: Iterable[A]) -> list[R]:
        """``call`` of each argument, in their order. The first call that fails raises here.

        PrfaasError where a worker died.
        """
        if self._pool is None:
            return [call(argument) for argument in arguments]
        try:
            return list(self._pool.map(call, arguments))
        except BrokenProcessPool as error:
            raise PrfaasError(
                f"One of {self.workers} worker processes died, as where memory is short or it was "
                "killed; what it was to compute is lost. Start again."
            ) from error

    def ended(
        self, call: Callable[[A], R], arguments: Iterable[A]
    ) -> Iterator[tuple[A, Future[R]]]:
        """Each argument with its ended call, in any order, also where the call raised.

        Arguments are taken as there is room: at most two calls a worker are under way. One worker
        is a process of its own here. BrokenProcessPool, raised or in a future, where a worker died.
        """
        pool = self._pool = self._pool or self._start()
        under_way: dict[Future[R], A] = {}
        for argument in arguments:
            under_way[pool.submit(call, argument)] = argument
            if len(under_way) >= 2 * self.workers:
                yield from _done(under_way)
        while under_way:
            yield from _done(under_way)


def _done(under_way: dict[Future[R], A]) -> Iterator[tuple[A, Future[R]]]:
    """Takes out what has ended, one call at least."""
    for future in wait(under_way, return_when=FIRST_COMPLETED).done:
        yield under_way.pop(future), future


def _settle_in() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker was started by somebody"
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: multiprocessing.process.BaseProcess) -> None:
    """The queue of calls stays open on both ends in here, so that its end would never be seen."""
    parent.join()
    os._exit(1)

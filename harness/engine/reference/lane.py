"""One thread that computes, beside the event loop: torch lets go of the interpreter in its kernels.

All of an instance's calls run there one after another, so that nothing of its cache is touched by
two at once. What torch throws becomes an EngineError of the request, or of the batch.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from harness.core import EngineError

Result = TypeVar("Result")


class Lane:
    """``close`` waits for the call that runs and drops those that wait."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"compute-{name}")

    async def run(self, call: Callable[[], Result]) -> Result:
        """The call's result. A caller that is cancelled is so after the call has ended, so that
        what it used can be used again."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, call)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            if not running.cancelled():
                running.exception()  # looked at: nobody else will
            raise
        except RuntimeError as error:  # torch's own kind, out of memory among them
            raise EngineError(f"{self._name}: torch failed: {error}") from error

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

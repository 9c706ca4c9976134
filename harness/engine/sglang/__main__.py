"""``python -m harness.engine.sglang``: a launcher, configured by its first line of stdin.

It says ``ready`` with ports, versions and what the version lacks, or ``failed`` with the server and
the phase; and ``failed`` later, when a server has died. It ends, and its servers with it, when
stdin does, or by SIGTERM.
"""

import asyncio
import signal
import sys

from harness.child import each_order, open_orders, read_config, run_child, tell
from harness.engine.sglang.config import LauncherConfig
from harness.engine.sglang.launcher import Launcher


async def serve() -> None:
    """Hold the servers until stdin ends."""
    orders = await open_orders()
    config = await read_config(orders, LauncherConfig)
    ending = asyncio.create_task(_until_told_to_end(orders))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.cancel)
    launcher = Launcher(config)
    starting = asyncio.create_task(launcher.open())
    await asyncio.wait((ending, starting), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting,))
        return
    await starting
    try:
        await launcher.record_servers()
        tell("ready", **launcher.told())
        await _hold(launcher, ending)
    finally:
        await launcher.close()


async def _hold(launcher: Launcher, ending: "asyncio.Task[None]") -> None:
    """Until stdin ends; EngineError for a server that fails before."""
    failing = asyncio.create_task(launcher.first_failure())
    await asyncio.wait((ending, failing), return_when=asyncio.FIRST_COMPLETED)
    await launcher.record_counters()
    if failing.done():
        raise failing.result()
    failing.cancel()


async def _until_told_to_end(orders: asyncio.StreamReader) -> None:
    async for _ in each_order(orders):
        pass


if __name__ == "__main__":
    sys.exit(run_child(serve()))

"""``python -m harness.engine``: a worker process, configured by its first line of stdin."""

import gc
import signal
import sys

import uvloop

from harness.child import each_order, open_orders, read_config, tell
from harness.core import PrfaasError
from harness.engine.config import EngineConfig
from harness.engine.worker import Worker


async def work() -> None:
    """Serve until stdin ends."""
    # Ctrl-C reaches the whole process group; the harness decides when a worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = await open_orders()
    config = await read_config(orders, EngineConfig)
    async with Worker(config) as worker:
        tell("ready", ports=worker.ports, kv_port=worker.kv_port)
        async for order in each_order(orders):
            worker.kv_routes = {
                bootstrap: (str(host), int(port))
                for bootstrap, (host, port) in order["kv_routes"].items()
            }
            gc.collect()
            gc.freeze()
            tell("routed")


def main() -> int:
    try:
        uvloop.run(work())
    except PrfaasError as error:
        tell("failed", message=str(error))
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())

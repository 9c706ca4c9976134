"""``python -m harness.engine``: a worker process, configured by its first line of stdin."""

import sys

from harness.child import each_order, open_orders, read_config, run_child, settle, tell
from harness.engine.config import EngineConfig
from harness.engine.worker import Worker


async def work() -> None:
    """Serve until stdin ends."""
    orders = await open_orders()
    config = await read_config(orders, EngineConfig)
    async with Worker(config) as worker:
        tell("ready", ports=worker.ports, kv_port=worker.kv_port)
        async for order in each_order(orders):
            worker.kv_routes = {
                bootstrap: (str(host), int(port))
                for bootstrap, (host, port) in order["kv_routes"].items()
            }
            settle()
            tell("routed")


if __name__ == "__main__":
    sys.exit(run_child(work()))

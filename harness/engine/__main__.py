"""``python -m harness.engine``: a worker process, configured by its first line of stdin."""

import dataclasses
import sys

from harness.child import each_order, open_orders, read_config, run_child, settle, tell
from harness.engine.config import EngineConfig
from harness.engine.worker import Worker
from harness.transport.socket_options import (
    SocketOptions,
    buffer_shortfalls,
    kernel_tcp,
    settle_tcp,
)

#: How long a thread that computes may keep the event loop waiting; Python's own is 5 ms.
SWITCH_INTERVAL_S = 0.0005


async def work() -> None:
    """Serve until stdin ends."""
    orders = await open_orders()
    config = await read_config(orders, EngineConfig)
    if config.reference is not None:
        # Threads that compute hold the interpreter between kernels; the loop waits for its turn.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
    # A network of the run's own is set so that no pause or earlier connection decides how fast KV
    # is sent; one that others use too is left as it is, and recorded.
    tcp = settle_tcp()[1] if config.own_network else kernel_tcp()
    lacking = buffer_shortfalls(SocketOptions(bdp_bytes=config.bdp_bytes))
    told = dataclasses.asdict(tcp) | {"lacking": lacking}
    async with Worker(config) as worker:
        tell("ready", ports=worker.ports, kv_port=worker.kv_port, tcp=told)
        async for order in each_order(orders):
            worker.kv_routes = {
                bootstrap: (str(host), int(port))
                for bootstrap, (host, port) in order["kv_routes"].items()
            }
            settle()
            tell("routed")


if __name__ == "__main__":
    sys.exit(run_child(work()))

"""``python -m harness.gateway``: the gateway process, configured by its first line of stdin."""

import sys

from harness.child import each_order, open_orders, read_config, run_child, settle, tell
from harness.gateway.config import GatewayConfig
from harness.gateway.gateway import Gateway


async def serve() -> None:
    """Serve until stdin ends."""
    orders = await open_orders()
    async with Gateway(await read_config(orders, GatewayConfig)) as gateway:
        settle()
        tell("ready", port=gateway.port, canaries=gateway.canaries)
        async for order in each_order(orders):
            if order.get("count"):
                await gateway.count()
                tell("counted")
            else:
                gateway.driver.begin(int(order["start_mono_ns"]))


if __name__ == "__main__":
    sys.exit(run_child(serve()))

"""What the sending workers say of their connections, made into the scheduler's ``LinkSamples``.

Each prefill instance outside the PD cluster streams the TCP_INFO of its connections, one JSON line
a period, over the same way as everything else it says: what is known of the link is half a round
trip and up to one period old. The scheduler's estimate after each line is written to the run's link
spool. A stream that was cut off by an outage would go on only with TCP's next retransmission, which
may be as far off as the outage was long: one that is silent is asked for anew.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from harness.child import Spool
from harness.core import PD, EngineError
from harness.engine.config import LINK_SAMPLES_PERIOD_S
from harness.gateway.config import WorkerAddress
from harness.gateway.driver import Driver
from harness.gateway.upstream import Upstream
from harness.scheduling.congestion import LinkSample
from harness.scheduling.events import LinkSamples
from harness.transport.tcp_info import TcpSample

_RETRY_S = 0.5
#: Ten periods of wall time without a line.
SILENT_S = 10 * LINK_SAMPLES_PERIOD_S
_decoder = msgspec.json.Decoder(list[TcpSample])


class LinkWatch:
    """``follow`` it as long as the gateway lives."""

    def __init__(
        self,
        upstream: Upstream,
        workers: Sequence[WorkerAddress],
        driver: Driver,
        spool: Spool,
        time_scale: float,
        byte_scale: float,
    ) -> None:
        self._upstream = upstream
        self._senders = [one for one in workers if one.role == "prefill" and one.cluster != PD]
        self._driver = driver
        self._spool = spool
        self._time_scale, self._byte_scale = time_scale, byte_scale

    async def follow(self) -> None:
        """Until cancelled; a worker that does not answer is asked again."""
        async with asyncio.TaskGroup() as following:
            for sender in self._senders:
                following.create_task(self._follow(sender))

    async def _follow(self, sender: WorkerAddress) -> None:
        told = False
        while True:
            try:
                async with aclosing(self._upstream.follow(sender.name, "/link_samples")) as lines:
                    while True:
                        async with asyncio.timeout(SILENT_S):
                            line = await anext(lines)
                        self._take(sender, line)
                        told = False
            except (
                EngineError,
                msgspec.MsgspecError,
                RecursionError,
                StopAsyncIteration,
                TimeoutError,
            ) as error:
                # Its requests say it too; without this the estimate would fade with no reason.
                if not told:
                    why = str(error) or f"no word for {SILENT_S:g} s"
                    print(f"{sender.name} tells nothing of the link: {why}", file=sys.stderr)
                told = True
            await asyncio.sleep(_RETRY_S)

    def _take(self, sender: WorkerAddress, line: bytes) -> None:
        now_ns, now_s = time.monotonic_ns(), self._driver.now_s()
        samples = tuple(
            self._sample(sender.name, one, now_s - self._age_s(one, now_ns))
            for one in _decoder.decode(line)
            if one.bytes_acked is not None and one.rtt_s is not None
        )
        self._driver.tell(LinkSamples(sender.cluster, samples))
        state = self._driver.scheduler.links()[sender.cluster]
        self._spool.write(
            {
                "kind": "estimate",
                "mono_ns": now_ns,
                "cluster": sender.cluster,
                "peer": sender.name,
                "utilisation": state.utilisation,
                "waiting_s": state.waiting_s,
                "capacity_bytes_per_s": state.capacity_bytes_per_s,
                "scarce": state.scarce,
            }
        )

    def _age_s(self, one: TcpSample, now_ns: int) -> float:
        return (now_ns - one.mono_ns) / 1e9 * self._time_scale

    def _sample(self, sender: str, one: TcpSample, at_s: float) -> LinkSample:
        assert one.bytes_acked is not None
        assert one.rtt_s is not None
        assert one.in_flight_bytes is not None
        min_rtt_s = None if one.min_rtt_s is None else one.min_rtt_s * self._time_scale
        return LinkSample(
            at_s=at_s,
            sender=sender,
            peer=one.peer,
            connection=one.connection,
            acked_bytes=one.bytes_acked * self._byte_scale,
            retransmits=one.retransmits or 0,
            rtt_s=one.rtt_s * self._time_scale,
            min_rtt_s=min_rtt_s,
            unsent_bytes=one.unsent_bytes * self._byte_scale,
            backlog_bytes=one.backlog_bytes * self._byte_scale,
            in_flight_bytes=one.in_flight_bytes * self._byte_scale,
        )

"""The gateway's view of the inter-cluster link: what the sending workers say of their connections.

Each prefill instance outside the PD cluster streams the TCP_INFO of its connections, one JSON line
a period, over the same way as everything else it says: what is known of the link is half a round
trip and up to one period old. The lines become one estimate (``scheduling.congestion``), which is
shown in ``/state`` and ``/metrics`` and written to the run's link spool.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

import aiohttp
import msgspec

from harness.child import Spool
from harness.core import PD
from harness.gateway.config import WorkerAddress
from harness.scheduling.congestion import CongestionConfig, LinkEstimate, LinkSample, LinkState
from harness.transport.tcp_info import TcpSample

_RETRY_S = 1.0


class LinkWatch:
    """``follow`` it as long as the gateway lives; ``state`` is the estimate now."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        workers: Sequence[WorkerAddress],
        key: str,
        capacity_bytes_per_s: float,
        time_scale: float,
        byte_scale: float,
        now_s: Callable[[], float],
        spool: Spool,
    ) -> None:
        self._session = session
        self._senders = [one for one in workers if one.role == "prefill" and one.cluster != PD]
        self._headers = {"Authorization": f"Bearer {key}"}
        self._estimate = LinkEstimate(CongestionConfig(capacity_bytes_per_s))
        self._time_scale, self._byte_scale = time_scale, byte_scale
        self._now_s, self._spool = now_s, spool

    def state(self) -> LinkState:
        """The estimate now, in scenario units."""
        return self._estimate.state(self._now_s())

    async def follow(self) -> None:
        """Until cancelled; a worker that does not answer is asked again."""
        async with asyncio.TaskGroup() as following:
            for sender in self._senders:
                following.create_task(self._follow(sender))

    async def _follow(self, sender: WorkerAddress) -> None:
        url = f"http://{sender.host}:{sender.port}/link_samples"
        while True:
            try:
                async with self._session.get(url, headers=self._headers) as answer:
                    answer.raise_for_status()
                    while (line := await answer.content.readuntil(b"\n")).endswith(b"\n"):
                        self._take(sender, line)
            except aiohttp.ClientError as error:
                # Its requests say it too; without this the estimate would fade with no reason.
                print(f"{sender.name} tells nothing of the link: {error}", file=sys.stderr)
            await asyncio.sleep(_RETRY_S)

    def _take(self, sender: WorkerAddress, line: bytes) -> None:
        samples = msgspec.json.decode(line, type=list[TcpSample])
        now_ns, now_s = time.monotonic_ns(), self._now_s()
        state = self._estimate.handle(
            [
                self._sample(sender.name, one, now_s - self._age_s(one, now_ns))
                for one in samples
                if one.bytes_acked is not None and one.rtt_s is not None
            ],
            now_s,
        )
        self._spool.write(
            {
                "kind": "estimate",
                "mono_ns": now_ns,
                "cluster": sender.cluster,
                "peer": sender.name,
                "utilisation": state.utilisation,
                "waiting_s": state.waiting_s,
                "scarce": state.scarce,
            }
        )

    def _age_s(self, one: TcpSample, now_ns: int) -> float:
        return (now_ns - one.mono_ns) / 1e9 * self._time_scale

    def _sample(self, sender: str, one: TcpSample, at_s: float) -> LinkSample:
        assert one.bytes_acked is not None
        assert one.rtt_s is not None
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
        )

"""How much of each stage a simulation used: work served over what the stage could do."""

from collections.abc import Sequence

from harness.core import PD, PRFAAS
from harness.kv_path import KvPath
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.simulator.records import RoleTaken
from harness.utilisation import Utilisation


class Usage:
    """Counted as the run goes; ``shares`` at its end."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        #: Seconds of prefill by cluster, and of decode slots that were held.
        self.prefill_busy_s = dict.fromkeys((i.cluster for i in config.instances), 0.0)
        self.slots_busy_s = 0.0

    def shares(
        self,
        start_s: float,
        window: float,
        link: KvPath,
        fabric: Sequence[KvPath],
        roles: Sequence[RoleTaken],
    ) -> Utilisation:
        """Over ``window`` seconds from ``start_s``, the planned time of the load."""
        instances = self._config.instances
        busy_s = self.prefill_busy_s
        share: dict[str, float | None] = {}
        for cluster in busy_s:
            count = sum(i.role == "prefill" and i.cluster == cluster for i in instances)
            served_s = count * window
            if cluster == PD:
                served_s += _gained_s(roles, "prefill", start_s, window)
            share[cluster] = busy_s[cluster] / served_s if served_s else None
        batch = self._config.decode_max_batch
        slots = sum(i.role == "decode" for i in instances) * batch
        slots_s = slots * window + batch * _gained_s(roles, "decode", start_s, window)
        return Utilisation(
            prfaas_prefill=share.get(PRFAAS),
            pd_prefill=share.get(PD),
            pd_decode=self.slots_busy_s / slots_s,
            link=_link_share(link, start_s, window) if share.get(PRFAAS) is not None else None,
            fabric=_fabric_share(fabric, window),
        )


def _gained_s(roles: Sequence[RoleTaken], role: str, start_s: float, window: float) -> float:
    """Seconds of instances that a role gained, or lost, by conversions."""
    end_s = start_s + window
    return sum(
        max(0.0, end_s - taken.at_s) if taken.role == role else -max(0.0, end_s - taken.left_s)
        for taken in roles
    )


def _link_share(link: KvPath, start_s: float, window: float) -> float:
    """Of what the link could carry, its changes counted."""
    return link.sent_bytes / link.mean_rate_bytes_per_s(start_s, start_s + window) / window


def _fabric_share(paths: Sequence[KvPath], window: float) -> float | None:
    """Use of the local senders' own paths, on average over them."""
    if not paths:
        return None
    return sum(path.sent_bytes / path.rate_bytes_per_s for path in paths) / len(paths) / window

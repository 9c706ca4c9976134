"""How much of each stage a simulation used: work served over what the stage could do."""

from collections.abc import Sequence

from harness.kv_path import KvPath
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.simulator.link import Paths
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
        self, start_s: float, window: float, paths: Paths, roles: Sequence[RoleTaken]
    ) -> Utilisation:
        """Over ``window`` seconds from ``start_s``, the planned time of the load; clusters of a
        kind and their links together."""
        instances, near = self._config.instances, frozenset(self._config.pd_clusters)
        busy_s: dict[bool, float] = {}
        for cluster, one_s in self.prefill_busy_s.items():
            busy_s[cluster in near] = busy_s.get(cluster in near, 0.0) + one_s
        share: dict[bool, float | None] = {}
        for is_near in busy_s:
            count = sum(i.role == "prefill" and (i.cluster in near) == is_near for i in instances)
            served_s = count * window
            if is_near:
                served_s += _gained_s(roles, "prefill", start_s, window)
            share[is_near] = busy_s[is_near] / served_s if served_s else None
        batch_of = {i.name: self._config.decoding(i.hardware).max_batch for i in instances}
        slots = sum(batch_of[i.name] for i in instances if i.role == "decode")
        slots_s = slots * window + sum(
            batch_of[one.instance] * _gained_s([one], "decode", start_s, window) for one in roles
        )
        crosses = share.get(False) is not None
        return Utilisation(
            prfaas_prefill=share.get(False),
            pd_prefill=share.get(True),
            pd_decode=self.slots_busy_s / slots_s,
            link=self._link_share(paths, start_s, window) if crosses else None,
            fabric=_fabric_share(paths.fabric, window),
        )

    def _link_share(self, paths: Paths, start_s: float, window: float) -> float:
        """Of what the links could carry, their changes counted, or of what the PD clusters could
        take where that is less."""
        links = paths.links.values()
        could = sum(one.mean_rate_bytes_per_s(start_s, start_s + window) for one in links)
        ingress = self._config.ingress_bytes_per_s
        if ingress:
            could = min(could, sum(ingress.values()))
        return sum(one.sent_bytes for one in links) / could / window


def _gained_s(roles: Sequence[RoleTaken], role: str, start_s: float, window: float) -> float:
    """Seconds of instances that a role gained, or lost, by conversions."""
    end_s = start_s + window
    return sum(
        max(0.0, end_s - taken.at_s) if taken.role == role else -max(0.0, end_s - taken.left_s)
        for taken in roles
    )


def _fabric_share(paths: Sequence[KvPath], window: float) -> float | None:
    """Use of the local senders' own paths, on average over them."""
    if not paths:
        return None
    return sum(path.sent_bytes / path.rate_bytes_per_s for path in paths) / len(paths) / window

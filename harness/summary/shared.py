"""What all deployments of a run have in common, so that their figures may be compared.

The blocks of the bootstrap, longer than the longest busy period of any prefill cluster in any cell;
the steady window; the bins of input length around the run's threshold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from harness.record.run_directory import Manifest
from harness.statistics import (
    Blocks,
    Floats,
    SteadyWindow,
    in_system,
    moving_blocks,
    saturated_requests,
    steady_window,
)
from harness.summary.frames import by_repeat, floats, planned_instants_s, present
from harness.summary.lengths import length_edges
from harness.summary.ttft import drawn_quantiles
from harness.summary.work import service_ends_s

#: A span that starts this soon (wall) after another on the same instance follows it directly.
_DIRECTLY_WALL_S = 0.001


@dataclass(frozen=True, slots=True)
class Shared:
    """``windows`` by deployment; ``edges_tokens`` between the bins, the last one being open.

    ``drawn`` by deployment and quantile of TTFT, [resamples]; None where there are none.
    """

    blocks: Blocks
    drawn: dict[str, dict[str, Floats | None]]
    windows: dict[str, SteadyWindow]
    edges_tokens: tuple[int, ...]

    @property
    def quantile_resamples(self) -> int:
        """How many resamples the intervals of quantiles rest on."""
        drawn = [one for by_key in self.drawn.values() for one in by_key.values()]
        return min((0 if one is None else len(one) for one in drawn), default=0)


def share_out(requests: pd.DataFrame, manifest: Manifest, num_planned: int) -> Shared:
    """Blocks, windows and bins of a run."""
    thresholds = present(requests, "threshold_tokens")
    blocks, names = shared_blocks(requests, manifest, num_planned), manifest.deployment_names()
    return Shared(
        blocks,
        {name: drawn_quantiles(requests[requests["deployment"] == name], blocks) for name in names},
        shared_windows(requests, names, manifest.time_scale)
        if manifest.status == "finished"
        else dict.fromkeys(names, SteadyWindow(None, None, "the run did not end")),
        length_edges(int(np.median(thresholds)) if len(thresholds) else None),
    )


def shared_blocks(requests: pd.DataFrame, manifest: Manifest, n: int) -> Blocks:
    """Blocks longer than the longest busy period of any prefill cluster in any cell."""
    longest = 0
    gap_s = _DIRECTLY_WALL_S * manifest.time_scale
    spans = requests.dropna(subset=["prefill_start_s", "prefill_end_s", "prefill_cluster"])
    for (deployment, repeat, cluster), group in spans.groupby(
        ["deployment", "repeat", "prefill_cluster"]
    ):
        servers = sum(
            instance.role == "prefill" and instance.cluster == cluster
            for instance in manifest.instances[str(deployment)]
        )
        same_cell = (requests["deployment"] == deployment) & (requests["repeat"] == repeat)
        busy = saturated_requests(
            floats(group, "prefill_start_s"),
            service_ends_s(group, manifest.time_scale),
            servers,
            floats(requests[same_cell], "planned_s"),
            gap_s,
        )
        longest = max(longest, busy)
    return moving_blocks(n, longest)


def shared_windows(
    requests: pd.DataFrame, names: Sequence[str], time_scale: float
) -> dict[str, SteadyWindow]:
    """One steady window for every deployment that settles, from the latest start among them."""
    found = {name: _window(requests[requests["deployment"] == name], time_scale) for name in names}
    starts = [one.start_s for one in found.values() if one.start_s is not None]
    if not starts:
        return found
    return {
        name: one if one.start_s is None else SteadyWindow(max(starts), one.end_s)
        for name, one in found.items()
    }


def _window(frame: pd.DataFrame, time_scale: float) -> SteadyWindow:
    planned_s = by_repeat(frame, planned_instants_s(frame, time_scale))
    ends_s = by_repeat(frame, floats(frame, "end_s"))
    levels = [
        in_system(begins, ends, begins) for begins, ends in zip(planned_s, ends_s, strict=True)
    ]
    return steady_window(planned_s[0], np.mean(levels, axis=0))

"""Every figure of one deployment at the offered load. Scenario units; null where there is none."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.core import BUDGET_TERMS, Request
from harness.record.run_directory import DeploymentModel, Manifest
from harness.schedule import Schedule
from harness.statistics import Floats, nearest_rank
from harness.summary.frames import completed, finite, floats, mean, present
from harness.summary.lengths import by_length
from harness.summary.service import good, rates, steady_figures, whole_run_s
from harness.summary.shared import Shared
from harness.summary.ttft import modelled, token_times, ttft
from harness.summary.work import concurrency, kv, prefill_utilisation


def summarise(
    frame: pd.DataFrame,
    name: str,
    manifest: Manifest,
    schedule: Sequence[Request],
    shared: Shared,
) -> dict[str, Any]:
    """Every figure of one deployment; ``frame`` holds its rows of the requests table."""
    done = completed(frame)
    outcomes = frame["outcome"].value_counts()
    cells = [cell for cell in manifest.deployments if cell.deployment == name]
    model = manifest.models.get(name, DeploymentModel())
    last_planned_s = float(_planned_s(schedule).max(initial=0.0))
    steady = steady_figures(frame, shared.windows[name], cells, manifest)
    kept = good(frame, manifest.scenario.get("slo", {}), manifest.time_scale)
    return {
        "num_planned": len(frame),
        "num_completed": int(outcomes.get("completed", 0)),
        "num_failed": int(outcomes.get("failed", 0)),
        "num_unsent": int(outcomes.get("unsent", 0)),
        "arrival_rate_req_per_s": arrival_rate(schedule),
        **ttft(frame, shared.blocks, shared.drawn[name]),
        **token_times(done),
        **modelled(done),
        **rates(frame, manifest, shared.blocks),
        "throughput_steady_req_per_s": steady.get("throughput_req_per_s"),
        "steady": steady,
        "concurrency": concurrency(frame, cells, manifest.time_scale, None),
        "by_length": by_length(frame, shared.edges_tokens, kept, whole_run_s(frame)),
        **kv(done),
        "budget_residual_p95_s": nearest_rank(np.abs(present(done, "residual_s")), 0.95),
        **prefill_utilisation(frame, name, cells, manifest, last_planned_s),
        "send_lag_p99_wall_s": nearest_rank(present(frame, "send_lag_wall_s"), 0.99),
        "budget_mean_s": {
            term: mean(present(done, f"{term}_s")) for term in (*BUDGET_TERMS, "residual")
        },
        "lambda_max_req_per_s": finite(model.lambda_max_req_per_s),
        "lambda_max_exact_req_per_s": finite(model.lambda_max_exact_req_per_s),
        "modelled_utilisation": {key: finite(value) for key, value in model.utilisation.items()},
    }


def arrival_rate(schedule: Sequence[Request]) -> float | None:
    """Planned arrivals a second, n - 1 gaps over their span; None where they span no time."""
    planned_s = _planned_s(schedule)
    span_s = float(planned_s.max() - planned_s.min()) if len(planned_s) else 0.0
    return (len(planned_s) - 1) / span_s if span_s > 0 else None


def _planned_s(schedule: Sequence[Request]) -> Floats:
    """Of every request; a column of a ``Schedule``. # [requests]"""
    if isinstance(schedule, Schedule):
        return schedule.planned_s
    return np.array([request.planned_s for request in schedule], np.float64)


def residual_over_bound(
    frame: pd.DataFrame, time_scale: float, of_ttft: float, wall_s: float
) -> float | None:
    """Share of requests whose budget leaves more than ``of_ttft`` of TTFT and than ``wall_s``."""
    whole = completed(frame).dropna(subset=["residual_wall_s"])
    if whole.empty:
        return None
    left_s = np.abs(floats(whole, "residual_wall_s"))
    bound_s = np.maximum(of_ttft * floats(whole, "ttft_s") / time_scale, wall_s)
    return float((left_s > bound_s).mean())

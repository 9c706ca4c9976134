"""The gates: what has to hold of a deployment's figures before they may be believed.

Each yields its reasons in plain words, none where it is passed. Bounds on the machinery (send lag,
residual) are wall time, since time_scale multiplies them.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from harness import real_engine
from harness.core import Request
from harness.record.run_directory import Manifest
from harness.statistics import nearest_rank
from harness.summary import TPOT_SLO_SHARE, completed, floats, prefill_errors, present

#: Rounding a planned instant to nanoseconds, and the origin's distance from the schedule's zero.
_PLANNED_ERROR_WALL_S = 0.001


@dataclass(frozen=True, slots=True)
class Gates:
    """The bounds. ``residual_*``: at most 5 % of requests may leave more than either."""

    min_completed: int = 300
    send_lag_p99_wall_s: float = 0.010
    residual_of_ttft: float = 0.02
    residual_wall_s: float = 0.002
    residual_share: float = 0.05
    prefill_error: float = 0.03
    ttft_error: float = 0.10
    utilisation: float = 0.95
    overhead_of_ttft: float = 0.01
    slo_attainment: float = TPOT_SLO_SHARE


@dataclass(frozen=True, slots=True)
class View:
    """What a gate looks at: one deployment."""

    name: str
    frame: pd.DataFrame
    summary: dict[str, Any]
    manifest: Manifest
    schedule: tuple[Request, ...]
    gates: Gates
    engines: pd.DataFrame

    @property
    def done(self) -> pd.DataFrame:
        return completed(self.frame)


def concurrency(manifest: Manifest) -> int | None:
    """Requests in flight of a closed loop; None where the loop is open."""
    slots = manifest.scenario.get("load", {}).get("concurrency")
    return slots if isinstance(slots, int) else None


def accounts(view: View) -> Iterator[str]:
    """Every planned request is accounted for, was sent, and did not fail."""
    summary = view.summary
    repeats = sum(cell.deployment == view.name for cell in view.manifest.deployments)
    planned = len(view.schedule) * repeats
    accounted = summary["num_completed"] + summary["num_failed"] + summary["num_unsent"]
    if not summary["num_planned"] == accounted == planned:
        yield (
            f"{planned} requests were planned but {accounted} are accounted for in "
            f"{summary['num_planned']} rows"
        )
    if planned == 0:
        yield "no request was planned"
    if summary["num_failed"]:
        failed = view.frame[view.frame["outcome"] == "failed"]
        phases = failed["failure_phase"].fillna("unknown").value_counts()
        listed = ", ".join(f"{count} in {phase}" for phase, count in phases.items())
        first = failed.iloc[0]
        yield (
            f"{summary['num_failed']} of {planned} requests failed ({listed}); "
            f"the first, {first['rid']}: {_or(first['failure_message'], 'no message')}"
        )
    if summary["num_unsent"]:
        yield f"{summary['num_unsent']} of {planned} requests were never sent"


def _enough(view: View) -> Iterator[str]:
    # Repeats replay the same arrivals, so they do not count again.
    distinct = int(view.done["rid"].nunique())
    if view.schedule and distinct < view.gates.min_completed:
        yield (
            f"{distinct} distinct requests completed; "
            f"a claim on means takes {view.gates.min_completed}"
        )


def _completeness(view: View) -> Iterator[str]:
    done = view.done
    wrong = (
        done["ttft_s"].isna()
        | (done["completion_tokens"] != done["output_tokens"]).fillna(True)
        | (done["prompt_tokens"] != done["input_tokens"]).fillna(True)
    )
    yield from _named(done[wrong], "do not have the tokens that were planned")
    at_once = ((done["output_tokens"] > 1) & ~(done["tpot_s"] > 0)).fillna(True)
    yield from _named(done[at_once & ~wrong], "have all tokens at one instant: the client stalled")
    cached = done["actual_cached_tokens"]
    if view.manifest.scenario.get("prefix_cache", {}).get("enabled"):
        # What is cached is the outcome; both ends must mean the same, and one token is always new.
        differ = (cached != done["prefill_cached_tokens"]) | (cached >= done["input_tokens"])
        yield from _named(done[differ.fillna(True)], "disagree about their cached tokens")
    else:
        differ = (cached != done["cached_tokens"]).fillna(True)
        yield from _named(done[differ], "found other cached tokens than planned")
        if real_engine.is_real(view.manifest):
            wrong = (done["prefill_cached_tokens"] != done["cached_tokens"]).fillna(True)
            wrong |= (done["prefill_prompt_tokens"] != done["input_tokens"]).fillna(True)
            yield from _named(done[wrong], "were prefilled with other tokens than planned")


def _load(view: View) -> Iterator[str]:
    lag_s = view.summary["send_lag_p99_wall_s"]
    if lag_s is not None and lag_s > view.gates.send_lag_p99_wall_s:
        yield (
            f"the load generator was late: send lag p99 {1e3 * lag_s:.1f} ms of wall time, "
            f"bound {1e3 * view.gates.send_lag_p99_wall_s:.0f} ms"
        )
    errors_s = np.abs(present(view.frame, "planned_error_wall_s"))
    open_loop = concurrency(view.manifest) is None
    if open_loop and len(errors_s) and errors_s.max() > _PLANNED_ERROR_WALL_S:
        yield (
            f"the load generator's planned times differ from the schedule by up to "
            f"{1e3 * errors_s.max():.1f} ms of wall time"
        )


def _budget(view: View) -> Iterator[str]:
    done, gates = view.done, view.gates
    if real_engine.is_real(view.manifest) and real_engine.untold_terms(done):
        yield from real_engine.budget_reasons(
            done,
            view.manifest.time_scale,
            gates.residual_of_ttft,
            gates.residual_wall_s,
            gates.residual_share,
        )
        return
    yield from _named(done[done["residual_wall_s"].isna()], "have an incomplete TTFT budget")
    whole = done.dropna(subset=["residual_wall_s"])
    if whole.empty:
        return
    beyond = view.summary["budget_residual_over_bound"]
    if beyond > gates.residual_share:
        p95_s = nearest_rank(np.abs(floats(whole, "residual_wall_s")), 0.95) or 0.0
        yield (
            f"the TTFT budget leaves more than {100 * gates.residual_of_ttft:.0f} % of TTFT and "
            f"{1e3 * gates.residual_wall_s:.0f} ms of wall time unexplained in "
            f"{100 * beyond:.1f} % of requests (residual p95 {1e3 * p95_s:.2f} ms wall)"
        )


def _kv_bytes(view: View) -> Iterator[str]:
    done = view.done
    unknown = done["kv_wire_bytes_expected"].isna()
    yield from _named(done[unknown], "have no expected KV bytes to compare with")
    if real_engine.is_real(view.manifest):
        yield from real_engine.kv_reasons(view.frame, view.engines, view.name, view.manifest)
        return
    known = done[~unknown]
    wrong = (known["kv_wire_bytes_received"] != known["kv_wire_bytes_expected"]).fillna(True)
    for reason in _named(known[wrong], "moved other KV bytes than the model's geometry"):
        first = known[wrong].iloc[0]
        yield (
            f"{reason}; {first['rid']} received {_or(first['kv_wire_bytes_received'], 'none')} "
            f"of {first['kv_wire_bytes_expected']} wire bytes"
        )


def _prefill(view: View) -> Iterator[str]:
    table = prefill_errors(view.frame)
    if table.empty and len(view.done):
        yield "no prefill time can be compared with its profile"
    for row in table.itertuples():
        error = float(str(row.median_error))
        if abs(error) > view.gates.prefill_error:
            yield (
                f"measured prefill of {row.hardware} at {row.length_bin} is "
                f"{100 * error:+.1f} % off its profile at the median, "
                f"bound {100 * view.gates.prefill_error:.0f} %"
            )


def _simulation(view: View) -> Iterator[str]:
    if not len(view.done) or concurrency(view.manifest) is not None:
        return  # in a closed loop what is late makes the next one late: nothing is the same request
    yield from _named(
        view.done[view.done["modelled_ttft_s"].isna()], "were not simulated", some="requests"
    )
    error = view.summary["ttft_mean_error"]
    if error is not None and abs(error) > view.gates.ttft_error:
        yield (
            f"mean TTFT is {100 * error:+.1f} % off the simulation of the same schedule "
            f"({view.summary['ttft_mean_s']:.2f} s against "
            f"{view.summary['modelled_ttft_mean_s']:.2f} s), "
            f"bound {100 * view.gates.ttft_error:.0f} %"
        )


def _utilisation(view: View) -> Iterator[str]:
    if concurrency(view.manifest) is not None:
        return  # it offers no load of its own; as many as are in flight wait, and no more
    model = view.manifest.models.get(view.name)
    if model is None or not model.utilisation:
        yield "no throughput model says how busy its stages are"
        return
    if len(view.schedule) < view.gates.min_completed:
        return  # too short a window to say what share of it is used; _enough refuses the run
    stages = dict(model.utilisation)
    for cluster, value in view.summary["prefill_utilisation_by_cluster"].items():
        if value is not None:
            stages[f"{cluster} prefill as measured"] = value
    stage, most = max(stages.items(), key=lambda item: item[1])
    if most > view.gates.utilisation:
        scale = min(view.gates.utilisation / most, model.fitting_load_scale or 1.0)
        # The option replaces the scale that the run's load already had.
        scale *= view.manifest.scenario.get("workload", {}).get("rate_scale") or 1.0
        yield (
            f"{stage} would be used at {most:.2f} of its capacity, bound "
            f"{view.gates.utilisation:.2f}, where queues no longer settle; "
            f"`--set workload.rate_scale={_floored(scale)}` would fit"
        )


def _floored(value: float) -> str:
    """Three significant digits, never more than the value."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{math.floor(round(value / unit, 6)) * unit:.3g}"


def _named(rows: pd.DataFrame, what: str, some: str = "completed requests") -> Iterator[str]:
    if rows.empty:
        return
    rids = ", ".join(str(rid) for rid in rows["rid"].head(3))
    more = ", ..." if len(rows) > 3 else ""
    yield f"{len(rows)} {some} {what} ({rids}{more})"


def _or(value: object, otherwise: str) -> str:
    return otherwise if value is None or value is pd.NA else str(value)


GATES: tuple[Callable[[View], Iterator[str]], ...] = (
    accounts,
    _enough,
    _completeness,
    _load,
    _budget,
    _kv_bytes,
    _prefill,
    _simulation,
    _utilisation,
)

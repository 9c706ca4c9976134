"""What ``prfaas simulate`` prints: simulated TTFT, utilisation and modelled capacity.

A request that fails has no TTFT, which a quantile takes as infinite and a mean cannot take: with
failures there is no mean, and quantiles are null from where they are infinite. ``*_completed_s``
are of the completed requests alone, and say nothing of how deployments compare.
"""

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.preparation import MAX_UTILISATION, Prepared
from harness.simulator import Simulation
from harness.statistics import P99_MIN_EFFECTIVE, effective_samples, nearest_rank

FloatArray = npt.NDArray[np.float64]


def simulation_document(prepared: Prepared) -> dict[str, Any]:
    """One JSON document; figures in scenario units, null where there is none."""
    deployments = {}
    notes = list(prepared.notes)
    for name, simulation in prepared.simulations.items():
        failures = simulation.num_requests - simulation.num_completed
        if failures:
            notes.append(
                f"{name}: {failures} of {simulation.num_requests} requests failed: "
                f"{_reasons(prepared, simulation)}. Compare quantiles, not means."
            )
        model = prepared.models[name]
        stage, most = max(model.utilisation.items(), key=lambda item: item[1], default=("", 0.0))
        if most > MAX_UTILISATION:
            notes.append(
                f"{name}: {stage} would be used at {most:.2f} of its capacity: its queue grows for "
                f"as long as the load lasts. A load scaled by {model.fitting_load_scale:.3f} would "
                f"fit {MAX_UTILISATION}."
            )
        planned = prepared.scenario.deployments[name]
        deployments[name] = {
            "threshold_tokens": planned.threshold_tokens,
            "num_prfaas": planned.num_prfaas,
            "num_prefill": planned.num_prefill,
            "num_decode": planned.num_decode,
            "num_planned": simulation.num_requests,
            "num_completed": simulation.num_completed,
            "num_failed": failures,
            **ttft_statistics(simulation.ttft_s, failures),
            "throughput_req_per_s": simulation.throughput_req_per_s,
            "utilisation": simulation.utilisation.by_stage(),
            "lambda_max_req_per_s": model.lambda_max_req_per_s,
            "lambda_max_exact_req_per_s": model.lambda_max_exact_req_per_s,
            "fitting_load_scale": model.fitting_load_scale,
        }
    return {
        "scenario": prepared.scenario.name,
        "num_requests": len(prepared.schedule),
        "schedule": prepared.described_schedule(),
        "max_utilisation": MAX_UTILISATION,
        "notes": notes,
        "deployments": deployments,
    }


def _reasons(prepared: Prepared, simulation: Simulation) -> str:
    deadline_s = prepared.scenario.scheduling.admission_deadline_s
    words = {
        "decode_admission": f"no decode slot within {deadline_s:g} s",
        "rejected": "refused at once, for the queue or the wait was too long"
        + (", or nobody was up" if prepared.scenario.faults.instances else ""),
        "prefill_queue": "the link was down when they were to be sent out",
        "transfer": "the link was down when their KV was to be sent",
        "instance_down": "their instance died, after the first token or once too often",
    }
    phases = Counter(simulation.failures)
    if len(phases) == 1:
        return words[next(iter(phases))]
    return ", ".join(f"{count} {words[phase]}" for phase, count in phases.most_common())


def ttft_statistics(ttft_s: FloatArray, failures: int) -> dict[str, Any]:
    """Statistics of all requests, and of the completed ones where that is not the same.

    ``ttft_s`` in the order of arrival. Below ``P99_MIN_EFFECTIVE`` effective samples there is no
    P99, and ``ttft_p99_reason`` says so.
    """
    mean_s = float(ttft_s.mean()) if len(ttft_s) else None
    found: dict[str, Any] = {"ttft_mean_s": None if failures else mean_s}
    if failures:
        found["ttft_mean_completed_s"] = mean_s
    effective = effective_samples(ttft_s) if len(ttft_s) else 0.0
    found["effective_samples"] = effective
    for key, q in (("ttft_p50", 0.5), ("ttft_p90", 0.9), ("ttft_p99", 0.99)):
        if q > 0.9 and effective < P99_MIN_EFFECTIVE:
            found[f"{key}_s"] = None
            found[f"{key}_reason"] = (
                f"{effective:.0f} effective samples; a P99 needs {P99_MIN_EFFECTIVE:,}"
            )
            continue
        value_s = nearest_rank(ttft_s, q, failures)
        found[f"{key}_s"] = None if value_s is None or math.isinf(value_s) else value_s
        if failures:
            found[f"{key}_completed_s"] = nearest_rank(ttft_s, q)
    return found

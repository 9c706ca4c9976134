"""What ``prfaas simulate`` prints: simulated TTFT, utilisation and modelled capacity."""

from typing import Any

from harness.preparation import MAX_UTILISATION, Prepared
from harness.statistics import nearest_rank


def simulation_document(prepared: Prepared) -> dict[str, Any]:
    """One JSON document; figures in scenario units, null where there is none."""
    deployments = {}
    notes = list(prepared.notes)
    for name, simulation in prepared.simulations.items():
        ttft_s = [one.ttft_s for one in simulation.requests if one.ttft_s is not None]
        failures = len(simulation.requests) - simulation.num_completed
        model = prepared.models[name]
        stage, most = max(model.utilisation.items(), key=lambda item: item[1])
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
            "num_planned": len(simulation.requests),
            "num_completed": simulation.num_completed,
            "ttft_mean_s": sum(ttft_s) / len(ttft_s) if ttft_s else None,
            "ttft_p50_s": nearest_rank(ttft_s, 0.5, failures),
            "ttft_p90_s": nearest_rank(ttft_s, 0.9, failures),
            "utilisation": simulation.utilisation.by_stage(),
            "lambda_max_req_per_s": model.lambda_max_req_per_s,
            "lambda_max_exact_req_per_s": model.lambda_max_exact_req_per_s,
            "fitting_load_scale": model.fitting_load_scale,
        }
    return {
        "scenario": prepared.scenario.name,
        "num_requests": len(prepared.schedule),
        "max_utilisation": MAX_UTILISATION,
        "notes": notes,
        "deployments": deployments,
    }

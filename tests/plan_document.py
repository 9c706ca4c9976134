"""A planner's document of round numbers: complete, small, and each figure known.

Two clusters, four PrfaaS and eight PD instances; 20 is the threshold's best thousand of tokens.
"""

from typing import Any

NO_MORE: dict[str, Any] = {"more_prfaas": [], "more_pd": []}
THRESHOLDS = [1000.0, 5000.0, 20000.0, 60000.0, 130000.0]
#: Over the mean.
_STATISTICS = {"mean": 1.0, "p50": 0.9, "p90": 1.5, "p99": 2.5}
REFUSED = "slo.tpot at 0.02 s: no decode step is as fast as that"


def _plan(*counts: int | None) -> dict[str, Any]:
    keys = ("num_prfaas", "num_prefill", "num_decode", "threshold_tokens")
    return {**NO_MORE, **dict(zip(keys, counts, strict=True))}


TRANSFER = {
    "tokens": 45_000.0,
    "connections": 4,
    "congestion_control": "cubic",
    "rate_bytes_per_s": 2.4e9,
    "binds": "per_flow_cap",
    "connections_to_fill": None,
    "sending_s": 0.4,
    "exposed_layerwise_s": 0.0125,
    "exposed_at_end_s": 0.4005,
}


def _deployment(
    plan: dict[str, Any], paper: float, exact: float, best: dict[str, Any], **more: Any
) -> dict[str, Any]:
    return {
        **plan,
        "theta_prfaas_req_per_s": 1.6 if plan["num_prfaas"] else None,
        "theta_pd_prefill_req_per_s": 1.7 if plan["num_prefill"] else None,
        "theta_pd_decode_req_per_s": 3.9,
        "throughput_req_per_s": paper,
        "throughput_exact_req_per_s": exact,
        "ratio": paper / 2.0,
        "offload_fraction": 0.495 if plan["threshold_tokens"] else None,
        "long_mean_tokens": 45000.0 if plan["num_prfaas"] else None,
        "short_mean_tokens": 10200.0 if plan["num_prefill"] else None,
        "egress_bytes_per_s": 1.5e9 if plan["num_prfaas"] else None,
        "bottleneck": more["bottleneck"],
        "eq7_residual": 0.01 if plan["threshold_tokens"] else None,
        "eq8_residual": -0.2,
        "ttft": _prediction(1.25, exact, more["service_s"]),
        "load_curve": [
            {"load": load, **_point_of_curve(load * exact, exact, more["service_s"])}
            for load in (0.1, 0.5, 0.9)
        ],
        "transfer_alone": dict(TRANSFER) if plan["num_prfaas"] else None,
        "exact_optimum": {
            **best,
            "throughput_req_per_s": paper - 0.1,
            "throughput_exact_req_per_s": more["best_exact"],
        },
        "as_planned": {
            **plan,
            "throughput_req_per_s": paper - 0.01,
            "throughput_exact_req_per_s": exact - 0.01,
            "ttft": _prediction(1.25, exact - 0.01, more["service_s"]),
        },
        "gpus": {"h200": 32, "h20": 64} if plan["num_prfaas"] else {"h20": 96},
        "price_per_hour": 128.0 if plan["num_prfaas"] else 96.0,
    }


def _comparison(name: str, gain: float) -> dict[str, Any]:
    return {
        "deployment": name,
        "gpus": {"h200": 32, "h20": 64},
        "price_ratio": 2.0,
        "cost_per_hour": 128.0,
        "throughput_req_per_s": 3.2,
        "throughput_per_cost": 0.025,
        "gain_at_equal_cost": gain,
        "whole_instances": {
            "num_instances": 16,
            "num_prefill": 12,
            "num_decode": 4,
            "unspent_per_hour": 0.0,
            "throughput_req_per_s": 2.75,
            "gain": gain - 0.01,
        },
        "break_even": [
            {"gain": 0.0, "price_ratio": 2.62, "price_ratio_with_link": 2.51},
            {"gain": 0.15, "price_ratio": 2.02, "price_ratio_with_link": 1.93},
        ],
        "link": {
            "rate_bytes_per_s": 12.5e9,
            "egress_bytes_per_month": 4.06e15,
            "offered_egress_bytes_per_month": 1.59e15,
            "cost_per_hour": 5.5,
            "offered_cost_per_hour": 2.25,
            "gain": gain - 0.04,
            "break_even_price_per_gb": 0.00356 if gain > 0 else None,
            "break_even_price_per_gbps_month": 144.6 if gain > 0 else None,
        },
    }


def _shares(start: float, chip: float, threshold: float) -> dict[str, Any]:
    def step(added: str | None, reached: float, before: float) -> dict[str, Any]:
        return {
            "added": added,
            "throughput_req_per_s": reached,
            "gain_req_per_s": reached - before,
        }

    end = start + chip + threshold
    values = {
        (): start,
        ("chip",): start + chip,
        ("threshold",): start - 0.1,
        ("bandwidth",): start,
        ("chip", "threshold"): end,
        ("chip", "bandwidth"): start + chip,
        ("threshold", "bandwidth"): start - 0.1,
        ("chip", "threshold", "bandwidth"): end,
    }
    return {
        "coalitions": [
            {"members": list(members), "throughput_req_per_s": value}
            for members, value in values.items()
        ],
        "chain": [
            step(None, start, start),
            step("chip", start + chip, start),
            step("threshold", end, start + chip),
            step("bandwidth", end, end),
        ],
        "reverse_chain": [
            step(None, start, start),
            step("bandwidth", start, start),
            step("threshold", start - 0.1, start),
            step("chip", end, start - 0.1),
        ],
        "shapley": [
            {"member": "chip", "gain_req_per_s": chip, "share_of_gain": chip / (end - start)},
            {
                "member": "threshold",
                "gain_req_per_s": threshold,
                "share_of_gain": threshold / (end - start),
            },
            {"member": "bandwidth", "gain_req_per_s": 0.0, "share_of_gain": 0.0},
        ],
        "gain_req_per_s": end - start,
        "gpus_req_per_s": 0.0,
    }


def _bar(name: str, unit: str, *ends: float | None, reason: str | None = None) -> dict[str, Any]:
    low, high, low_rate, high_rate = ends
    return {
        "input": f"key.of.{name}",
        "label": name,
        "unit": unit,
        "low": low,
        "high": high,
        "low_req_per_s": low_rate,
        "high_req_per_s": high_rate,
        "low_ratio": low_rate and low_rate / 2,
        "high_ratio": high_rate and high_rate / 2,
        "reason": reason,
    }


def _point(rate: float | None, **key: float) -> dict[str, Any]:
    return {
        "threshold_tokens": 20000 if rate else None,
        "num_prefill": 3 if rate else None,
        "num_decode": 5 if rate else None,
        "throughput_req_per_s": rate,
        "homogeneous_req_per_s": 2.0 if rate else None,
        "ratio": rate and rate / 2.0,
        "bottleneck": "pd_decode" if rate else None,
        "reason": None if rate else "refused here",
        **key,
    }


def _sweeps() -> dict[str, Any]:
    return {
        "objective": "paper",
        "cached_fraction": 0.8,
        "agent_share": [_point(3.2 + share, agent_share=share) for share in (0.0, 0.5, 1.0)],
        "rtt": [
            {
                "rtt_s": rtt_s,
                "ttft_mean_s": 2.2 + rtt_s / 2,
                "ttft_p90_s": 3.3 + rtt_s,
                "added_mean_s": rtt_s / 2,
                "added_p90_s": rtt_s,
                "handshake_ttft_mean_s": 2.2 + 1.5 * rtt_s,
                "handshake_ttft_p90_s": 3.3 + 3 * rtt_s,
                "bdp_bytes_per_connection": 3.125e9 * rtt_s,
            }
            for rtt_s in (0.001, 0.15)
        ],
        "rtt_limit": {
            "handshake_round_trips": 2,
            "near_mean_s": 2.2,
            "near_p90_s": 3.3,
            "homogeneous_mean_s": 4.5,
            "homogeneous_p90_s": 9.7,
            "mean_rtt_s": 4.54,
            "p90_rtt_s": None,
            "handshake_mean_rtt_s": 1.51,
            "handshake_p90_rtt_s": None,
        },
        "bandwidth": {
            "points": [
                _point(1.6, link_bytes_per_s=0.2e9),
                _point(3.2, link_bytes_per_s=1.5e9),
                _point(3.2, link_bytes_per_s=12.5e9),
            ],
            "hard_limit_bytes_per_s": 1.5e9,
        },
        "output_tokens": [_point(3.2, output_tokens=1024), _point(None, output_tokens=4096)],
        "chip_speed": [_point(3.2, chip_speed=1.0), _point(4.4, chip_speed=2.0)],
    }


def _grid() -> dict[str, Any]:
    """(N_p) x (thresholds): 3.2 at N_p = 3 and 20,000 tokens, less by the distance from there."""
    return {
        "threshold_tokens": THRESHOLDS,
        "num_prefill": [2, 3, 4],
        "num_splits": 3,
        "best_threshold_tokens": [20000.0] * 3,
        "lambda_max_req_per_s": [
            [3.2 - 0.3 * abs(count - 3) - 0.2 * abs(at - 2) for at in range(len(THRESHOLDS))]
            for count in (2, 3, 4)
        ],
        "stage": [["prfaas_prefill"] * 2 + ["pd_prefill"] * 3] * 3,
    }


def _wall() -> dict[str, Any]:
    return {
        "rows": [
            {
                "model": model,
                "hardware": "H200",
                "tokens": tokens,
                "kv_bytes_per_s_per_instance": each,
                "gpus": gpus,
                "egress_bytes_per_s": each * gpus / 8,
                "provenance": "derived",
            }
            for model, each in (("small", 0.1e9), ("large", 7.5e9))
            for tokens in (32768, 131072)
            for gpus in (512, 10000)
        ]
    }


def document(**change: Any) -> dict[str, Any]:
    """The document; ``change`` replaces whole keys of it."""
    offloading, homogeneous, naive = (
        _plan(4, 3, 5, 20000),
        _plan(None, 9, 3, None),
        _plan(4, None, 8, None),
    )
    return {
        "scenario": "round-numbers",
        "scenario_sha256": "ab" * 32,
        "model": "a-model",
        "objective": "paper",
        "kept": False,
        "rate_req_per_s": 1.25,
        "link_bytes_per_s": 12.5e9,
        "notes": ["a note on what this rests on"],
        "warnings": ["a warning <b>not to be missed</b>"],
        "provenance": {
            "h200": {
                "profile": "profiles/h200.json",
                "points": {"published": 4, "stand_in": 1},
                "extrapolate": None,
            },
            "h20": {
                "profile": "profiles/h20.json",
                "points": {"derived": 3},
                "extrapolate": "end_slope",
            },
        },
        "deployments": {
            "prfaas_pd": _deployment(
                offloading, 3.2, 3.0, _plan(4, 4, 4, 22000),
                best_exact=3.1, bottleneck="pd_prefill", service_s=2.2,
            ),
            "homogeneous_pd": _deployment(
                homogeneous, 2.0, 1.9, homogeneous,
                best_exact=1.9, bottleneck="pd_prefill", service_s=4.5,
            ),
            "naive_heterogeneous": _deployment(
                naive, 2.4, 2.3, naive,
                best_exact=2.3, bottleneck="prfaas_prefill", service_s=1.7,
            ),
        },
        "curve": {
            "threshold_tokens": THRESHOLDS,
            "paper_req_per_s": [2.4, 2.6, 3.2, 1.2, 0.7],
            "exact_req_per_s": [2.3, 2.5, 3.0, 1.1, 0.65],
            "paper_stage": ["prfaas_prefill"] * 3 + ["pd_prefill"] * 2,
            "exact_stage": ["prfaas_prefill"] * 2 + ["pd_prefill"] * 3,
        },
        "grid": _grid(),
        "equal_cost": {
            "objective": "paper",
            "currency": "relative",
            "price_per_gpu_hour": {"h20": 1.0, "h200": 2.0},
            "link_price_per_gb": 0.001,
            "link_price_per_gbps_month": 0.0,
            "homogeneous_gpus": {"h20": 96},
            "homogeneous_cost_per_hour": 96.0,
            "homogeneous_req_per_s": 2.0,
            "homogeneous_per_cost": 2.0 / 96,
            "comparisons": [
                _comparison("prfaas_pd", 0.155),
                _comparison("naive_heterogeneous", -0.129),
            ],
        },
        "attribution": {
            "replaced_instances": 4,
            "paper": _shares(2.0, 1.05, 0.15),
            "exact": _shares(1.9, 1.2, 0.0),
        },
        "sensitivity": {
            "objective": "paper",
            "base_req_per_s": 3.2,
            "base_ratio": 1.6,
            "bars": [
                _bar("speed of the chip", "times", 0.8, 1.25, 2.9, 3.8),
                _bar("link", "bytes/s", 10e9, 15.625e9, 3.2, 3.2),
                _bar("time per output token", "s", 0.02, 0.03, None, 3.3, reason=REFUSED),
                _bar("spread", "ln tokens", None, None, None, None, reason="a trace has no law"),
            ],
        },
        "sweeps": _sweeps(),
        "bandwidth_wall": _wall(),
        **change,
    }  # fmt: skip


def _point_of_curve(rate: float, exact: float, service_s: float) -> dict[str, Any]:
    """Mean and P90 of ``_prediction``, and a doubt above 85 % of what is carried."""
    found = _prediction(rate, exact, service_s)
    return {
        **{key: found[key] for key in ("rate_req_per_s", "ttft_mean_s", "ttft_p90_s")},
        "accuracy": "up to 15 % low" if rate > 0.85 * exact else None,
    }


def _prediction(rate: float, exact: float, service_s: float) -> dict[str, Any]:
    """Twice the service time at half of what is carried; nothing from there on."""
    carried = rate < exact
    mean_s = service_s / (1 - rate / exact) if carried else None
    parts = {
        "prefill_queue_s": (mean_s or 0.0) - service_s - 0.03,
        "prefill_s": service_s,
        "transfer_layerwise_s": 0.02,
        "transfer_at_end_s": 0.08,
        "decode_admission_s": 0.01,
    }
    return {
        "rate_req_per_s": rate,
        "load": rate / exact,
        "unstable_stage": None if carried else "pd_prefill",
        **{f"service_ttft_{name}_s": service_s * times for name, times in _STATISTICS.items()},
        **{f"ttft_{name}_s": mean_s and mean_s * times for name, times in _STATISTICS.items()},
        "parts": parts if carried else None,
        "accuracy": {
            "promised": 0.05 if carried else None,
            "measured": {"mean": 0.004, "p50": 0.002, "p90": 0.003, "p99": 0.012},
            "note": None if carried else "No TTFT: its queue only grows.",
            "measured_loads": [0.5, 0.6] if carried else None,
        },
    }

"""The report's charts: frames from the run's tables, titles that say what they show.

Seconds are scenario seconds, link rates Gbit/s (10^9 bits) of scenario units.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd

from harness.phrases import scaled
from harness.record.run_directory import Manifest
from harness.statistics import mean_levels
from harness.summary import (
    LENGTH_BINS,
    completed,
    floats,
    length_bins,
    planned_instants_s,
    prefill_errors,
)
from reports.document import Axis, Chart

GBIT_BYTES = 1e9 / 8
#: Stretches of time whose mean level is drawn.
_STRETCHES = 200
#: The budget's terms as drawn: what takes too little to be seen is drawn together.
LAYERS = {
    "prefill": ("prefill",),
    "prefill queue": ("prefill_queue",),
    "exposed transfer": ("transfer",),
    "decode admission": ("decode_admission",),
    "harness overhead": (
        "send_lag",
        "gateway",
        "first_token",
        "return",
    ),
    "residual": ("residual",),
}


def ttft_distribution(
    requests: pd.DataFrame,
    simulated: pd.DataFrame,
    names: tuple[str, ...],
    *,
    are_simulated: bool = False,
) -> Chart | None:
    """TTFT of requests, one that was not completed never reached, beside the simulated one; they
    are measured, or ``are_simulated`` themselves."""
    measured = requests[["deployment", "ttft_s"]].assign(modelled=are_simulated)
    measured["ttft_s"] = np.where(
        requests["outcome"] == "completed", floats(requests, "ttft_s"), np.inf
    )
    modelled = simulated[["deployment", "ttft_s"]].assign(modelled=True)
    frame = measured if simulated.empty else pd.concat([measured, modelled], ignore_index=True)
    medians = {name: _median(completed_ttft(requests, name)) for name in names}
    known = {name: value for name, value in medians.items() if value is not None}
    if not known:
        return None
    listed = _listed(f"{value:.2f} s with {name}" for name, value in known.items())
    told = "simulated" if are_simulated else "measured and simulated"
    return Chart(
        "cdf",
        frame,
        f"Half of the requests get their first token within {listed}",
        f"Distribution of time to first token, {told}. Median: {listed}.",
        Axis("ttft_s", "time to first token from the planned send (s)", log=True),
        Axis("share", "share of planned requests"),
        series="deployment",
        order=names,
        dashed="modelled",
        dashed_labels=("measured", "simulated"),
    )


def in_flight(
    requests: pd.DataFrame,
    names: tuple[str, ...],
    steady_start_s: float | None,
    time_scale: float,
) -> Chart | None:
    """Requests in flight over time; one repeat is drawn."""
    first = requests[(requests["repeat"] == 0) & requests["end_s"].notna()]
    until_s = float(floats(first, "end_s").max(initial=0.0))
    if until_s <= 0.0:
        return None
    edges_s = np.linspace(0.0, until_s, _STRETCHES + 1)
    parts, means = [], []
    for name in names:
        here = first[first["deployment"] == name]
        if here.empty:
            continue
        spans = planned_instants_s(here, time_scale), floats(here, "end_s")
        own_s = float(spans[1].max())
        means.append(f"{mean_levels(*spans, np.array([0.0, own_s]))[0]:.1f} with {name}")
        levels = pd.DataFrame({"t_s": edges_s[:-1], "level": mean_levels(*spans, edges_s)})
        parts.append(levels[edges_s[:-1] < own_s].assign(deployment=name))
    listed = _listed(means)
    return Chart(
        "lines",
        pd.concat(parts, ignore_index=True),
        f"Requests in flight average {listed}",
        f"Requests in flight over time. Average: {listed}.",
        Axis("t_s", "time since the load began (s)"),
        Axis("level", "requests in flight"),
        series="deployment",
        order=names,
        x_reference=(
            None if steady_start_s is None else (steady_start_s, "the steady window begins")
        ),
    )


def completed_ttft(requests: pd.DataFrame, name: str) -> "np.typing.NDArray[np.float64]":
    """TTFT of a deployment's completed requests."""
    return floats(completed(requests[requests["deployment"] == name]), "ttft_s")


def budget_means(requests: pd.DataFrame) -> pd.DataFrame:
    """Mean of each layer by deployment and length bin: deployment, length_bin, layer, mean_s."""
    done = completed(requests)
    table = pd.DataFrame(
        {
            "deployment": done["deployment"].astype(str),
            "length_bin": length_bins(floats(done, "input_tokens")),
        }
    )
    for layer, terms in LAYERS.items():
        # A term that is not on the path to the first token (null) takes nothing of it.
        table[layer] = sum(np.nan_to_num(floats(done, f"{term}_s")) for term in terms)
    means = table.groupby(["deployment", "length_bin"], sort=False)[list(LAYERS)].mean()
    long = means.reset_index().melt(
        ["deployment", "length_bin"], var_name="layer", value_name="mean_s"
    )
    place = {name: number for number, name in enumerate(LENGTH_BINS)}
    return long.sort_values("length_bin", key=lambda bins: bins.map(place), kind="stable")


def budget(requests: pd.DataFrame, names: tuple[str, ...]) -> Chart | None:
    """Stacked mean terms of TTFT by length bin, a panel a deployment."""
    frame = budget_means(requests)
    if frame.empty:
        return None
    place = {name: number for number, name in enumerate(names)}
    frame = frame.sort_values("deployment", key=lambda column: column.map(place), kind="stable")
    shares = []
    for name in names:
        done = completed(requests[requests["deployment"] == name])
        total_s, queue_s = floats(done, "ttft_s").sum(), floats(done, "prefill_queue_s")
        if total_s > 0:
            shares.append(f"{100 * np.nansum(queue_s) / total_s:.0f} % with {name}")
    listed = _listed(shares)
    return Chart(
        "stacked_bars",
        frame,
        f"Waiting for a prefill instance: {listed} of time to first token",
        f"Mean terms of time to first token by input length. Prefill queue: {listed}.",
        Axis("length_bin", "input tokens"),
        Axis("mean_s", "mean time (s)"),
        series="layer",
        order=tuple(LAYERS),
        panel="deployment",
    )


def agreement(requests: pd.DataFrame, names: tuple[str, ...]) -> Chart | None:
    """Measured against simulated TTFT, request by request."""
    both = completed(requests).dropna(subset=["ttft_s", "modelled_ttft_s"])
    if both.empty:
        return None
    errors = []
    for name in names:
        here = both[both["deployment"] == name]
        if len(here):
            error = floats(here, "ttft_s").mean() / floats(here, "modelled_ttft_s").mean() - 1
            errors.append(f"{100 * error:+.1f} % for {name}")
    listed = _listed(errors)
    return Chart(
        "scatter",
        both[["deployment", "ttft_s", "modelled_ttft_s"]],
        f"Mean measured TTFT differs from the simulation's by {listed}",
        f"Measured against simulated time to first token of each request. Mean error: {listed}.",
        Axis("modelled_ttft_s", "simulated time to first token (s)", log=True),
        Axis("ttft_s", "measured (s)", log=True),
        series="deployment",
        order=names,
        identity=True,
    )


def link_rate(
    link: pd.DataFrame, names: tuple[str, ...], capacity_bytes_per_s: float | None
) -> Chart | None:
    """Rate from the PrfaaS cluster to the PD cluster over time, a panel a deployment."""
    samples = link[(link["kind"] == "link") & (link["direction"] == "far_to_near")]
    samples = samples.dropna(subset=["rate_bytes_per_s", "t_s"])
    # One repeat is drawn; the others differ by the machine's noise alone.
    samples = samples[(samples["repeat"] == 0) & (samples["t_s"] >= 0)]
    if samples.empty:
        return None
    frame = pd.DataFrame(
        {
            "deployment": samples["deployment"].astype(str),
            "t_s": floats(samples, "t_s"),
            "gbit_per_s": floats(samples, "rate_bytes_per_s") / GBIT_BYTES,
        }
    )
    place = {name: number for number, name in enumerate(names)}
    frame = frame.sort_values("deployment", key=lambda column: column.map(place), kind="stable")
    means = [
        f"{time_mean(group['t_s'], group['gbit_per_s']):.1f} Gbit/s with {name}"
        for name, group in frame.groupby("deployment", sort=False)
    ]
    capacity = "" if capacity_bytes_per_s is None else _capacity(capacity_bytes_per_s)
    return Chart(
        "lines",
        frame,
        f"The link carries {_listed(means)} on average{', of ' + capacity if capacity else ''}",
        f"Link rate towards the PD cluster over time. Average: {_listed(means)}.",
        Axis("t_s", "time since the load began (s)"),
        Axis("gbit_per_s", "Gbit/s"),
        series="deployment",
        order=names,
        panel="deployment",
        reference=(
            None
            if capacity_bytes_per_s is None
            else (capacity_bytes_per_s / GBIT_BYTES, f"capacity {capacity}")
        ),
    )


def time_mean(at_s: "pd.Series[float]", rate: "pd.Series[float]") -> float:
    """Mean of a rate over time, each sample being that of the interval before it."""
    ordered = pd.DataFrame({"at_s": at_s, "rate": rate}).sort_values("at_s")
    length_s = ordered["at_s"].diff()
    spanned_s = float(length_s.sum())
    return float((ordered["rate"] * length_s).sum()) / spanned_s if spanned_s > 0 else 0.0


def agreement_by_bin(requests: pd.DataFrame, names: tuple[str, ...]) -> pd.DataFrame:
    """Mean measured and simulated TTFT and their difference, bins by deployments."""
    both = completed(requests).dropna(subset=["ttft_s", "modelled_ttft_s"])
    columns: dict[str, dict[str, str]] = {}
    for name in names:
        here = both[both["deployment"] == name]
        bins = np.asarray(length_bins(floats(here, "input_tokens")))
        columns[name] = {}
        for label in dict.fromkeys(bins):
            measured_s = float(floats(here[bins == label], "ttft_s").mean())
            modelled_s = float(floats(here[bins == label], "modelled_ttft_s").mean())
            difference = 100 * (measured_s / modelled_s - 1)
            columns[name][label] = f"{measured_s:.2f} / {modelled_s:.2f} ({difference:+.1f} %)"
    return _binned(columns)


def prefill_by_bin(requests: pd.DataFrame, names: tuple[str, ...]) -> pd.DataFrame:
    """Median error of prefill against its profile, bins by deployments and hardware."""
    columns: dict[str, dict[str, str]] = {}
    for name in names:
        table = prefill_errors(requests[requests["deployment"] == name])
        for row in table.to_dict("records"):
            text = f"{100 * row['median_error']:+.1f} % of {row['requests']}"
            columns.setdefault(f"{name}, {row['hardware']}", {})[row["length_bin"]] = text
    return _binned(columns)


def link_table(manifest: Manifest) -> pd.DataFrame:
    """The link as asked for, applied and measured, in scenario units, then as it is on the wire."""
    asked, applied = manifest.link_requested or {}, manifest.link_applied or {}
    check = manifest.link_check or {}
    time_scale, per_s = manifest.time_scale, manifest.byte_scale / manifest.time_scale
    gbit = 1.0 / GBIT_BYTES
    # Of a link that was recorded as alike in both directions.
    rate, rate_wire = "rate_bytes_per_s", "rate_wire_bytes_per_s"
    rows: list[dict[str, object]] = []
    for way, direction in (("PrfaaS to PD", "far_to_near"), ("PD to PrfaaS", "near_to_far")):
        key, wire = f"rate_{direction}_bytes_per_s", f"rate_{direction}_wire_bytes_per_s"
        measured = check.get(key)
        rows.append(
            {
                "link": f"rate {way} (Gbit/s)",
                "asked for": scaled(asked.get(key, asked.get(rate)), gbit),
                "applied": scaled(applied.get(key, applied.get(rate)), gbit),
                "measured": scaled(measured, per_s * gbit),
                "on the wire: applied": scaled(applied.get(wire, applied.get(rate_wire)), gbit),
                "on the wire: measured": scaled(measured, gbit),
            }
        )
    rtt_s = check.get("rtt_p50_s")
    rows.append(
        {
            "link": "round trip P50 (ms)",
            "asked for": scaled(asked.get("rtt_s"), 1e3),
            "applied": scaled(applied.get("rtt_s"), 1e3),
            "measured": scaled(rtt_s, 1e3 * time_scale),
            "on the wire: applied": scaled(applied.get("rtt_wall_s"), 1e3),
            "on the wire: measured": scaled(rtt_s, 1e3),
        }
    )
    return pd.DataFrame(rows, dtype=object)


def _binned(columns: dict[str, dict[str, str]]) -> pd.DataFrame:
    labels = [label for label in LENGTH_BINS if any(label in one for one in columns.values())]
    table: dict[str, list[str | None]] = {"input tokens": [*labels]}
    for name, values in columns.items():
        table[name] = [values.get(label) for label in labels]
    return pd.DataFrame(table, dtype=object)


def _capacity(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GBIT_BYTES:g} Gbit/s"


def _median(values: "np.typing.NDArray[np.float64]") -> float | None:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None


def _listed(parts: Iterable[str]) -> str:
    words = list(parts)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}"

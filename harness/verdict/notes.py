"""What is worth knowing of a run but no reason to refuse: overheads, a missed SLO, floors."""

from collections.abc import Iterator

from harness.record.run_directory import Manifest, RunDirectory
from harness.record.tables import read_notes
from harness.summary import SLO_RELATIVE, SLO_WALL_S
from harness.verdict.gates import View, concurrency

#: The terms of the budget, and the residual, that are the harness' own doing.
OVERHEADS = ("send_lag", "gateway", "first_token", "return", "residual")


def run_notes(run: RunDirectory, manifest: Manifest) -> Iterator[str]:
    yield from manifest.notes
    for note in manifest.link_notes:
        yield f"link: {note}"
    if manifest.load_self_test is not None and "skipped" in manifest.load_self_test:
        yield f"load: the client was not tried before: {manifest.load_self_test['skipped']}"
    if (slots := concurrency(manifest)) is not None:
        yield (
            f"load: a closed loop of {slots} requests in flight: answers decide when requests "
            "leave, so nothing is said of arrivals, and a slow server is asked less often"
        )
    if manifest.link_changes:
        yield (
            f"link: it changed {len(manifest.link_changes)} times while load ran, as asked; the "
            "simulation's link is steady, so differences from it are of that too"
        )
    met = read_notes(run)
    for name in met.get("truncated", {}):
        yield f"{name} ends in the middle of a line, which is left out"
    for name in met.get("missing", ()):
        yield f"{name} was never written"


def overheads(view: View) -> Iterator[str]:
    mean_ttft_s = view.summary["ttft_mean_s"]
    if not mean_ttft_s:
        return
    for term in OVERHEADS:
        spent_s = view.summary["budget_mean_s"][term]
        if spent_s is not None and abs(spent_s) > view.gates.overhead_of_ttft * mean_ttft_s:
            yield (
                f"{term.replace('_', ' ')} takes {100 * spent_s / mean_ttft_s:.1f} % of mean TTFT "
                f"({1e3 * spent_s / view.manifest.time_scale:.2f} ms of wall time, multiplied by "
                f"the time scale)"
            )


def missed_slo(view: View) -> Iterator[str]:
    share = view.summary["slo_attainment"]
    if share is None or share >= view.gates.slo_attainment:
        return
    slo = view.manifest.scenario.get("slo", {})
    parts = []
    if slo.get("tpot_s") is not None:
        parts.append(
            f"TPOT {1e3 * slo['tpot_s']:g} ms, met up to {100 * SLO_RELATIVE:g} % above it "
            f"or {1e3 * SLO_WALL_S:g} ms of wall time over the whole output"
        )
    if slo.get("ttft_s") is not None:
        parts.append(f"TTFT {slo['ttft_s']:g} s, met without tolerance")
    yield f"{100 * share:.1f} % of completed requests meet the SLO ({'; '.join(parts)})"

"""The last section of a report: what made the run, from its manifest."""

from collections.abc import Iterator

from harness.phrases import flat
from harness.report.blocks import Run
from reports.document import Block, Facts, Prose


def manifest(data: Run) -> Iterator[Block]:
    told = data.manifest
    facts: list[tuple[str, str]] = [
        ("run", told.run_id),
        ("kind", told.kind),
        ("status", told.status + (f": {told.error}" if told.error else "")),
        ("started (UTC)", told.started_utc),
        ("scenario hash", told.scenario_hash),
        ("time scale", f"{told.time_scale:g}"),
        ("byte scale", f"{told.byte_scale:g}"),
        ("order", ", ".join(cell.name for cell in told.deployments)),
    ]
    groups = {
        "seed": told.seeds,
        "version": told.versions,
        "machine": told.machine,
        "clock": told.clocks,
    }
    for title, values in groups.items():
        facts += [(f"{title}: {name}", text) for name, text in flat(values)]
    # Profiles and layers are long; manifest.json holds them.
    short = {
        key: value
        for key, value in told.scenario.items()
        if key not in ("model", "hardware", "path", "name")
    }
    facts += [(f"scenario: {name}", text) for name, text in flat(short)]
    yield Facts(tuple(facts))
    where = "The whole scenario as resolved, profiles included, is in manifest.json"
    if not data.is_simulated:
        where += "; trace.json shows every request on its instances' tracks (open it at a Perfetto"
        where += " viewer)"
    yield Prose(where + ".")

"""A live deployment for tests: real workers, gateway and load on a real link of this machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.record.run_directory import Cell, RunDirectory
from harness.scenario import Scenario, load_scenario
from harness.testbed.local import LocalTestbed
from harness.workload import build_schedule
from netem.testlink import open_link

ROOT = Path(__file__).parent.parent
CASE_STUDY = ROOT / "scenarios/paper-case-study.toml"


def flat_profile(path: Path, prefill_s: float, step_s: float, max_batch: int) -> Path:
    """A profile file whose costs are constants: the known truth."""
    point = {"cached_tokens": 0, "prefill_s": prefill_s, "provenance": "measured", "source": "set"}
    step = {"step_s": step_s, "provenance": "measured", "source": "set"}
    profile = json.loads((ROOT / "profiles/prfaas-1t-8xh20.json").read_text())
    profile["prefill"]["points"] = [point | {"new_tokens": n} for n in (1, 200_000)]
    profile["decode"]["max_batch"] = max_batch
    profile["decode"]["points"] = [
        step | {"batch": batch, "context_tokens": context}
        for batch in sorted({1, max_batch})
        for context in (1, 300_000)
    ]
    path.write_text(json.dumps(profile))
    return path


@dataclass(frozen=True)
class Live:
    """An open testbed over the relay: its servers are on this host's loopback."""

    testbed: LocalTestbed
    run: RunDirectory
    cell: Cell

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.testbed.gateway_port}"

    def rows(self, spool: str) -> list[dict[str, Any]]:
        """What a spool holds so far."""
        text = self.run.spool_path(self.cell, spool).read_text()
        return [json.loads(line) for line in text.splitlines()]


def scenario(*overrides: str) -> Scenario:
    """The case study with overrides."""
    return load_scenario(CASE_STUDY, overrides)


@contextmanager
def live(given: Scenario, deployment: str, root: Path) -> Iterator[Live]:
    """Bring ``deployment`` up over the relay, which every machine can build."""
    run = RunDirectory.create(root, "test", datetime.now(UTC))
    run.write_schedule(build_schedule(given.workload, given.load))
    cell = Cell(deployment, 0)
    spec = given.link.scaled(given.scale.time, given.scale.bytes)
    with (
        open_link(spec, "relay") as link,
        LocalTestbed(given, given.deployments[deployment], run, cell, link) as testbed,
    ):
        yield Live(testbed, run, cell)

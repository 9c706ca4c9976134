"""Steps by batch and bounded memory, live: testbed and simulator of one schedule agree."""

import json
import statistics
from pathlib import Path

import pytest
from live import flat_profile, live, scenario

from harness.preparation import prepare
from harness.scenario import Scenario


def by_batch_profile(path: Path) -> Path:
    """A step of 5 ms and 5 ms for each request in it."""
    profile = json.loads(flat_profile(path, 0.5, 0.1, 20).read_text())
    for point in profile["decode"]["points"]:
        point["step_s"] = 0.005 + 0.005 * point["batch"]
    path.write_text(json.dumps(profile))
    return path


def simulated_s(given: Scenario) -> tuple[float, float]:
    """Mean times to the second and the last token."""
    rows = prepare(given).simulations["homogeneous_pd"].requests
    second = [one.time_to_second_token_s for one in rows]
    last = [one.e2e_s for one in rows]
    assert None not in second
    assert None not in last
    return statistics.fmean(s for s in second if s), statistics.fmean(s for s in last if s)


def measured_s(given: Scenario, root: Path) -> list[float]:
    """The same live."""
    with live(given, "homogeneous_pd", root) as testbed:
        result = testbed.testbed.replay("steps", lambda *_: None, lambda _: None)
        assert result.completed == 60
        clients = testbed.rows("client")
    return [
        statistics.fmean(row["chunk_mono_ns"][token] - row["planned_mono_ns"] for row in clients)
        / 1e9
        * given.scale.time
        for token in (1, -1)
    ]


@pytest.mark.quiet
@pytest.mark.parametrize(
    "setting",
    [
        ("serving.decode_steps=by_batch",),
        ("serving.decode_memory='8GiB'",),
        ("serving.decode_memory='8GiB'", "scheduling.admission=reserve_first"),
    ],
)
def test_the_live_engine_serves_as_the_simulator_does(
    setting: tuple[str, ...], tmp_path: Path
) -> None:
    options = (
        "load.num_requests=60",
        "load.rate_req_per_s=2.0",
        f"hardware.h20.profile='{by_batch_profile(tmp_path / 'profile.json')}'",
        "deployments.homogeneous_pd.num_decode=1",
        "slo.tpot='200ms'",
        "workload.output_tokens=200",
        "testbed.stream_interval_tokens=1",
        "scheduling.admission_deadline='600s'",
    )
    given = scenario(*options, *setting)
    live_s, here_s = measured_s(given, tmp_path), simulated_s(given)
    assert live_s == pytest.approx(here_s, rel=0.07)
    # What it would be without.
    assert abs(simulated_s(scenario(*options))[1] / live_s[1] - 1) > 0.2

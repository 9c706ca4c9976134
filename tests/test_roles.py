"""Roles on the long time scale: what is converted when, against the search of the planner."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.core import Role
from harness.deployment import Deployment
from harness.scenario import Scenario, load_scenario
from harness.scheduling.roles import DWELL, RoleChange, RoleControl, RolesConfig, Stages
from harness.throughput import deployment_model, solve
from harness.workload import LengthDistribution, build_schedule

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
BASE, LONGEST, PERIOD_S = 19_400, 131_072, 60.0
#: The paper's split, with nothing short.
CALM = Stages(4, 3, 5, 12.5e9, remote_busy=0.5, prefill_busy=0.5, decode_busy=0.5)
PREFILL_SHORT = replace(CALM, prefill_busy=1.0, prefill_wait_s=40.0)
DECODE_SHORT = replace(CALM, decode_busy=1.0, decode_wait_s=10.0)


@pytest.fixture(scope="module")
def paper() -> Scenario:
    return load_scenario(PAPER)


def control(scenario: Scenario, base_tokens: int | None = BASE) -> RoleControl:
    remote = scenario.hardware["h200"].profile.prefill_s
    return RoleControl(
        RolesConfig(
            longest_tokens=LONGEST,
            role_period_s=PERIOD_S,
            link_target=0.9,
            num_slots=20,
            remote_prefill_s=None if base_tokens is None else remote,
            local_prefill_s=scenario.hardware["h20"].profile.prefill_s,
        ),
        base_tokens,
    )


class Drive:
    """A role control under arrivals of given lengths at one a second."""

    def __init__(self, scenario: Scenario, base_tokens: int | None = BASE) -> None:
        self.scenario, self.one, self.now_s = scenario, control(scenario, base_tokens), 0.0
        self.seen: list[int] = []

    def periods(self, count: int, lengths: Sequence[int], stages: Stages) -> list[RoleChange]:
        changes = []
        for _ in range(round(count * PERIOD_S)):
            tokens = lengths[len(self.seen) % len(lengths)]
            self.seen.append(tokens)
            kv_bytes = self.scenario.model.architecture.kv_bytes(tokens)
            self.one.observe(tokens, 0, kv_bytes, 1023 * 0.025, self.now_s)
            self.now_s += 1.0
            change = self.one.tick(stages, self.now_s)
            if change is not None:
                changes.append(change)
        return changes


def paper_lengths(*settings: str) -> list[int]:
    scenario = load_scenario(PAPER, ["load.num_requests=3000", *settings])
    return [r.input_tokens for r in build_schedule(scenario.workload, scenario.load)]


def conversions(changes: Sequence[RoleChange]) -> list[Role]:
    return [change.to for change in changes if change.to is not None]


def optimum(scenario: Scenario, lengths: Sequence[int], deployment: Deployment) -> Deployment:
    return solve(scenario, deployment, "exact", law(lengths))


def law(lengths: Sequence[int]) -> LengthDistribution:
    values = np.array(lengths, dtype=np.float64)
    return LengthDistribution(values, np.ones(len(values)), 1024.0, np.zeros(len(values)))


def test_the_papers_plan_stays_whatever_is_short(paper: Scenario) -> None:
    """4/3/5 is the best split of the case study: a short stage alone converts nothing."""
    for stages in (CALM, PREFILL_SHORT, DECODE_SHORT):
        assert Drive(paper).periods(12, paper_lengths(), stages) == []


def test_a_quiet_system_converts_nothing_though_another_split_would_carry_more(
    paper: Scenario,
) -> None:
    assert Drive(paper).periods(12, [4_000, 8_000, 12_000], CALM) == []


def test_short_prompts_make_decode_short_and_one_instance_turns_to_it(paper: Scenario) -> None:
    drive = Drive(paper)
    lengths = paper_lengths("workload.mu=8.5")
    drive.periods(4, lengths, CALM)
    assert conversions(drive.periods(DWELL - 1, lengths, DECODE_SHORT)) == []
    assert conversions(drive.periods(2, lengths, DECODE_SHORT)) == ["decode"]
    # And nothing more until it is done.
    assert drive.one.converting
    assert drive.periods(6, lengths, DECODE_SHORT) == []


def test_a_burst_of_one_or_two_periods_converts_nothing(paper: Scenario) -> None:
    drive = Drive(paper)
    lengths = paper_lengths("workload.mu=8.5")
    changes = drive.periods(4, lengths, CALM)
    for _ in range(6):
        changes += drive.periods(DWELL - 1, lengths, DECODE_SHORT)
        changes += drive.periods(1, lengths, CALM)
    assert conversions(changes) == []


def test_conversions_end_at_the_planners_optimum_and_so_does_the_threshold(
    paper: Scenario,
) -> None:
    lengths = paper_lengths("workload.mu=8.5")
    drive, stages = Drive(paper), DECODE_SHORT
    for _ in range(5):
        found = conversions(drive.periods(8, lengths, stages))
        if not found:
            break
        assert found == ["decode"]
        stages = replace(
            stages, num_prefill=stages.num_prefill - 1, num_decode=stages.num_decode + 1
        )
        drive.one.converted(stages, drive.now_s)
    planned = paper.deployments["prfaas_pd"]
    best = deployment_model(paper, optimum(paper, lengths, planned), law(lengths))
    reached = replace(
        planned,
        threshold_tokens=drive.one.base_tokens,
        num_prefill=stages.num_prefill,
        num_decode=stages.num_decode,
    )
    mine = deployment_model(paper, reached, law(lengths))
    assert mine.lambda_max_exact_req_per_s >= 0.95 * best.lambda_max_exact_req_per_s
    assert stages.num_prefill < 3


def test_a_threshold_that_no_longer_fits_is_solved_again_without_a_conversion(
    paper: Scenario,
) -> None:
    """Prompts that nearly all stay local under the old threshold."""
    lengths = paper_lengths("workload.mu=8.9", "workload.sigma=0.4")
    two = replace(PREFILL_SHORT, num_prefill=1, num_decode=7)
    changes = Drive(paper).periods(4, lengths, two)
    assert changes
    assert changes[0].to is None
    solved = optimum(paper, lengths, replace(paper.deployments["prfaas_pd"], num_prefill=1))
    assert changes[0].base_tokens is not None
    assert changes[0].base_tokens < BASE
    assert solved.threshold_tokens is not None


def test_a_long_outage_turns_decode_instances_to_prefill(paper: Scenario) -> None:
    """All prefill is local: three instances carry 0.70 req/s, more of them more. The base stays
    what it was, for when the link is back."""
    out = replace(PREFILL_SHORT, num_remote=0, link_bytes_per_s=0.0)
    drive = Drive(paper)
    assert drive.periods(8, paper_lengths(), out) == [RoleChange(to="prefill")]
    drive.one.converted(replace(out, num_prefill=4, num_decode=4), drive.now_s)
    assert drive.one.base_tokens == BASE


@pytest.mark.parametrize(
    ("stages", "mu"), [(DECODE_SHORT, 8.0), (PREFILL_SHORT, 11.0)], ids=["decode", "prefill"]
)
def test_never_below_one_of_each(paper: Scenario, stages: Stages, mu: float) -> None:
    drive = Drive(paper)
    lengths = paper_lengths(f"workload.mu={mu}")
    for _ in range(10):
        for change in drive.periods(5, lengths, stages):
            if change.to is None:
                continue
            step = 1 if change.to == "prefill" else -1
            stages = replace(
                stages,
                num_prefill=stages.num_prefill + step,
                num_decode=stages.num_decode - step,
            )
            assert min(stages.num_prefill, stages.num_decode) >= 1
            drive.one.converted(stages, drive.now_s)
    assert (stages.num_prefill, stages.num_decode) != (3, 5)


def test_a_homogeneous_deployment_converts_and_has_no_threshold(paper: Scenario) -> None:
    drive = Drive(paper, None)
    nine = Stages(0, 9, 3, 0.0, 0.0, prefill_busy=0.4, decode_busy=1.0, decode_wait_s=20.0)
    assert drive.periods(8, paper_lengths("workload.mu=8.5"), nine) == [RoleChange(to="decode")]
    assert drive.one.converted(replace(nine, num_prefill=8, num_decode=4), drive.now_s) is None

"""Several clusters of each kind, and links whose rate is not all that bounds a transfer."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.core import ScenarioError
from harness.preparation import prepare, refuse_several_clusters, replan
from harness.scenario import Scenario, load_scenario
from harness.scheduling.config import scheduler_config
from harness.simulator import Simulation, simulate
from harness.throughput import deployment_model
from harness.transfer_model import exposure, prefill_pieces
from harness.transfer_rate import (
    CongestionControl,
    Flows,
    SlowStart,
    link_path,
    payload_bytes_per_s,
)
from harness.utilisation import predict_utilisation
from harness.workload import build_schedule, length_distribution
from netem.variation import LinkSchedule, outage

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
OWN = "deployments.prfaas_pd."
#: Nobody gives up, and placement does not follow the links: what the stages carry is what is seen.
SATURATED = (
    "load.rate_req_per_s=12",
    "scheduling.bandwidth_aware=false",
    'scheduling.admission_deadline="1000h"',
    'testbed.request_timeout="1000h"',
)


def paper(*sets: str, requests: int = 1000) -> Scenario:
    return load_scenario(PAPER, [f"load.num_requests={requests}", *sets])


def prfaas(hardware: str, instances: int, link: str) -> str:
    return f'{{hardware="{hardware}",num_instances={instances},link_rate="{link}"}}'


def pd(prefill: int, decode: int, link: str) -> str:
    return f'{{hardware="h20",num_prefill={prefill},num_decode={decode},link_rate="{link}"}}'


def more(far: list[str], near: list[str]) -> tuple[str, ...]:
    return (f"{OWN}more_prfaas=[{','.join(far)}]", f"{OWN}more_pd=[{','.join(near)}]")


def routes(simulated: Simulation) -> Counter[tuple[str, str]]:
    return Counter(
        (one.route.prefill.cluster, one.route.decode.cluster)
        for one in simulated.requests
        if one.route is not None
    )


CASES = {
    "two of everything": more([prfaas("h200", 4, "100gbit")], [pd(3, 5, "100gbit")]),
    "halves of PrfaaS": (
        f"{OWN}num_prfaas=2",
        'link.rate="50gbit"',
        *more([prfaas("h200", 2, "50gbit")], []),
    ),
    "bound by what leaves": (
        'link.rate="4gbit"',
        *more([prfaas("h200", 2, "2gbit")], [pd(3, 5, "8gbit")]),
    ),
    "bound by what enters": (
        'link.rate="6gbit"',
        *more([prfaas("h200", 4, "8gbit")], [pd(3, 5, "3gbit")]),
    ),
    "all different": more(
        [prfaas("h20", 2, "3gbit"), prfaas("h200", 1, "5gbit")], [pd(2, 2, "40gbit")]
    ),
}


@pytest.mark.parametrize("sets", CASES.values(), ids=CASES.keys())
def test_at_saturation_several_clusters_carry_what_the_equations_say(
    sets: tuple[str, ...],
) -> None:
    """Within 2 % of the exact Lambda_max, of the very lengths that were sent."""
    given = paper(*sets, *SATURATED, requests=5000)
    schedule = build_schedule(given.workload, given.load)
    lengths = replace(
        length_distribution(given),
        lengths=schedule.input_tokens.astype(float),
        weights=np.full(len(schedule), 1 / len(schedule)),
        cached_tokens=np.zeros(len(schedule)),
    )
    model = deployment_model(given, given.deployments["prfaas_pd"], lengths)
    simulated = simulate(given, "prfaas_pd", schedule)
    assert simulated.num_completed == len(schedule)
    # The last requests' decoding is no capacity that lacks.
    step_s = scheduler_config(given, "prfaas_pd").decode_step_s
    busy_s = simulated.end_s - simulated.start_s - step_s * (schedule.output_tokens.max() - 1)
    carried = simulated.num_completed / busy_s
    assert carried == pytest.approx(model.lambda_max_exact_req_per_s, rel=0.02)
    clusters = given.deployments["prfaas_pd"]
    found = routes(simulated)
    assert {near for _, near in found} == {"pd", "pd-2"}.intersection(
        ["pd"] + ["pd-2"] * bool(clusters.more_pd)
    )
    assert len({far for far, _ in found if far.startswith("prfaas")}) == 1 + len(
        clusters.more_prfaas
    )


@pytest.mark.parametrize("hardware", ["h20", "h200"])
def test_decode_of_several_clusters_is_used_up_whatever_it_runs_on(hardware: str) -> None:
    """One step of the second cluster takes 25 ms as well, or 40."""
    near = pd(2, 1, "100gbit").replace("h20", hardware)
    given = paper(
        *(f"{OWN}{key}" for key in ("num_prfaas=6", "num_prefill=5", "num_decode=3")),
        *more([], [near]),
        *SATURATED,
        "load.rate_req_per_s=4",
        requests=6000,
    )
    if hardware == "h200":
        slow = given.hardware["h200"].profile
        points = tuple(replace(p, step_s=1.6 * p.step_s) for p in slow.decode_points)
        kinds = given.hardware | {
            "h200": replace(given.hardware["h200"], profile=replace(slow, decode_points=points))
        }
        given = replace(given, hardware=kinds, slo=replace(given.slo, tpot_s=1.0))
        config = scheduler_config(given, "prfaas_pd")
        assert config.decoding("h200").step_s == pytest.approx(1.6 * config.decode_step_s)
    schedule = build_schedule(given.workload, given.load)
    model = deployment_model(given, given.deployments["prfaas_pd"])
    assert model.bottleneck == "pd_decode"
    simulated = simulate(given, "prfaas_pd", schedule)
    done = np.sort([one.planned_s + (one.e2e_s or np.inf) for one in simulated.requests])
    low, high = len(done) // 5, 4 * len(done) // 5
    carried = (high - low) / (done[high] - done[low])
    assert carried == pytest.approx(model.lambda_max_exact_req_per_s, rel=0.01)
    predicted = predict_utilisation(given, "prfaas_pd", schedule).pd_decode
    assert predicted == pytest.approx(4 / model.lambda_max_exact_req_per_s, rel=0.03)


def test_two_halves_are_one_cluster_where_no_link_is_near_its_limit() -> None:
    """The same instances behind two links: the same waits, and every byte over one of the two."""
    whole = paper("load.rate_req_per_s=1.8", requests=4000)
    halves = paper("load.rate_req_per_s=1.8", *CASES["halves of PrfaaS"], requests=4000)
    schedule = build_schedule(whole.workload, whole.load)
    one, two = (simulate(given, "prfaas_pd", schedule) for given in (whole, halves))
    assert two.num_completed == one.num_completed == len(schedule)
    assert two.ttft_s.mean() == pytest.approx(one.ttft_s.mean(), rel=0.02)
    assert two.crossed_bytes == one.crossed_bytes
    found = routes(two)
    assert found["prfaas", "pd"] + found["prfaas-2", "pd"] == routes(one)["prfaas", "pd"]
    assert found["prfaas-2", "pd"] > 0.3 * found["prfaas", "pd"]
    stages = [given.utilisation.by_stage() for given in (one, two)]
    assert stages[1]["link"] == pytest.approx(2 * stages[0]["link"], rel=1e-6)
    for stage in ("prfaas_prefill", "pd_prefill", "pd_decode"):
        assert stages[1][stage] == pytest.approx(stages[0][stage], rel=0.01)
    predicted = predict_utilisation(halves, "prfaas_pd", schedule).by_stage()
    assert predicted == pytest.approx(stages[1], rel=0.01)


def test_without_transfer_every_cluster_is_used_too() -> None:
    """Links on which nothing moves since nothing takes time are not down."""
    sets = ("load.rate_req_per_s=1.8", f"{OWN}num_prfaas=2")
    given = paper(*sets, *more([prfaas("h200", 2, "50gbit")], []), requests=2000)
    schedule = build_schedule(given.workload, given.load)
    free = simulate(given, "prfaas_pd", schedule, transfer=False)
    used = Counter(one.route.prefill.name for one in free.requests if one.route is not None)
    far = [used[name] for name in ("prfaas-p0", "prfaas-p1", "prfaas-2-p0", "prfaas-2-p1")]
    assert min(far) > 0.5 * max(far)  # ties go to the first
    one_cluster = paper("load.rate_req_per_s=1.8", requests=2000)
    whole = simulate(one_cluster, "prfaas_pd", schedule, transfer=False)
    assert free.ttft_s.mean() == pytest.approx(whole.ttft_s.mean(), rel=0.03)


def test_hardware_of_a_kind_is_predicted_as_it_is_used() -> None:
    given = paper("load.rate_req_per_s=4.2", *CASES["all different"], requests=4000)
    schedule = build_schedule(given.workload, given.load)
    used = simulate(given, "prfaas_pd", schedule).utilisation.by_stage()
    predicted = predict_utilisation(given, "prfaas_pd", schedule).by_stage()
    # Not quite saturated the faster clusters get more than their share.
    assert predicted == pytest.approx(used, rel=0.1)


def test_one_links_outage_is_that_of_one_cluster(tmp_path: Path) -> None:
    """While the first cluster's link is out, those that need PrfaaS go to the second one."""
    changes = tmp_path / "out.toml"
    changes.write_text('[[outage]]\nat = "100s"\nfor = "200s"\n')
    given = paper(
        "load.rate_req_per_s=1.5",
        f'link.schedule="{changes}"',
        *more([prfaas("h200", 4, "100gbit")], []),
    )
    simulated = simulate(given, "prfaas_pd", build_schedule(given.workload, given.load))
    during = [
        one.route.prefill.cluster
        for one in simulated.requests
        if 110 < one.planned_s < 295 and one.route is not None and one.route.crosses
    ]
    assert during
    assert set(during) == {"prfaas-2"}
    assert simulated.num_completed == 1000


def test_only_a_live_run_refuses_several_clusters() -> None:
    given = paper(*CASES["two of everything"], requests=200)
    assert prepare(given).simulations["prfaas_pd"].num_completed == 200
    with pytest.raises(ScenarioError, match="no testbed"):
        refuse_several_clusters(given)


#: Exposed by one request alone, over links that bound it otherwise than by their rate.
BOUNDS = {
    "cap": ('link.per_flow_cap="1gbit"',),
    "cap of eight": ('link.per_flow_cap="1gbit"', "transport.connections=8"),
    "pacing": ('transport.pacing="700mbit"',),
    "cubic": ('link.loss="0.01%"', 'link.rtt="40ms"'),
    "reno": ('link.loss="0.1%"', 'transport.congestion_control="reno"'),
    "bbr": ('link.loss="0.1%"', 'link.per_flow_cap="5gbit"', 'transport.congestion_control="bbr"'),
}


CONTROLS: dict[str, CongestionControl] = {"cubic": "cubic", "reno": "reno", "bbr": "bbr"}


@pytest.mark.parametrize("sets", BOUNDS.values(), ids=BOUNDS.keys())
@pytest.mark.parametrize("layerwise", ["true", "false"])
def test_a_transfer_alone_takes_what_the_transfer_model_says(
    sets: tuple[str, ...], layerwise: str
) -> None:
    given = paper(*sets, f"transport.layerwise={layerwise}", requests=30)
    schedule = build_schedule(given.workload, replace(given.load, rate_req_per_s=1e-4))
    simulated = simulate(given, "naive_heterogeneous", schedule)
    pacing, count = given.transport.pacing_bytes_per_s, given.transport.connections
    control = CONTROLS[given.transport.congestion_control or "cubic"]
    flows = Flows(count, control, None if pacing is None else pacing / count)
    path = link_path(given.link)
    rate = payload_bytes_per_s(path, flows)
    assert rate < 0.9 * given.link.rate_bytes_per_s
    profile = given.hardware["h200"].profile
    cold = set()
    for one in simulated.requests:
        assert one.route is not None
        assert one.transfer_s is not None
        line = (one.route.prefill.name, one.route.decode.name)
        slow_start = None if line in cold else SlowStart.of(path, flows)
        cold.add(line)
        want = exposure(
            prefill_pieces(
                given.model.architecture, [float(one.input_tokens)], profile.prefill_s_array
            ),
            rate,
            layerwise=given.transport.layerwise,
            one_way_s=given.link.far_to_near.delay_s,
            slow_start=slow_start,
        ).exposed_s[0]
        found = one.transfer_s - given.link.near_to_far.delay_s
        # A line that begins cold counts its round trips before its first layer.
        rel = 1e-6 if slow_start is None or layerwise == "false" else 0.1
        assert found == pytest.approx(float(want), rel=rel)


def test_a_capped_link_carries_what_its_lines_do_and_no_more_than_its_rate() -> None:
    """At 2 Gbit/s a line of the 20 between 4 senders and 5 receivers, what crosses queues."""
    sets = ("load.rate_req_per_s=1.5", "scheduling.bandwidth_aware=false")
    free, capped, fair = (
        simulate(given, "naive_heterogeneous", build_schedule(given.workload, given.load))
        for given in (
            paper(*sets),
            paper(*sets, 'link.per_flow_cap="0.5gbit"'),
            paper(*sets, 'link.sharing="fair"'),
        )
    )
    assert capped.crossed_bytes == fair.crossed_bytes == free.crossed_bytes
    # Shared fairly and with nothing that binds it is as by layers.
    assert fair.ttft_s.mean() == pytest.approx(free.ttft_s.mean(), rel=1e-3)
    kv = np.array([one.kv_bytes for one in capped.requests], dtype=float)
    tail = np.array([one.transfer_s for one in capped.requests])
    prefill = np.array([one.prefill_s for one in capped.requests])
    line = 4 * 0.5e9 / 8 * 1448 / 1500
    assert np.all(tail + prefill >= kv / line - 1e-9)
    assert capped.ttft_s.mean() > free.ttft_s.mean()


def test_layers_are_refused_where_what_enters_binds() -> None:
    with pytest.raises(ScenarioError, match=r"link\.sharing"):
        prepare(paper(*CASES["bound by what enters"], 'link.sharing="layers"', requests=10))
    with pytest.raises(ScenarioError, match=r"vegas"):
        prepare(
            paper(
                'link.sharing="fair"',
                'link.loss="1%"',
                'transport.congestion_control="vegas"',
                requests=10,
            )
        )


@pytest.mark.parametrize(
    ("sets", "change"),
    [
        ((), {"rtt": "2s"}),
        (('link.per_flow_cap="1gbit"',), {"rtt": "200ms", "loss": "0.1%"}),
        (('link.sharing="fair"',), {"rtt": "1s", "rate": "1gbit"}),
    ],
)
def test_changes_of_delay_loss_and_rate_are_followed(
    tmp_path: Path, sets: tuple[str, ...], change: dict[str, str]
) -> None:
    """Requests that are alone take what they take over the link as it is then."""
    changes = tmp_path / "changes.toml"
    values = "".join(f'{key} = "{value}"\n' for key, value in change.items())
    changes.write_text(f'[[change]]\nat = "10000s"\n{values}')
    schedule, simulated = None, []
    for link in (
        [f'link.schedule="{changes}"'],
        [],
        [f'link.{key}="{value}"' for key, value in change.items()],
    ):
        given = paper(*sets, *link, requests=60)
        schedule = build_schedule(given.workload, replace(given.load, rate_req_per_s=1e-3))
        simulated.append(simulate(given, "naive_heterogeneous", schedule).requests)
    warm: list[set[tuple[str, str]]] = [set(), set(), set()]
    followed = 0
    for same in zip(*simulated, strict=True):
        one, before, after = same
        lines = [(of.route.prefill.name, of.route.decode.name) for of in same if of.route]
        warm_now = [line in lines_of for line, lines_of in zip(lines, warm, strict=True)]
        if one.planned_s < 9.9e3:
            assert one.ttft_s == pytest.approx(before.ttft_s, rel=1e-6)
        elif one.planned_s > 1e4 and (not sets or (warm_now[0] and warm_now[2])):
            assert one.ttft_s == pytest.approx(after.ttft_s, rel=1e-6)
            assert one.ttft_s > before.ttft_s
            followed += 1
        for line, lines_of in zip(lines, warm, strict=True):
            lines_of.add(line)
    assert followed > 3


@pytest.mark.parametrize("until_s", [160.0, math.inf])
def test_an_outage_of_a_capped_link_is_waited_for_unless_it_stays(until_s: float) -> None:
    """As over the layered queue: what would have to wait for ever fails at the request timeout."""
    failed = []
    for cap in ((), ('link.per_flow_cap="20gbit"',)):
        given = paper(
            "load.rate_req_per_s=1.2", 'testbed.request_timeout="120s"', *cap, requests=300
        )
        given = replace(given, link_schedule=LinkSchedule((outage(100.0, until_s),)))
        schedule = build_schedule(given.workload, given.load)
        simulated = simulate(given, "naive_heterogeneous", schedule)
        assert simulated.num_completed + sum(simulated.failures.values()) == 300
        failed.append(simulated.failures)
    assert failed[0].keys() == failed[1].keys()
    assert bool(failed[1]) == math.isinf(until_s)
    for phase, count in failed[0].items():
        assert failed[1][phase] == pytest.approx(count, abs=2)


def test_a_plan_solved_anew_divides_every_pd_cluster() -> None:
    """As ``simulate --trace`` does without ``--keep-plan``."""
    given = paper(*CASES["two of everything"], "workload.output_tokens=3000")
    found, notes = replan(given)
    one = found.deployments["prfaas_pd"]
    assert (one.num_prefill, one.num_decode) == (
        one.more_pd[0].num_prefill,
        one.more_pd[0].num_decode,
    )
    assert one.more_pd[0].num_decode > 5
    assert f"{one.num_prefill}/{one.num_decode} and" in notes[0]

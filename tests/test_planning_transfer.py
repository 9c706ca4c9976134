"""What a transfer gets of the link, by hand, and that every key of the scenario counts in it."""

from pathlib import Path

import pytest

from harness.planning.transfer import transfer_alone
from harness.scenario import load_scenario

PAPER = Path(__file__).parent.parent / "scenarios/paper-case-study.toml"
PAYLOAD = 1448 / 1500


def alone(*overrides: str, name: str = "prfaas_pd") -> dict[str, object] | None:
    scenario = load_scenario(PAPER, overrides)
    return transfer_alone(scenario, scenario.deployments[name], 45_000.0)


def test_a_clean_link_gives_a_transfer_all_its_payload() -> None:
    found = alone()
    assert found is not None
    assert found["binds"] == "link"
    assert found["rate_bytes_per_s"] == pytest.approx(12.5e9 * PAYLOAD)
    assert found["connections_to_fill"] == 1


def test_a_cap_binds_until_there_are_connections_enough() -> None:
    found = alone("link.per_flow_cap=5gbit", "transport.connections=4")
    assert found is not None
    assert found["binds"] == "per_flow_cap"
    assert found["rate_bytes_per_s"] == pytest.approx(4 * 0.625e9 * PAYLOAD)
    assert found["connections_to_fill"] == 20
    layers_bytes = 173.92 * 2**20 + 17_280 * 45_000
    assert found["sending_s"] == pytest.approx(layers_bytes / (2.5e9 * PAYLOAD), rel=1e-3)
    clean = alone()
    assert clean is not None
    assert found["exposed_layerwise_s"] > clean["exposed_layerwise_s"]  # type: ignore[operator]


@pytest.mark.parametrize("control", ["cubic", "reno"])
def test_loss_binds_and_no_number_of_connections_may_be_enough(control: str) -> None:
    found = alone("link.loss=1%", "link.rtt=40ms", f"transport.congestion_control='{control}'")
    assert found is not None
    assert (found["binds"], found["connections_to_fill"]) == ("loss", None)
    assert found["exposed_at_end_s"] == pytest.approx(found["sending_s"] + 0.02)  # type: ignore[operator]


def test_what_is_not_known_is_not_said() -> None:
    assert alone("transport.congestion_control='vegas'") is None
    assert alone(name="homogeneous_pd") is None
    paced = alone("transport.pacing='8gbit'")
    assert paced is not None
    assert (paced["binds"], paced["rate_bytes_per_s"]) == ("pacing", pytest.approx(1e9))

"""Whatever a scenario file or a flag holds, the answer is a Scenario or a ScenarioError."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from harness.core import ScenarioError
from harness.scenario import Scenario, load_scenario
from harness.scenario_file import ScenarioFile
from harness.workload import build_schedule, length_distribution

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "scenarios" / "paper-case-study.toml"
TEXT = PAPER.read_text().replace("../profiles/", f"{ROOT.as_posix()}/profiles/")

LINES = TEXT.splitlines()
KEYS = [
    f"{table}.{key}"
    for table, info in ScenarioFile.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    for key in info.annotation.model_fields
] + [
    f"deployments.{name}.{key}"
    for name in ("prfaas_pd", "homogeneous_pd", "naive_heterogeneous")
    for key in ("threshold_tokens", "num_prfaas", "num_prefill", "num_decode", "pd_hardware")
]
VALUES = st.one_of(
    st.integers(-10, 10).map(str),
    st.integers(-(10**30), 10**30).map(str),
    st.floats().map(repr),
    st.booleans().map(lambda b: str(b).lower()),
    st.sampled_from(
        ["0ms", "1s", "10gbit", "1kbit", "0%", "99%", "64KiB", "h20", "h200", "on_off", "gamma",
         "[]", "{}", "[1]", "{a=1}", "''", "same_metro", "1979-05-27", "\x00", ".", "/"]
    ),
    st.text(max_size=20),
)  # fmt: skip


def outcome(path: Path, overrides: list[str]) -> str:
    """The refusal, or "" where the scenario loads and gives a schedule."""
    try:
        scenario = load_scenario(path, overrides)
        if expected(scenario) < 20_000:
            assert build_schedule(scenario.workload, scenario.load)
            assert length_distribution(scenario).weights.sum() == pytest.approx(1)
    except ScenarioError as error:
        return str(error)
    return ""


def expected(scenario: Scenario) -> float:
    load = scenario.load
    if load.duration_s is not None:
        return load.duration_s * load.rate_req_per_s
    return float(load.num_requests or 0)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=4))
def test_any_override_gives_a_scenario_or_a_scenario_error(pairs: list[tuple[str, str]]) -> None:
    message = outcome(PAPER, [f"{key}={value}" for key, value in pairs])
    assert "\n" not in message
    places = (str(PAPER.parent), "--set", "load.duration")
    assert not message or any(place in message for place in places), message


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_mutated_file_gives_a_scenario_or_a_scenario_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = list(LINES)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        change = data.draw(st.sampled_from(["drop", "swap", "value", "text", "cut"]))
        if change == "drop":
            del lines[at]
        elif change == "swap":
            other = data.draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        elif change == "value":
            lines[at] = f"{lines[at].partition('=')[0]}= {data.draw(VALUES)}"
        elif change == "text":
            lines[at] = data.draw(st.text(max_size=30))
        else:
            lines[at] = lines[at][: data.draw(st.integers(0, 20))]
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    message = outcome(path, [])
    assert "\n" not in message

"""The plan's page: every figure on it is the document's, and it says what is not there."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plan_document import REFUSED, THRESHOLDS, document
from rich.console import Console

from harness.planning import figures
from harness.planning.console import plan_view
from harness.planning.plan import plan
from harness.planning.report import write_plan_report
from harness.planning.wording import THROUGHPUT, answer, instances, is_sound, rate_text, value_text
from harness.scenario import load_scenario
from reports.document import Chart
from reports.render import cell_text, render_svg

SCENARIO = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
SECTIONS = (
    "Answer", "Deployments", "Capacity over the threshold", "Threshold and split",
    "Time to first token", "Whose gain it is", "Equal cost", "What the plan hangs on", "Sweeps",
    "Egress by model", "Provenance",
)  # fmt: skip
CHARTS = (
    figures.capacity_curve,
    figures.split_map,
    figures.ttft_over_load,
    figures.attribution_steps,
    figures.sensitivity_bars,
    figures.agent_share_lines,
    figures.bandwidth_line,
    figures.egress_dots,
)


class Page(HTMLParser):
    """Headings, tables as lists of rows, specifications of charts, and all words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.specs: list[dict[str, Any]] = []
        self.text = ""
        self.links: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [given[key] or "" for key in ("src", "href") if key in given]
        self._open.append(f"{tag} {given.get('type') or ''}".strip())
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "h2":
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop().split()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script application/json":
            self.specs.append(json.loads(data))
        elif not inside.startswith(("script", "style")):
            self.text += data
            if inside in ("td", "th"):
                self.tables[-1][-1][-1] += data
            elif inside == "h2":
                self.headings[-1] += data

    def row(self, head: str) -> list[str]:
        """The cells of the first row so headed."""
        return next(row[1:] for table in self.tables for row in table if row[0] == head)


def page_of(tmp_path: Path, given: dict[str, Any]) -> Page:
    path = write_plan_report(given, tmp_path / "plan.html")
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.html"]
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(tmp_path_factory.mktemp("plan"), document())


def numbers(chart: Chart | None, column: str) -> list[float]:
    assert chart is not None
    return [float(value) for value in chart.frame[column]]


def test_every_section_is_there_and_the_file_loads_nothing(page: Page) -> None:
    assert tuple(page.headings) == SECTIONS
    assert len(page.specs) == len(CHARTS)
    assert all(link.startswith(("#", "data:image/svg+xml;base64,")) for link in page.links)
    assert "nan" not in re.findall(r"[a-z]+", page.text.lower())


def test_the_answer_says_plan_bottleneck_link_equations_and_queueing(page: Page) -> None:
    plan, bottleneck, equations, ttft = answer(document())
    assert "prfaas_pd carries at most 3.20 req/s by the paper equations" in plan
    assert "4 PrfaaS, 3 prefill and 5 decode instances" in plan
    assert "more than 20,000 uncached tokens offloaded (49.5 % of them)" in plan
    assert "1.60 times homogeneous_pd (-/9/3, 2.00 req/s)" in plan
    assert "Its bottleneck by the paper equations is PD prefill." in bottleneck
    assert "12 Gbit/s of the 100 Gbit/s there are" in bottleneck
    assert "there are: the link carries it. Searched anew, with link.rate below" in bottleneck
    assert "3.00 req/s (-6.2 %)" in equations
    assert "4/4/4 at t = 22,000, carries 3.10" in equations
    # 2.2 / (1 - 1.25 / 3.0), 4.5 / (1 - 1.25 / 1.9) and 1.7 / (1 - 1.25 / 2.3)
    assert "3.77 s with prfaas_pd (service alone 2.20 s)" in ttft
    assert "13.15 s with homogeneous_pd (service alone 4.50 s)" in ttft
    assert "3.72 s with naive_heterogeneous (service alone 1.70 s)" in ttft
    for sentence in (plan, bottleneck, equations, ttft):
        assert sentence in page.text
    assert "a warning <b>not to be missed</b>" in page.text
    assert "a note on what this rests on" in page.text


def test_a_transfer_alone_says_what_bounds_it_and_what_shows(page: Page) -> None:
    # prfaas_pd and naive_heterogeneous; nothing of homogeneous_pd crosses
    assert page.row("what bounds it") == ["the cap of each flow"] * 2
    assert page.row("connections that would fill the link") == ["none up to 64"] * 2
    assert page.row("shows after prefill, sent layer by layer") == ["12.5"] * 2
    assert page.row("shows after prefill, sent after it") == ["400.5"] * 2


def test_the_answer_of_a_scarce_link_and_of_one_deployment() -> None:
    scarce = document(link_bytes_per_s=1e9)
    scarce["deployments"]["prfaas_pd"]["bottleneck"] = "link"
    assert "of the 8 Gbit/s there are: the link carries no more." in answer(scarce)[1]
    assert "with link.rate below 12 Gbit/s no threshold and split" in answer(scarce)[1]
    full = document(sweeps=None)
    full["deployments"]["prfaas_pd"]["bottleneck"] = "link"
    assert "the link carries no more" in answer(full)[1]
    behind = document()
    behind["deployments"]["homogeneous_pd"]["throughput_req_per_s"] = 3.3
    loaded = document(rate_req_per_s=3.1)
    assert is_sound(document())
    assert not any(is_sound(one) for one in (scarce, full, behind, loaded))
    alone = document(
        deployments={"homogeneous_pd": document()["deployments"]["homogeneous_pd"]}, sweeps=None
    )
    sentences = answer(alone)
    assert sentences[0].endswith("with 9 prefill and 3 decode instances.")
    assert "nothing crosses a link" in sentences[1]
    assert "no other division of its instances carries more" in sentences[2]


def test_tables_hold_the_documents_numbers(page: Page) -> None:
    given = document()
    deployments = given["deployments"].values()
    for head, key in (
        ("Theta PrfaaS (req/s)", "theta_prfaas_req_per_s"),
        ("Theta PD prefill (req/s)", "theta_pd_prefill_req_per_s"),
        ("Lambda_max, T(E[l]) (req/s)", "throughput_req_per_s"),
        ("Lambda_max, E[T(l)] (req/s)", "throughput_exact_req_per_s"),
        ("Lambda_max over homogeneous_pd", "ratio"),
    ):
        assert page.row(head) == [cell_text(one[key]) for one in deployments], head
    assert page.row("N_prfaas/N_p/N_d") == ["4/3/5", "-/9/3", "4/-/8"]
    assert page.row("threshold t (tokens)") == ["20,000", cell_text(None), cell_text(None)]
    assert page.row("egress at Lambda_max (Gbit/s)") == ["12.00", cell_text(None), "12.00"]
    for head, key in (
        ("service: P90", "service_ttft_p90_s"),
        ("at the load: P99", "ttft_p99_s"),
    ):
        assert page.row(head) == [cell_text(one["ttft"][key]) for one in deployments]
    assert page.row("50 %")[0] == "1.50: 4.40 / 6.60"
    doubted = ", ".join(f"{name} at 90 %" for name in given["deployments"])
    assert f"{doubted}: up to 15 % low" in page.text


def test_cost_sensitivity_and_sweeps_hold_the_documents_numbers(page: Page) -> None:
    assert page.row("gain at equal cost, scaled linearly") == ["+11.5 %", "-16.9 %"]
    assert page.row("the same if the link cost nothing") == ["+15.5 %", "-12.9 %"]
    assert page.row("homogeneous N_p/N_d of the same cost, and its req/s")[0] == "12/4: 2.750"
    assert page.row("price ratio that breaks even") == ["2.510", "2.510"]
    assert page.row("price ratio for +15 %") == ["1.930", "1.930"]
    assert page.row("egress a month at Lambda_max (PB)") == ["4.060", "4.060"]
    assert page.row("price per GB that breaks even, rent 0") == ["0.003560", cell_text(None)]
    assert page.row("speed of the chip") == ["x 0.8", "2.900", "1.450", "x 1.25", "3.800", "1.900"]
    assert page.row("link")[0] == "100 Gbit/s"
    assert page.row("time per output token")[:2] == ["20 ms", cell_text(None)]
    assert REFUSED in page.text
    assert "a trace has no law" in page.text
    assert page.row("prefill queue")[0] == "1,541.4"
    assert page.row("100 %") == ["20,000", "3/5", "4.200", "2.000", "2.100", "PD decode"]
    assert page.row("4,096")[-1] == "refused here"
    assert page.row("150.0")[:4] == ["2.275", "3.450", "75.00", "150.0"]
    assert (
        "gone from a round trip of 4.54 s, with handshakes from a round trip of 1.51 s" in page.text
    )
    assert "that in the P90 from no round trip, however long" in page.text
    assert page.row("chip") == ["3.050", "3.100"]
    assert page.row("small")[-2:] == ["51.2 Gbit/s", "1 Tbit/s"]
    assert page.row("h200") == ["profiles/h200.json", "4 published and 1 stand-in", "no"]
    assert page.row("h20")[-1] == "end_slope"


def test_charts_hold_the_documents_numbers() -> None:
    given = document()
    curve = figures.capacity_curve(given)
    assert numbers(curve, "threshold_tokens") == 2 * THRESHOLDS
    assert numbers(curve, "req_per_s") == [
        *given["curve"]["paper_req_per_s"],
        *given["curve"]["exact_req_per_s"],
    ]
    grid = figures.split_map(given)
    assert numbers(grid, "req_per_s") == [
        rate for row in given["grid"]["lambda_max_req_per_s"] for rate in row
    ]
    assert grid is not None
    assert (grid.marks[0].x, grid.marks[0].y) == (20000, 3)
    assert "with N_p = 2 it is at most 2.90" in grid.title
    ttft = figures.ttft_over_load(given)
    assert len(numbers(ttft, "ttft_s")) == 3 * 3 * 2
    steps = figures.attribution_steps(given)
    assert steps is not None
    for _, panel in steps.frame.groupby("order"):
        assert panel["req_per_s"].iloc[0] == 2.0
        assert panel["req_per_s"].iloc[-1] == pytest.approx(3.2)
    assert "+0.000 from bandwidth-awareness" in steps.title
    bars = figures.sensitivity_bars(given)
    assert numbers(bars, "req_per_s") == [2.9, 3.8, 3.2, 3.2, 3.3]
    dots = figures.egress_dots(given)
    assert dots is not None
    assert "512 GPUs send at most 51.2 Gbit/s with small and 3.84 Tbit/s with large" in dots.title


@pytest.mark.parametrize("draw", CHARTS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("objective", ["paper", "exact"])
def test_every_chart_draws_by_either_objective(draw: Any, objective: str) -> None:
    chart = draw(document(objective=objective))
    assert chart is not None
    assert chart.alt.endswith(".")
    picture = render_svg(chart)
    assert chart.x.title in picture
    if draw is figures.capacity_curve:
        # Where E[T(l)] is the objective its line is the solid one, which has the names.
        solid = "exact_req_per_s" if objective == "exact" else "paper_req_per_s"
        first = chart.frame.query("not other")["req_per_s"]
        assert list(first) == document()["curve"][solid]
        for stage in ("PrfaaS prefill", "PD prefill"):
            assert picture.count(f">{stage}</text>") == 1


def test_what_does_not_apply_is_left_out_with_its_reason(tmp_path: Path) -> None:
    absent = (
        "curve", "grid", "equal_cost", "attribution", "sensitivity", "sweeps", "bandwidth_wall",
    )  # fmt: skip
    page = page_of(tmp_path, document(**dict.fromkeys(absent)))
    assert page.headings == [
        "Answer", "Deployments", "Time to first token", "Provenance", "Left out",
    ]  # fmt: skip
    assert len(page.specs) == 1
    for heading in set(SECTIONS) - set(page.headings):
        assert re.search(rf"{heading}: [a-z]", page.text), heading


def test_a_load_that_nothing_carries_is_said_and_not_drawn(tmp_path: Path) -> None:
    given = document()
    for one in given["deployments"].values():
        one["ttft"].update(
            {key: None for key in one["ttft"] if key.startswith("ttft")},
            parts=None,
            unstable_stage="pd_decode",
        )
    given["rate_req_per_s"] = 9.0
    curve = figures.ttft_over_load(given)
    assert curve is not None
    assert curve.title == "No deployment carries the scenario's 9 req/s"
    for one in given["deployments"].values():
        for point in one["load_curve"]:
            point.update(ttft_mean_s=None, ttft_p90_s=None)
    page = page_of(tmp_path, given)
    assert (
        "The scenario's load of 9 req/s is more than prfaas_pd (PD decode at 42%), homogeneous_pd "
    ) in page.text
    assert "can serve: queues grow without bound, and there is no TTFT." in page.text
    assert page.row("at the load: mean") == [cell_text(None)] * 3
    assert page.row("decode admission") == [cell_text(None)] * 3
    assert page.row("saturated by the load") == ["PD decode"] * 3
    assert len(page.specs) == len(CHARTS) - 1


@pytest.mark.parametrize(
    ("objective", "settings"),
    [("paper", []), ("exact", ['link.rate="8gbit"', "workload.cv=2"])],
    ids=["as the paper", "a scarce link"],
)
def test_a_real_plan(tmp_path: Path, objective: Any, settings: list[str]) -> None:
    scenario = load_scenario(SCENARIO, settings)
    given = json.loads(json.dumps(plan(scenario, objective).document(), allow_nan=False))
    page = page_of(tmp_path, {**given, "bandwidth_wall": None})
    assert tuple(page.headings) == (*SECTIONS[:-2], "Provenance", "Left out")
    assert len(page.specs) == len(CHARTS) - 1
    deployments = given["deployments"].values()
    for head, key in (
        ("Lambda_max, T(E[l]) (req/s)", "throughput_req_per_s"),
        ("Lambda_max, E[T(l)] (req/s)", "throughput_exact_req_per_s"),
    ):
        assert page.row(head) == [cell_text(one[key]) for one in deployments]
    assert page.row("service: mean") == [
        cell_text(one["ttft"]["service_ttft_mean_s"]) for one in deployments
    ]
    best = given["deployments"]["prfaas_pd"]
    assert f"{best[THROUGHPUT[objective]]:.2f} req/s by the {objective} equations" in page.text
    assert f"{best['threshold_tokens']:,} uncached tokens" in page.text
    text = Console(width=80)
    with text.capture() as capture:
        text.print(plan_view(given))
    for name, one in given["deployments"].items():
        shown = next(line for line in capture.get().splitlines() if line.startswith(f" {name}"))
        assert f" {one['throughput_exact_req_per_s']:.2f} " in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in capture.get()


def test_a_large_pd_cluster_is_drawn_and_says_what_is_left_out(tmp_path: Path) -> None:
    counts = list(range(1, 61))
    thresholds = [1000.0 * number for number in range(1, 131)]
    grid = {
        "threshold_tokens": thresholds,
        "num_prefill": counts,
        "best_threshold_tokens": [20000.0] * len(counts),
        "num_splits": len(counts),
        "lambda_max_req_per_s": [[3.0] * len(thresholds)] * len(counts),
        "stage": [["pd_decode"] * len(thresholds)] * len(counts),
    }
    page = page_of(tmp_path, document(grid=grid))
    assert "Of 60 splits 24 are shown." in page.text
    (split,) = (table for table in page.tables if table[0][0] == "N_p")
    shown = [row[0] for row in split[1:]]
    assert len(shown) == 24
    assert {"1", "3", "60"} <= set(shown)


def test_a_kept_threshold_of_0_is_not_marked_where_the_axis_has_no_0() -> None:
    given = document(kept=True)
    given["deployments"]["prfaas_pd"]["threshold_tokens"] = 0
    for draw in (figures.capacity_curve, figures.split_map):
        chart = draw(given)
        assert chart is not None
        assert chart.marks == ()


def test_what_is_offloaded_in_words() -> None:
    given = document()
    one = given["deployments"]["prfaas_pd"]
    for threshold, share, num_prefill, said in (
        (0, 1.0, None, "decode instances, every prompt offloaded: "),
        (131072, 0.0, 3, "decode instances, no prompt offloaded: "),
    ):
        one |= {
            "threshold_tokens": threshold, "offload_fraction": share, "num_prefill": num_prefill,
        }  # fmt: skip
        assert said in answer(given)[0]
    assert "as the scenario plans it" in answer(document(kept=True))[0]


def test_words_for_units_and_plans() -> None:
    assert rate_text(1.55e9) == "12.4 Gbit/s"
    assert rate_text(475e9) == "3.8 Tbit/s"
    assert value_text(0.25, "share") == "25 %"
    assert value_text(0.025, "s") == "25 ms"
    assert value_text(9.9, "ln tokens") == "9.9"
    assert value_text(1024, "tokens") == "1,024 tokens"
    several = {
        "num_prfaas": 4,
        "num_prefill": 3,
        "num_decode": 5,
        "more_prfaas": [{"num_instances": 2}],
        "more_pd": [{"num_prefill": 1, "num_decode": 1}],
    }
    assert instances(several) == "4+2/3+1/5+1"


def test_a_failure_leaves_the_old_page(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text("old")
    with pytest.raises(KeyError):
        write_plan_report(document(provenance={"h200": {}}), path)
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1

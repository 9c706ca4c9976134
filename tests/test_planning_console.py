"""The plan on a terminal: 80 columns, the document's numbers, and nothing swallowed."""

from typing import Any

import pytest
from plan_document import document
from rich.console import Console

from harness.planning.console import (
    cost_table,
    deployments_table,
    plan_view,
    print_plan,
    remarks,
)


def shown(view: Any, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.strip().startswith(name))


def test_the_deployments_fit_80_columns_and_no_figure_is_cut() -> None:
    text = shown(deployments_table(document()))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert row(text, "prfaas_pd") == [
        "prfaas_pd", "4/3/5", "20,000", "3.20", "3.00", "1.60", "prefill", "12.0", "2.20", "3.77",
    ]  # fmt: skip
    assert row(text, "homogeneous_pd")[1:] == [
        "-/9/3", "-", "2.00", "1.90", "1.00", "prefill", "-", "4.50", "13.15",
    ]  # fmt: skip
    # Brackets of the equations are no markup.
    assert "T(E[l])" in text
    assert "E[T(l)]" in " ".join(text.split())


def test_several_clusters_are_folded_not_cut() -> None:
    given = document()
    given["deployments"]["prfaas_pd"]["more_prfaas"] = [{"num_instances": 12}]
    given["deployments"]["prfaas_pd"]["more_pd"] = 2 * [{"num_prefill": 10, "num_decode": 15}]
    text = shown(deployments_table(given))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    lines = [line.split() for line in text.splitlines()]
    at = next(number for number, words in enumerate(lines) if words[:1] == ["prfaas_pd"])
    assert lines[at][1] == "4+12/"
    assert lines[at + 1 : at + 3] == [["3+10+10/"], ["5+15+15"]]
    assert row(text, "prfaas_pd")[-7:] == [
        "3.20", "3.00", "1.60", "prefill", "12.0", "2.20", "3.77",
    ]  # fmt: skip


def test_equal_cost_fits_80_columns_and_no_figure_is_cut() -> None:
    table = cost_table(document())
    assert table is not None
    text = shown(table)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert "relative prices" in text
    # The link costs something here: gain and price ratios are those with the link paid.
    assert row(text, "prfaas_pd")[1:] == [
        "128", "+11.5", "%", "2.00", "2.51", "1.93", "4.06", "0.0036", "145",
    ]  # fmt: skip
    assert row(text, "naive_heterogeneous")[-2:] == ["-", "-"]
    assert cost_table(document(equal_cost=None)) is None


def test_limit_accuracy_warnings_and_notes_are_lines_of_their_own() -> None:
    given = document()
    given["deployments"]["homogeneous_pd"]["ttft"]["accuracy"]["note"] = "Not measured here: why."
    given["deployments"]["prfaas_pd"]["as_planned"]["threshold_tokens"] = 19000
    given["deployments"]["prfaas_pd"]["ttft"]["load"] = 0.42
    limit, as_planned, promised, not_measured, *others = remarks(given)
    assert limit == (
        "link: with link.rate below 12 Gbit/s no threshold and split of prfaas_pd carries what it "
        "does with more"
    )
    own = given["deployments"]["prfaas_pd"]["as_planned"]
    assert as_planned == (
        "prfaas_pd as the scenario plans it, 4/3/5 at t = 19,000: "
        f"{own['throughput_req_per_s']:.2f} req/s by the paper equations, "
        f"{own['throughput_exact_req_per_s']:.2f} by the exact ones, mean TTFT "
        f"{own['ttft']['ttft_mean_s']:.2f} s"
    )
    assert promised == (
        "TTFT of prfaas_pd and naive_heterogeneous: in simulation of the paper's case study at "
        "50% to 60% load (prfaas_pd at less, where nothing was measured) the mean was within "
        "0.4%, P99 within 1.2%; promised is 5% of the mean."
    )
    assert not_measured == "TTFT of homogeneous_pd: Not measured here: why."
    assert others == [
        "warning: a warning <b>not to be missed</b>",
        "note: a note on what this rests on",
    ]
    bandwidth = {**given["sweeps"]["bandwidth"], "hard_limit_bytes_per_s": None}
    held = document(sweeps={**given["sweeps"], "bandwidth": bandwidth})
    assert next(remarks(held)).startswith("link: more of it always carries more")
    given["deployments"]["prfaas_pd"]["more_pd"] = [{"num_prefill": 1, "num_decode": 1}]
    assert next(remarks(given)).endswith("further links as they are")
    without = list(remarks(document(sweeps=None, warnings=[], notes=[])))
    assert [line.partition(" ")[0] for line in without] == ["TTFT"]


def test_binding_stage_and_ratio_say_by_which_equations() -> None:
    for objective in ("paper", "exact"):
        text = " ".join(shown(deployments_table(document(objective=objective))).split())
        assert f"by the {objective} equations are x: over homogeneous_pd, binds" in text
    kept = shown(deployments_table(document(kept=True)))
    assert "round-numbers: the scenario's own threshold and splits" in kept


@pytest.mark.parametrize("absent", [(), ("equal_cost",), ("equal_cost", "sweeps")])
def test_the_whole_view(absent: tuple[str, ...]) -> None:
    given = document(**dict.fromkeys(absent), notes=["[bold]brackets[/bold] stay"])
    text = shown(plan_view(given))
    assert "note: [bold]brackets[/bold] stay" in text
    assert ("at equal cost" in text) == ("equal_cost" not in absent)
    assert ("link.rate below" in text) == ("sweeps" not in absent)
    assert text.index("prfaas_pd") < text.index("note:")


def test_the_plan_is_printed_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(document())
    out, err = capsys.readouterr()
    assert "round-numbers: searched by the paper equations" in out
    assert "note: a note on what this rests on" in out
    assert err == ""

"""The run's report and trace, from runs whose numbers are known, and from damaged ones."""

import itertools
import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic_run import TIME_SCALE, Built, Options, build

from harness import figures
from harness.core import PrfaasError, ScenarioError
from harness.perfetto import trace_events
from harness.phrases import interval_text, length_text, listed_text, rate_text, tolerances, yes_text
from harness.record.spool import SpoolError
from harness.record.tables import compact, read_notes, read_table
from harness.report import write_report
from harness.verdict import judge
from reports.render import render_png

SECTIONS = (
    "Verdict", "Time to first token at the offered load", "Goodput", "Steady window",
    "Requests in flight", "Capacity", "Distribution of time to first token", "By input length",
    "Where time to first token goes", "Measured against modelled", "Link",
    "What the scaling keeps", "Overheads of the harness", "Manifest",
)  # fmt: skip
SMALL = Options(num_requests=40)


def report_of(built: Built) -> str:
    compact(built.run)
    judge(built.run)
    assert write_report(built.run) == built.run.report_path
    return built.run.report_path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Built, str]:
    built = build(tmp_path_factory.mktemp("sound"))
    return built, report_of(built)


def test_a_sound_run_shows_every_section_and_its_numbers(sound: tuple[Built, str]) -> None:
    built, text = sound
    for heading in SECTIONS:
        assert f">{heading}</h2>" in text
    assert "Supported: every gate passed" in text
    assert text.count("<figure>") == 5
    assert "TTFT under the offered load of 1.27 req/s" in text
    for name in built.options.deployments:
        mean_s = np.mean([each.ttft_s for each in built.served[built.cell(name)]])
        assert f">{mean_s:.3f}</td>" in text
    assert "320 of 320" in text
    assert "too few samples" in text
    assert "Quantiles are nearest-rank" in text
    for row in ("arrival rate, as planned", "throughput, steady window", "throughput, whole run"):
        assert f">{row}" in text
    assert ">0.0 % (at most 5.0 %)</td>" in text
    for row in ("goodput, steady window", "99 % keep the TPOT SLO", "requests planned in it"):
        assert f">{row}" in text
    assert "from the latest start that MSER-5" in text
    assert "prfaas_pd, by input length." in text
    assert ">9,701 to 19,400<" in text
    # Terms of the budget, all in milliseconds with one decimal.
    assert text.count(">30.0</td>") >= 3
    assert text.count(">2.5</td>") >= 6
    assert "nan" not in text.partition("<script>")[0].lower().replace("finance", "")


def test_the_budget_chart_adds_up_to_ttft(sound: tuple[Built, str]) -> None:
    built, _ = sound
    requests = read_table(built.run, "requests")
    means = figures.budget_means(requests)
    bins = figures.agreement_by_bin(requests, built.options.deployments)
    total_s = means[(means["deployment"] == "prfaas_pd")].groupby("length_bin")["mean_s"].sum()
    for label, cell in zip(bins["input tokens"], bins["prfaas_pd"], strict=True):
        assert f"{total_s[label]:.2f}" == cell.split(" / ")[0]


def test_charts_say_what_they_show(sound: tuple[Built, str]) -> None:
    built, _ = sound
    names = built.options.deployments
    requests = read_table(built.run, "requests")
    chart = figures.ttft_distribution(requests, read_table(built.run, "simulated"), names)
    assert chart is not None
    median_s = np.median([each.ttft_s for each in built.served[built.cell("prfaas_pd")]])
    assert f"within {median_s:.2f} s with prfaas_pd" in chart.title
    assert render_png(chart, scale=0.5).startswith(b"\x89PNG")
    link = figures.link_rate(read_table(built.run, "link"), names, 12.5e9)
    assert link is not None
    assert "0.0 Gbit/s with homogeneous_pd" in link.title
    assert link.title.endswith("of 100 Gbit/s")
    rows = requests[requests["deployment"] == "naive_heterogeneous"]
    moved = link.frame[link.frame["deployment"] == "naive_heterogeneous"]
    average = figures.time_mean(moved["t_s"], moved["gbit_per_s"])
    spanned_s = moved["t_s"].max() - moved["t_s"].min()
    assert average * spanned_s / 8 * 1e9 == pytest.approx(rows["kv_bytes"].sum(), rel=0.02)


def test_requests_in_flight_over_time_average_to_littles_law(sound: tuple[Built, str]) -> None:
    built, _ = sound
    names, requests = built.options.deployments, read_table(built.run, "requests")
    chart = figures.in_flight(requests, names, 12.5, TIME_SCALE)
    assert chart is not None
    rows = requests[requests["deployment"] == "homogeneous_pd"]
    mean = rows["e2e_s"].sum() / rows["end_s"].max()
    assert f"{mean:.1f} with homogeneous_pd" in chart.title
    assert chart.x_reference == (12.5, "the steady window begins")
    drawn = chart.frame[chart.frame["deployment"] == "homogeneous_pd"]
    step_s = drawn["t_s"].diff().median()
    assert (drawn["level"] * step_s).sum() == pytest.approx(rows["e2e_s"].sum())


def test_intervals_and_bins_as_words() -> None:
    assert interval_text({"low": 1.0, "high": 2.5}) == "1.00 to 2.50"
    assert interval_text({"low": 0.98, "high": 1.0}, 100.0) == "98.00 to 100.00"
    assert interval_text({"low": 1.0, "high": None}) == "1.00 to infinite"
    assert interval_text({"low": None, "high": None}) is None
    assert length_text(9700, 19_400) == "9,701 to 19,400"
    assert length_text(155_200, None) == "over 155,200"
    assert rate_text(1.25, 0.5) == "1.250 (50.0 %)"
    assert rate_text(None, 0.5) is None
    assert listed_text([1.0, None]) == "1.000, -"
    assert [yes_text(value) for value in (True, False, None)] == ["yes", "no", None]


def test_the_link_is_shown_in_scenario_units_and_on_the_wire(sound: tuple[Built, str]) -> None:
    built, _ = sound
    manifest = built.run.read_manifest()
    table = figures.link_table(manifest).set_index("link")
    rate = table.loc["rate PrfaaS to PD (Gbit/s)"]
    assert rate["measured"] == pytest.approx(99.2)
    assert rate["on the wire: measured"] == pytest.approx(0.992)
    assert (rate["applied"], rate["on the wire: applied"]) == pytest.approx((100.0, 1.0))
    trip = table.loc["round trip P50 (ms)"]
    assert trip["measured"] == pytest.approx(0.81)
    assert trip["on the wire: measured"] == pytest.approx(0.081)
    assert tolerances(manifest.link_check or {}) == ""
    assert tolerances({"rtt_tolerance": 0.15}) == " Allowed: rtt tolerance 0.15."


def test_a_refused_run_says_why_first(tmp_path: Path) -> None:
    built = build(tmp_path, SMALL)
    clients = built.clients("prfaas_pd")
    message = "<script>reset</script>"
    failed = replace(clients[0], outcome="failed", failure_phase="stream", failure_message=message)
    built.rewrite("prfaas_pd", "client", [failed, *clients[1:]])
    built.change_manifest(status="interrupted", error="Ctrl-C")
    text = report_of(built)
    assert "Not supported" in text
    assert "the run was interrupted: Ctrl-C" in text
    assert "1 of 40 requests failed (1 in stream)" in text
    assert message not in text
    assert "&lt;script&gt;reset" in text
    assert "39 of 40" in text


@pytest.mark.parametrize("num_requests", [0, 1])
def test_a_run_with_next_to_nothing_still_has_a_report(tmp_path: Path, num_requests: int) -> None:
    built = build(tmp_path, replace(SMALL, num_requests=num_requests))
    assert "Not supported" in report_of(built)


def test_a_run_of_which_nothing_was_recorded(tmp_path: Path) -> None:
    built = build(tmp_path, SMALL)
    for name in ("client", "gateway", "link", "engines", "decisions"):
        for cell in built.served:
            built.run.spool_path(cell, name).unlink()
    built.change_manifest(status="failed", error="the testbed died", link_check=None)
    text = report_of(built)
    assert "the run failed: the testbed died" in text
    assert "Nothing was recorded that this chart could show." in text
    assert "0 of 40" in text


def test_a_run_that_was_not_judged(tmp_path: Path) -> None:
    built = build(tmp_path, SMALL)
    compact(built.run)
    for content in (None, "[]", "{}", "not json"):
        if content is not None:
            built.run.verdict_path.write_text(content)
        with pytest.raises(ScenarioError, match=r"verdict\.json"):
            write_report(built.run)


NAMES = (
    "manifest.json", "schedule.jsonl", "expected.jsonl", "spool/simulated-prfaas_pd.jsonl",
    *(f"spool/prfaas_pd-r0/{name}.jsonl"
      for name in ("client", "gateway", "link", "engines", "decisions", "worker-pd")),
)  # fmt: skip
HUGE = "9" * 400


@pytest.mark.parametrize("name", NAMES)
def test_damage_anywhere_is_a_clear_error_or_none(tmp_path: Path, name: str) -> None:
    built = build(tmp_path, SMALL)
    path = built.run.path / name
    whole = path.read_bytes() if path.exists() else b'{"rid": "000000", "instance": "pd-d0"}\n'
    first, _, rest = whole.partition(b"\n")
    damages = [
        b"\x00\xff\n" + rest,
        b"[" * 100_000 + b"\n" + rest,
        b"5\n" + rest,
        b"null\n" + rest,
        re.sub(rb": ?-?[0-9][0-9.]*", b":" + HUGE.encode(), first) + b"\n" + rest,
        re.sub(rb": ?-?[0-9][0-9.]*", b":9223372036854775807", first) + b"\n" + rest,
        re.sub(rb": ?-?[0-9][0-9.]*", b":-3", first) + b"\n" + rest,
        re.sub(rb'_ns":\[[^]]*\]', b'_ns":[1]', first) + b"\n" + rest,
        re.sub(rb'tokens":\[[^]]*\]', b'tokens":[1,1,999999999999]', first) + b"\n" + rest,
        first.replace(b"prfaas-p", b"pd-d") + b"\n" + rest,
    ]
    for damage in damages:
        path.write_bytes(damage)
        told = None
        try:
            compact(built.run)
            judge(built.run)
        except PrfaasError as error:
            told = str(error)
        assert told is None or str(built.run.path) in told
    path.unlink()
    path.mkdir()
    with pytest.raises(PrfaasError, match=re.escape(str(path))):
        compact(built.run)


def test_numbers_that_fit_no_column_and_instances_that_do_not_prefill(tmp_path: Path) -> None:
    built = build(tmp_path, SMALL)
    clients = built.clients("prfaas_pd")
    many = replace(clients[0], chunk_tokens=(1, 1, 10**12))
    built.rewrite("prfaas_pd", "client", [many, *clients[1:]])
    with pytest.raises(SpoolError, match=r"client\.jsonl: request 000000: its chunks hold more"):
        compact(built.run)
    built.rewrite("prfaas_pd", "client", [replace(clients[0], http_status=2**70), *clients[1:]])
    with pytest.raises(SpoolError, match=r"requests\.parquet cannot"):
        compact(built.run)
    built.rewrite("prfaas_pd", "client", clients)
    gateways = built.gateways("prfaas_pd")
    wrong = replace(gateways[0], prefill_instance="pd-d0")
    built.rewrite("prfaas_pd", "gateway", [wrong, *gateways[1:]])
    with pytest.raises(SpoolError, match="prefilled by 'pd-d0', which is no prefill instance"):
        compact(built.run)


def test_damaged_tables_are_clear_errors(tmp_path: Path) -> None:
    built = build(tmp_path, SMALL)
    compact(built.run)
    path = built.run.table_path("requests")
    whole = path.read_bytes()
    for damage in (b"", b"PAR1", whole[:-50], whole[:100] + b"\xff" * 5000 + whole[5100:]):
        path.write_bytes(damage)
        with pytest.raises(ScenarioError, match=r"requests\.parquet"):
            read_table(built.run, "requests")
    for notes in (b"[", b"[]", b'{"other": 1}'):
        damaged = pq.read_table(pa.BufferReader(whole)).replace_schema_metadata(
            {"prfaas_notes": notes}
        )
        pq.write_table(damaged, path)
        with pytest.raises(ScenarioError, match="notes that are not ours"):
            read_notes(built.run)
    path.unlink()
    with pytest.raises(ScenarioError, match=r"requests\.parquet"):
        read_table(built.run, "requests")
    path.mkdir()
    with pytest.raises(ScenarioError, match=r"requests\.parquet"):
        read_table(built.run, "requests")


class TestTrace:
    def test_spans_of_a_track_do_not_overlap_and_nothing_is_lost(self, tmp_path: Path) -> None:
        built = build(tmp_path, SMALL)
        compact(built.run)
        events = trace_events(read_table(built.run, "requests"), built.run.read_manifest())
        spans = [event for event in events if event["ph"] == "X"]
        assert len(spans) == 3 * 40 * 4
        tracks = defaultdict(list)
        for span in spans:
            tracks[span["pid"], span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
        for track in tracks.values():
            ordered = sorted(track)
            for (_, end), (begin, _) in itertools.pairwise(ordered):
                assert begin >= end - 1e-6
        named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
        assert named == set(tracks)
        # One service at a time: an instance's prefills fit one track.
        names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
        assert "prfaas-p0 prefill" in names
        assert not any("prefill 2" in name and "after" not in name for name in names)

    def test_durations_are_those_of_the_run(self, tmp_path: Path) -> None:
        built = build(tmp_path, SMALL)
        report_of(built)
        document = json.loads(built.run.trace_path.read_text())
        first = next(e for e in document["traceEvents"] if e.get("cat") == "first token")
        served = built.served[built.cell("prfaas_pd")][0]
        assert first["name"].startswith("000000 ")
        assert first["dur"] == pytest.approx(served.ttft_s / 10 * 1e6)
        assert first["args"]["ttft_s"] == pytest.approx(served.ttft_s)

"""What benchmarks/transport.py makes of its runs, and one run over a link of known rate."""

import sys
from dataclasses import replace
from subprocess import Popen

import pytest

from benchmarks.transport_links import Wire, open_wire
from benchmarks.transport_measure import How, Sample, Variant, measure, open_ends
from benchmarks.transport_report import Cell, rows_of, targets_of
from harness.transport.socket_options import KernelTcp
from netem.site import Site

TCP = KernelTcp(0, 1, "cubic", 4_194_304, 6_291_456)
SITE = Site("near", "10.80.0.1", Popen)
WIRE = Wire("unshaped", SITE, SITE, None, None, 0.0, "by hand", (TCP, TCP))


def cell(own: list[float], iperf3: list[float], cpu: float = 0.5, checksum: bool = False) -> Cell:
    samples = {
        Variant("iperf3", 4): [Sample(rate, 0.4) for rate in iperf3],
        Variant("prfaas", 4, checksum): [Sample(rate, cpu) for rate in own],
    }
    return Cell(WIRE, 4, "cubic", samples)


def test_a_ratio_is_formed_within_a_repeat() -> None:
    """The machine was three times slower in the second repeat; the ratio does not see it."""
    (row,), (peer,) = rows_of(cell([8e8, 3e8, 10e8], [10e8, 4e8, 12.5e8]))
    assert row["ratio_to_iperf3"] == pytest.approx(0.8)
    assert row["ratio_min_max_to_iperf3"] == pytest.approx([0.75, 0.8])
    assert row["goodput_bytes_per_s"] == 8e8
    assert row["goodput_min_max_bytes_per_s"] == [3e8, 10e8]
    assert (peer["tool"], peer["goodput_bytes_per_s"]) == ("iperf3", 10e8)
    assert row["ratio_to_mooncake"] is None


def test_the_worst_row_decides_a_target_and_what_was_not_run_has_none() -> None:
    good = rows_of(cell([8e8], [1e9]))[0]
    bad = rows_of(cell([4e8], [1e9], cpu=0.9))[0]
    met = {target["target"]: target for target in targets_of(good)}
    assert {name for name, target in met.items() if target["met"]} == set(met)
    assert set(met) == {
        "unshaped, 4 connections, no checksum, of iperf3 -P 4",
        "CPU s/GB of both ends, no checksum",
    }
    missed = targets_of(good + bad)
    assert [(target["worst"], target["met"]) for target in missed] == [(0.4, False), (0.9, False)]


def test_capped_flows_are_held_against_the_share_of_the_link_that_they_have() -> None:
    wire = replace(WIRE, name="capped", rate_bytes_per_s=100.0, cap_bytes_per_s=5.0)
    assert [wire.expected_bytes_per_s(count) for count in (1, 16, 32)] == [5.0, 80.0, 100.0]
    own, _ = rows_of(replace(cell([18.1], [18.0], checksum=True), wire=wire))
    (target,) = targets_of(own)
    assert target["worst"] == pytest.approx(18.1 / 20.0)
    assert target["met"]


@pytest.mark.netadmin
def test_a_stream_over_a_shaped_link_is_measured_below_the_rate_and_near_it() -> None:
    how = How(window_s=1, congestion_control="reno", mooncake_python=sys.executable, tls=None)
    with open_wire("1gbit") as wire, open_ends(wire) as ends:
        before, after = wire.kernel_tcp
        assert after == replace(before, tcp_slow_start_after_idle=0, tcp_no_metrics_save=1)
        sample = measure(Variant("prfaas", 2, checksum=True), ends, how)
    assert wire.rate_bytes_per_s is not None
    # 1448 of 1514 bytes of a full packet are payload; the bucket and what the window's ends cut off
    # may add some milliseconds.
    assert 0.3 < sample.goodput_bytes_per_s / wire.rate_bytes_per_s < 1448 / 1514 * 1.03
    parts = ("sender_cpu_s_per_gb", "receiver_cpu_s_per_gb")
    assert sample.cpu_s_per_gb == pytest.approx(sum(sample.details[part] for part in parts))
    assert min(sample.details[part] for part in parts) > 0

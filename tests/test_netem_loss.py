"""Loss models: their means against chains simulated packet by packet, as the kernel runs them."""

import random
import statistics
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.loss import FourStateLoss, GilbertElliott, IndependentLoss, Loss, bursty

PACKETS = 200_000


def simulated(loss: Loss, generator: random.Random) -> list[bool]:
    match loss:
        case IndependentLoss():
            fates = [False]
            for _ in range(PACKETS):
                repeats = generator.random() < loss.correlation
                fates.append(fates[-1] if repeats else generator.random() < loss.probability)
            return fates
        case GilbertElliott():
            fates, bad = [], False
            for _ in range(PACKETS):
                fates.append(generator.random() < (loss.loss_bad if bad else loss.loss_good))
                bad = generator.random() >= loss.r if bad else generator.random() < loss.p
            return fates
    # Four states as in loss_4state of Linux net/sched/sch_netem.c.
    moves = {
        "gap": [("lost", loss.p13), ("alone", loss.p14)],
        "burst": [("lost", loss.p23)],
        "lost": [("gap", loss.p31), ("burst", loss.p32)],
        "alone": [("gap", 1.0)],
    }
    fates, state = [], "gap"
    for _ in range(PACKETS):
        point = generator.random()
        for target, chance in moves[state]:
            if point < chance:
                state = target
                break
            point -= chance
        fates.append(state in ("lost", "alone"))
    return fates


@pytest.mark.parametrize(
    "loss",
    [
        IndependentLoss(0.05),
        IndependentLoss(0.05, correlation=0.5),
        GilbertElliott(0.01, 0.1),
        GilbertElliott(0.02, 0.2, loss_bad=0.7, loss_good=0.01),
        FourStateLoss(0.02, 0.2),
        FourStateLoss(0.02, 0.2, 0.1, 0.3, 0.005),
    ],
    ids=str,
)
def test_means_are_those_of_the_chain(loss: Loss) -> None:
    fates = simulated(loss, random.Random(1))
    runs = [len(list(run)) for lost, run in groupby(fates) if lost]
    assert sum(fates) / len(fates) == pytest.approx(loss.mean_rate, rel=0.1)
    assert statistics.fmean(runs) == pytest.approx(loss.mean_burst_packets, rel=0.1)


@given(st.floats(min_value=1e-9, max_value=0.9), st.floats(min_value=1, max_value=1e4))
def test_bursts_have_the_rate_and_the_length_asked_for(rate: float, length: float) -> None:
    loss = bursty(rate, length)
    if loss.p > 1:  # So much loss in such short bursts is no chain of this kind.
        assert "p must lie between" in str(loss.fault())
        return
    assert loss.fault() is None
    assert loss.mean_rate == pytest.approx(rate, rel=1e-6)
    assert loss.mean_burst_packets == pytest.approx(length, rel=1e-6)


def test_no_loss_has_no_bursts() -> None:
    assert GilbertElliott(0.0, 1.0).mean_burst_packets == 0.0
    assert FourStateLoss(0.0, 0.0).mean_rate == 0.0
    assert FourStateLoss(0.0, 0.0, p14=0.1).mean_burst_packets == 1.0


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (IndependentLoss(1.0), "below 100%"),
        (IndependentLoss(-0.1), "between 0% and 100%"),
        (IndependentLoss(float("nan")), "between 0% and 100%"),
        (IndependentLoss(0.1, 1.0), "correlation must be below"),
        (GilbertElliott(0.1, 0.0), "never end"),
        (GilbertElliott(1.5, 0.5), "p must lie"),
        (GilbertElliott(0.1, 0.5, 1.0, 1.0), "every packet"),
        (FourStateLoss(0.6, 0.1, p14=0.6), "at most 100%"),
        (FourStateLoss(0.1, 0.0), "p31"),
        (FourStateLoss(0.1, 0.5, 0.2, 0.0), "p23"),
        (FourStateLoss(0.1, 0.5, 2.0), "p32 must lie"),
    ],
)
def test_an_impossible_model_is_told_by_name(loss: Loss, message: str) -> None:
    assert message in str(loss.fault())

"""Loss models and other chances against their rates, bursts and a second, plain implementation."""

import math
from itertools import groupby, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.chance import Chain, Events, State, chance_chain, loss_chain
from netem.loss import FourStateLoss, GilbertElliott, IndependentLoss, Loss, bursty

DRAWS = 200_000


def pattern(chain: Chain, draws: int = DRAWS, seed: object = 7, pause: int = 0) -> list[bool]:
    events = Events(chain, Random(str(seed)), pause)
    hits = set(events.among(draws))
    return [index in hits for index in range(draws)]


def mean_burst(lost: list[bool]) -> float:
    runs = [len(list(run)) for is_lost, run in groupby(lost) if is_lost]
    return sum(runs) / len(runs)


def packet_by_packet(chain: Chain, draws: int, random: Random) -> list[bool]:
    """The chain with one draw for the event and one for the state at every packet."""
    state, found = 0, []
    for _ in range(draws):
        found.append(random.random() < chain[state].event)
        point = random.random()
        for target, chance in chain[state].exits:
            if point < chance:
                state = target
                break
            point -= chance
    return found


LOSSES: list[Loss] = [
    IndependentLoss(0.01),
    IndependentLoss(0.2),
    bursty(0.0005 * 20, 10),
    GilbertElliott(p=0.01, r=0.10),
    GilbertElliott(p=0.02, r=0.2, loss_bad=0.5, loss_good=0.001),
    GilbertElliott(p=0.3, r=1.0),
    FourStateLoss(p13=0.01, p31=0.2),
    FourStateLoss(p13=0.01, p31=0.1, p32=0.2, p23=0.4, p14=0.005),
]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_loss_model_has_its_mean_rate_and_mean_burst(loss: Loss) -> None:
    lost = pattern(loss_chain(loss))
    assert sum(lost) / DRAWS == pytest.approx(loss.mean_rate, rel=0.2)
    assert mean_burst(lost) == pytest.approx(loss.mean_burst_packets, rel=0.2)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_sojourns_and_single_packets_draw_the_same_process(loss: Loss) -> None:
    chain = loss_chain(loss)
    fast, plain = pattern(chain), packet_by_packet(chain, DRAWS, Random("other"))

    def pairs(lost: list[bool]) -> float:
        return sum(1 for first, second in pairwise(lost) if first and second) / DRAWS

    bursts = DRAWS * loss.mean_rate / loss.mean_burst_packets
    tolerance = 6 / math.sqrt(bursts)
    assert sum(fast) == pytest.approx(sum(plain), rel=tolerance)
    assert mean_burst(fast) == pytest.approx(mean_burst(plain), rel=tolerance)
    assert pairs(fast) == pytest.approx(pairs(plain), rel=2 * tolerance, abs=1e-3)


def test_independent_loss_has_its_rate_to_the_binomial_bound() -> None:
    lost = pattern(loss_chain(IndependentLoss(0.01)))
    assert abs(sum(lost) / DRAWS - 0.01) < 4 * math.sqrt(0.01 * 0.99 / DRAWS)


@pytest.mark.parametrize("correlation", [0.25, 0.9])
@pytest.mark.parametrize("probability", [0.01, 0.3])
def test_a_correlated_chance_keeps_its_rate_and_is_correlated(
    probability: float, correlation: float
) -> None:
    events = pattern(chance_chain(probability, correlation), 400_000)
    assert sum(events) / len(events) == pytest.approx(probability, rel=0.12)
    both = sum(1 for first, second in pairwise(events) if first and second)
    found = (both / len(events) - probability**2) / (probability * (1 - probability))
    assert found == pytest.approx(correlation, abs=0.05)


@given(
    st.lists(st.integers(min_value=1, max_value=45), min_size=1, max_size=200),
    st.sampled_from(LOSSES),
    st.integers(min_value=0, max_value=3),
)
def test_a_batch_meets_the_events_of_the_packets_it_stands_for(
    sizes: list[int], loss: Loss, pause: int
) -> None:
    together = Events(loss_chain(loss), Random("7"), pause)
    one_by_one = Events(loss_chain(loss), Random("7"), pause)
    for size in sizes:
        singly = [index for index in range(size) if one_by_one.among(1)]
        assert list(together.among(size)) == singly


def test_the_same_seed_gives_the_same_losses() -> None:
    chain = loss_chain(GilbertElliott(0.01, 0.1))
    assert pattern(chain, 5000, 1) == pattern(chain, 5000, 1)
    assert pattern(chain, 5000, 1) != pattern(chain, 5000, 2)


@given(st.integers(min_value=0, max_value=20))
def test_a_pause_keeps_events_apart(pause: int) -> None:
    events = pattern(chance_chain(0.5), 2000, pause, pause)
    hits = [index for index, hit in enumerate(events) if hit]
    assert hits[0] >= pause
    assert all(late - early > pause for early, late in pairwise(hits))
    # After a pause the chance is a half, so one packet more is passed over on average.
    assert len(hits) == pytest.approx(2000 / (pause + 2), rel=0.3)


@pytest.mark.parametrize(
    "chain",
    [
        chance_chain(0.0),
        (State(0.0, ((1, 0.5),)), State(0.0, ((0, 0.5),))),
        loss_chain(GilbertElliott(p=0.0, r=0.5)),
        loss_chain(None),
    ],
)
def test_what_cannot_happen_does_not(chain: Chain) -> None:
    assert not any(pattern(chain, 10**6))


def test_certainty() -> None:
    assert all(pattern(chance_chain(1.0), 1000))

"""The chunked parallel form of linear attention against its recurrence, kind by kind."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if find_spec("torch") is not None:  # where it is absent, the marker leaves these tests out
    import torch

    from harness.engine.reference.linear_attention import (
        causal_convolution,
        decay_attention,
        delta_rule,
    )
    from tests.reference_recurrence import decay_recurrence, delta_recurrence

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.torch

LENGTHS = st.integers(1, 200)
CHUNKS = st.sampled_from((16, 32, 48, 64, 128))
SEEDS = st.integers(0, 2**32 - 1)
#: Strongest forgetting of one token: a state that lasts, one that is gone at once, and beyond what
#: float32 can hold the reverse of.
DECAYS = st.sampled_from((0.0, 0.01, 1.0, 20.0, 120.0))


def relative(found: "Tensor", expected: "Tensor") -> float:
    return float((found.double() - expected).norm() / expected.norm())


def inputs(seed: int, length: int, decay: float, *, per_channel: bool) -> "list[Tensor]":
    """q, k, v, g, beta and a state for 2 sequences of 3 heads of 16 x 24."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> "Tensor":
        return torch.randn(shape, generator=generator)

    q, k, v = normal(2, length, 3, 16), normal(2, length, 3, 16), normal(2, length, 3, 24)
    k = k / k.norm(dim=-1, keepdim=True)
    shape = (2, length, 3, 16) if per_channel else (2, length, 3)
    g = -decay * torch.rand(shape, generator=generator)
    beta = torch.rand((2, length, 3), generator=generator)
    return [q * 16**-0.5, k, v, g, beta, normal(2, 3, 16, 24)]


@pytest.mark.parametrize("kind", ["kda", "gdn"])
@given(seed=SEEDS, length=LENGTHS, chunk=CHUNKS, decay=DECAYS)
@settings(max_examples=60)
def test_the_delta_rule_in_chunks_is_its_recurrence(
    kind: str, seed: int, length: int, chunk: int, decay: float
) -> None:
    given_ = inputs(seed, length, decay, per_channel=kind == "kda")
    out, state = delta_rule(*given_, chunk_tokens=chunk)
    expected, expected_state = delta_recurrence(*given_)
    assert relative(out, expected) < 1e-5
    assert relative(state, expected_state) < 1e-5


@pytest.mark.parametrize("kind", ["kda", "gdn"])
def test_equal_keys_are_the_hardest_system(kind: str) -> None:
    """All keys the same and nothing forgotten: the triangular system is at its worst."""
    q, k, v, g, beta, state = inputs(0, 128, 0.0, per_channel=kind == "kda")
    k[:] = k[:, :1]
    beta[:] = 1.0
    out, _ = delta_rule(q, k, v, g, beta, state)
    expected, _ = delta_recurrence(q, k, v, g, beta, state)
    assert relative(out, expected) < 1e-5


@given(seed=SEEDS, length=LENGTHS, chunk=CHUNKS, decay=DECAYS)
@settings(max_examples=60)
def test_lightning_in_chunks_is_its_recurrence(
    seed: int, length: int, chunk: int, decay: float
) -> None:
    q, k, v, _, _, state = inputs(seed, length, 0.0, per_channel=False)
    slopes = torch.tensor([decay, decay / 2, 0.0])
    out, after = decay_attention(q, k, v, slopes, state, chunk)
    expected, expected_after = decay_recurrence(q, k, v, slopes, state)
    assert relative(out, expected) < 1e-5
    assert relative(after, expected_after) < 1e-5


@given(seed=SEEDS, cut=st.integers(1, 199), per_channel=st.booleans())
@settings(max_examples=30)
def test_a_state_goes_on_where_it_was_cut(seed: int, cut: int, per_channel: bool) -> None:
    *given_, state = inputs(seed, 200, 1.0, per_channel=per_channel)
    out, after = delta_rule(*given_, state)
    first, between = delta_rule(*(x[:, :cut] for x in given_), state)
    second, last = delta_rule(*(x[:, cut:] for x in given_), between)
    assert relative(torch.cat((first, second), dim=1), out.double()) < 1e-5
    assert relative(last, after.double()) < 1e-5


def test_a_prompt_longer_than_a_segment_keeps_its_state() -> None:
    given_ = inputs(3, 4096 + 100, 0.1, per_channel=True)
    out, state = delta_rule(*given_)
    expected, expected_state = delta_recurrence(*given_)
    assert relative(out, expected) < 1e-5
    assert relative(state, expected_state) < 1e-5


def test_the_convolution_sees_the_tokens_before_a_cut() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((2, 30, 5), (5, 4)))
    past = torch.zeros(2, 3, 5)
    whole, end = causal_convolution(x, past, weight)
    padded = torch.cat((past, x), dim=1)
    for t in range(30):
        total = (padded[:, t : t + 4] * weight.T).sum(dim=1)
        assert torch.allclose(whole[:, t], total * torch.sigmoid(total), atol=1e-6)
    first, between = causal_convolution(x[:, :11], past, weight)
    second, end_of_second = causal_convolution(x[:, 11:], between, weight)
    assert torch.allclose(torch.cat((first, second), dim=1), whole, atol=1e-6)
    assert torch.equal(end_of_second, end)
    assert torch.equal(end, x[:, -3:])

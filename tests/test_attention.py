"""Bytes of one layer from its shape, against shapes counted out and published models' figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.attention import Attention, Gqa, Layer, Lightning, Linear, Mla, SlidingWindow

dims = st.integers(1, 4096)
linear = st.builds(
    Linear, st.sampled_from(["kda", "gdn", "mamba2"]), dims, dims, dims, st.integers(2, 8), dims
)
shapes = st.one_of(
    st.builds(Mla, dims, st.integers(0, 4096)),
    st.builds(Gqa, dims, dims, dims),
    st.builds(SlidingWindow, dims, dims, dims, st.integers(1, 100_000)),
    st.builds(Lightning, dims, dims, dims),
    linear,
)


@pytest.mark.parametrize(
    ("shape", "bf16", "fp8"),
    [
        (Mla(512, 64), Layer("x", 1152), Layer("x", 576)),  # DeepSeek-V3, Kimi, Ring-2.5
        (Gqa(8, 128, 128), Layer("x", 4096), Layer("x", 2048)),  # Qwen2.5-72B, MiniMax-M2.5
        (Gqa(4, 192, 128), Layer("x", 2560), Layer("x", 1280)),  # MiMo-V2-Flash, full
        (
            SlidingWindow(8, 192, 128, 128),  # MiMo-V2-Flash, sliding
            Layer("x", 0, 128, 5120),
            Layer("x", 0, 128, 2560),
        ),
        (Linear("kda", 32, 128, 128, 4, 12_288), *[Layer("x", fixed_bytes=2_170_880)] * 2),
        (Linear("gdn", 64, 128, 128, 4, 12_288), *[Layer("x", fixed_bytes=4_268_032)] * 2),
        (Lightning(64, 128, 128), *[Layer("x", fixed_bytes=4_194_304)] * 2),
        (Linear("mamba2", 128, 128, 64, 4, 10_240), *[Layer("x", fixed_bytes=4_255_744)] * 2),
    ],
)
def test_bytes_of_real_layers(shape: Attention, bf16: Layer, fp8: Layer) -> None:
    assert shape.layer("x", "bf16") == bf16
    assert shape.layer("x", "fp8") == fp8


@given(shapes, st.integers(0, 200_000))
def test_fp8_halves_kv_and_leaves_the_state(shape: Attention, tokens: int) -> None:
    wide, narrow = shape.layer("x", "bf16"), shape.layer("x", "fp8")
    assert narrow.fixed_bytes == wide.fixed_bytes
    assert narrow.window_tokens == wide.window_tokens
    kv = wide.kv_bytes(tokens) - wide.fixed_bytes
    assert 2 * (narrow.kv_bytes(tokens) - narrow.fixed_bytes) == kv


@given(shapes, st.sampled_from(["bf16", "fp8"]), st.integers(0, 100), st.integers(0, 3))
def test_each_kind_against_the_tensors_it_holds(
    shape: Attention, kv_dtype: str, tokens: int, more: int
) -> None:
    """A second count: elements of every tensor at a length, each times its own width."""
    width = {"bf16": 2, "fp8": 1}[kv_dtype]
    match shape:
        case Mla(rank, rope):
            expected = tokens * rank * width + tokens * rope * width
        case Gqa(heads, key, value):
            expected = heads * tokens * key * width + heads * tokens * value * width
        case SlidingWindow(heads, key, value, window):
            seen = [t for t in range(tokens) if t >= tokens - window]
            expected = len(seen) * heads * key * width + len(seen) * heads * value * width
        case Lightning(heads, key, value):
            expected = 4 * heads * key * value
        case Linear(_, heads, key, value, kernel, channels):
            expected = 4 * heads * key * value + sum(2 * channels for _ in range(1, kernel))
    layer = shape.layer("x", "bf16" if kv_dtype == "bf16" else "fp8")
    assert layer.kv_bytes(tokens) == expected
    assert layer.kv_bytes(tokens + more) >= expected

"""KV geometry: Table 5 of the paper, what moves, files of both forms, and rounding on the wire."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.architecture import (
    Architecture,
    architecture_text,
    load_architecture,
    wire_layer_bytes,
)
from harness.attention import Layer
from harness.core import ScenarioError

PAPER = Path(__file__).parents[1] / "profiles" / "models" / "prfaas-1t.json"

KIND = {"growing_bytes_per_token": 10, "source": "test"}
VALID = {"schema_version": 1, "name": "m", "layer_kinds": {"full": KIND}, "layers": ["full"]}


def written(folder: Path, document: object) -> Path:
    path = folder / "model.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("tokens", "mib"), [(1024, 190.8), (8192, 308.9), (32_000, 701.3), (130_000, 2316.3)]
)
def test_table_5_s_kv(tokens: int, mib: float) -> None:
    assert load_architecture(PAPER).kv_bytes(tokens) / 2**20 == pytest.approx(mib, abs=0.1)


def test_paper_model_has_fifteen_growing_and_forty_two_fixed_layers_three_to_one() -> None:
    layers = load_architecture(PAPER).layers
    kinds = [layer.kind for layer in layers]
    assert (kinds.count("mla"), kinds.count("kda")) == (15, 42)
    assert all(kinds[i * 4 : i * 4 + 4] == ["kda", "kda", "kda", "mla"] for i in range(14))
    assert {layer.fixed_bytes for layer in layers if layer.kind == "kda"} == {182_353_920 // 42}
    assert sum(layer.growing_bytes_per_token for layer in layers) == 17_280


def test_windowed_layers_stop_growing(tmp_path: Path) -> None:
    """gpt-oss-120b: 18 full layers, 18 with a window of 128; 8 KV heads of 64, bf16."""
    per_token = 2 * 8 * 64 * 2
    kinds = {
        "full": {"growing_bytes_per_token": per_token, "source": "test"},
        "swa": {"window_bytes_per_token": per_token, "window_tokens": 128, "source": "test"},
    }
    document = {**VALID, "layer_kinds": kinds, "layers": ["full", "swa"] * 18}
    model = load_architecture(written(tmp_path, document))
    assert model.kv_bytes(100) == 36 * per_token * 100
    assert model.kv_bytes(8192) == 18 * per_token * 8192 + 18 * per_token * 128
    assert model.layer_kv_bytes(8192)[:2] == (per_token * 8192, per_token * 128)


layers_strategy = st.lists(
    st.builds(
        Layer,
        st.just("any"),
        st.integers(0, 5000),
        st.integers(0, 4096),
        st.integers(0, 5000),
        st.integers(0, 10**7),
    ),
    min_size=1,
    max_size=100,
)


@given(layers_strategy, st.integers(0, 200_000), st.integers(0, 200_000))
def test_total_is_the_sum_of_the_layers(layers: list[Layer], tokens: int, resident: int) -> None:
    model = Architecture("m", Path("m"), tuple(layers), {})
    assert model.kv_bytes(tokens) == sum(model.layer_kv_bytes(tokens))
    resident = min(resident, tokens)
    assert model.moved_bytes(tokens, resident) == sum(model.layer_kv_bytes(tokens, resident))
    assert len(model.layer_kv_bytes(tokens)) == len(layers)
    assert sum(model.kind_counts.values()) == len(layers)


@st.composite
def models(draw: st.DrawFn) -> Architecture:
    return Architecture("m", Path("m"), tuple(draw(layers_strategy)), {})


@given(models(), st.integers(0, 200_000), st.floats(0, 1))
def test_moved_and_resident_bytes_make_up_what_grows(
    model: Architecture, total: int, share: float
) -> None:
    """Nothing resident: all of S_kv. All resident: window and state, which always move."""
    resident = int(total * share)
    assert model.moved_bytes(total, 0) == model.kv_bytes(total)
    growing = sum(layer.growing_bytes_per_token for layer in model.layers)
    kept = model.kv_bytes(total) - model.moved_bytes(total, resident)
    assert kept == growing * resident
    window = sum(
        layer.window_bytes_per_token * min(total, layer.window_tokens) for layer in model.layers
    )
    assert model.moved_bytes(total, total) == window + sum(x.fixed_bytes for x in model.layers)


@given(models(), st.integers(0, 200_000), st.integers(0, 200_000), st.integers(0, 1000))
def test_moved_bytes_rise_with_the_prompt_and_fall_with_what_is_resident(
    model: Architecture, total: int, resident: int, more: int
) -> None:
    resident = min(total, resident)
    moved = model.moved_bytes(total, resident)
    assert model.moved_bytes(total + more, resident) >= moved
    assert model.moved_bytes(total, max(0, resident - more)) >= moved


@given(st.lists(layers_strategy, min_size=2, max_size=2), st.integers(0, 200_000))
def test_bytes_of_two_stacks_of_layers_add_up(stacks: list[list[Layer]], tokens: int) -> None:
    parts = [Architecture("m", Path("m"), tuple(layers), {}) for layers in stacks]
    whole = Architecture("m", Path("m"), (*stacks[0], *stacks[1]), {})
    resident = tokens // 3
    assert whole.moved_bytes(tokens, resident) == sum(
        part.moved_bytes(tokens, resident) for part in parts
    )


@given(models(), st.lists(st.integers(0, 200_000), min_size=1, max_size=20), st.floats(0, 1))
def test_arrays_hold_what_the_scalars_give(
    model: Architecture, totals: list[int], share: float
) -> None:
    resident = [int(total * share) for total in totals]
    expected = [model.moved_bytes(t, r) for t, r in zip(totals, resident, strict=True)]
    assert model.moved_bytes_array(totals, resident).tolist() == expected
    assert model.kv_bytes_array(totals).tolist() == [model.kv_bytes(t) for t in totals]


def test_arrays_broadcast_and_take_fractions_of_a_token() -> None:
    model = load_architecture(PAPER)
    total, resident = np.array([[1000], [9000]]), np.array([0, 10, 1000])
    moved = model.moved_bytes_array(total, resident)
    assert moved.shape == (2, 3)
    assert moved.dtype == np.float64
    assert moved[1, 2] == model.moved_bytes(9000, 1000)
    assert model.kv_bytes_array(10.5) == (model.kv_bytes(10) + model.kv_bytes(11)) / 2
    assert np.isnan(model.kv_bytes_array([np.nan])).all()


@given(st.lists(st.integers(0, 10**9), max_size=100), st.floats(1, 1e6))
def test_wire_bytes_sum_to_the_rounded_total(sizes: list[int], byte_scale: float) -> None:
    wire = wire_layer_bytes(sizes, byte_scale)
    assert sum(wire) == round(sum(sizes) / byte_scale)
    assert all(size >= 0 for size in wire)
    assert all(
        abs(scaled - size / byte_scale) <= 1.01 for scaled, size in zip(wire, sizes, strict=True)
    )


def test_wire_bytes_at_scale_one_are_the_layers() -> None:
    sizes = load_architecture(PAPER).layer_kv_bytes(12_345)
    assert wire_layer_bytes(sizes, 1.0) == sizes


def test_negative_tokens_and_scales_are_refused() -> None:
    model = load_architecture(PAPER)
    with pytest.raises(ValueError, match="negative"):
        model.kv_bytes(-1)
    with pytest.raises(ValueError, match="negative"):
        model.layer_kv_bytes(-1)
    with pytest.raises(ValueError, match="resident"):
        model.moved_bytes(10, 11)
    for total, resident in ([[-1.0], [0.0]], [[10.0], [-1.0]], [[10.0], [10.5]]):
        with pytest.raises(ValueError, match="resident"):
            model.moved_bytes_array(total, resident)
    with pytest.raises(ValueError, match="positive"):
        wire_layer_bytes((1,), 0.0)


MLA = {"attention": "mla", "latent_rank": 512, "rope_dim": 64, "source": "test"}
KDA = {
    "attention": "kda",
    "heads": 2,
    "key_dim": 3,
    "value_dim": 5,
    "conv_kernel": 4,
    "conv_channels": 7,
    "source": "test",
}


def test_geometry_in_a_file_gives_the_bytes(tmp_path: Path) -> None:
    kinds = {
        "latent": MLA,
        "delta": KDA,
        "near": {
            "attention": "sliding_window",
            "kv_heads": 3,
            "key_dim": 4,
            "value_dim": 2,
            "window_tokens": 9,
            "source": "t",
        },
        "flash": {
            "attention": "lightning",
            "heads": 2,
            "key_dim": 8,
            "value_dim": 8,
            "source": "t",
        },
    }
    document = {**VALID, "layer_kinds": kinds, "layers": ["delta", "latent", "near", "flash"]}
    model = load_architecture(written(tmp_path, document), "fp8")
    assert model.layers == (
        Layer("delta", fixed_bytes=2 * 3 * 5 * 4 + 3 * 7 * 2),
        Layer("latent", growing_bytes_per_token=576),
        Layer("near", window_tokens=9, window_bytes_per_token=18),
        Layer("flash", fixed_bytes=512),
    )
    assert list(model.attention) == ["latent", "delta", "near", "flash"]


def test_bytes_that_a_file_gives_are_those_of_bf16(tmp_path: Path) -> None:
    document = {**VALID, "layer_kinds": {"full": KIND, "latent": MLA}, "layers": ["latent", "full"]}
    path = written(tmp_path, document)
    assert load_architecture(path).kv_bytes(10) == 10 * (1152 + 10)
    with pytest.raises(ScenarioError) as caught:
        load_architecture(path, "fp8")
    for word in ("'layer_kinds.full'", "bf16", "fp8", "'attention'", str(path)):
        assert word in str(caught.value)


def test_bytes_and_geometry_read_back_as_written(tmp_path: Path) -> None:
    near = {"window_tokens": 7, "window_bytes_per_token": 3, "fixed_bytes": 2, "source": "so"}
    document = {**VALID, "layer_kinds": {"near": near, "delta": KDA}, "layers": ["delta", "near"]}
    model = load_architecture(written(tmp_path, document))
    copy = load_architecture(written(tmp_path, architecture_text(model, "copy", "")))
    assert (copy.name, copy.layers, copy.sources) == ("copy", model.layers, model.sources)
    assert copy.attention == model.attention


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("{", ["not JSON", "line 1"]),
        ("[1]", ["table"]),
        ({**VALID, "layer": ["full"]}, ["'layer'", "did you mean 'layers'"]),
        ({**VALID, "layers": ["fulll"]}, ["'layers[0]'", "'fulll'", "'full'"]),
        ({**VALID, "layers": []}, ["'layers'"]),
        ({**VALID, "schema_version": 2}, ["'schema_version'", "got 2"]),
        ({**VALID, "layer_kinds": {"full": KIND, "other": KIND}}, ["other", "no layer"]),
        ({**VALID, "layer_kinds": {"full": {"source": "x"}}}, ["no layer any KV bytes"]),
        (
            {**VALID, "layer_kinds": {"full": {**KIND, "fixed_byte": 3}}},
            ["'layer_kinds.full.fixed_byte'", "'fixed_bytes'"],
        ),
        (
            {**VALID, "layer_kinds": {"full": {**KIND, "fixed_bytes": -1}}},
            ["'layer_kinds.full.fixed_bytes'", "got -1"],
        ),
        (
            {**VALID, "layer_kinds": {"full": {**KIND, "fixed_bytes": True}}},
            ["'layer_kinds.full.fixed_bytes'", "got True"],
        ),
        (
            {**VALID, "layer_kinds": {"full": {**MLA, "latent_rnk": 3}}},
            ["'layer_kinds.full.latent_rnk'", "did you mean 'latent_rank'"],
        ),
        ({**VALID, "layer_kinds": {"full": {**MLA, "latent_rank": 0}}}, ["latent_rank", "got 0"]),
        ({**VALID, "layer_kinds": {"full": {**MLA, "rope_dim": -1}}}, ["rope_dim", "got -1"]),
        (
            {**VALID, "layer_kinds": {"full": {"attention": "mla", "source": "x"}}},
            ["'layer_kinds.full.latent_rank'", "missing"],
        ),
        ({**VALID, "layer_kinds": {"full": {**MLA, "source": ""}}}, ["layer_kinds.full.source"]),
        (
            {**VALID, "layer_kinds": {"full": {**MLA, "attention": "mlaa"}}},
            ["'layer_kinds.full.attention'", "'mlaa'", "'mla'", "'gdn'"],
        ),
        (
            {**VALID, "layer_kinds": {"full": {**MLA, "attention": ["mla"]}}},
            ["'layer_kinds.full.attention'", "['mla']"],
        ),
        (
            {**VALID, "layer_kinds": {"full": {**KDA, "attention": "lightning"}}},
            ["'layer_kinds.full.conv_kernel'", "no valid key"],
        ),
        (
            {**VALID, "layer_kinds": {"full": {**KDA, "conv_kernel": 1}}},
            ["'layer_kinds.full.conv_kernel'", "got 1"],
        ),
        (
            {**VALID, "layer_kinds": {"full": {**MLA, "growing_bytes_per_token": 3}}},
            ["'layer_kinds.full.growing_bytes_per_token'"],
        ),
        ({**VALID, "layer_kinds": {"full": [1]}}, ["'layer_kinds.full'", "table"]),
    ],
)
def test_a_wrong_file_is_told_by_name(tmp_path: Path, document: object, words: list[str]) -> None:
    path = written(tmp_path, document)
    with pytest.raises(ScenarioError) as caught:
        load_architecture(path)
    message = str(caught.value)
    assert str(path) in message
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_missing_file_and_a_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"nothing\.json does not exist"):
        load_architecture(tmp_path / "nothing.json")
    with pytest.raises(ScenarioError, match="not a regular file"):
        load_architecture(tmp_path)

"""KV geometry: Table 5 of the paper, rows of other models, and rounding on the wire."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.architecture import Architecture, Layer, load_architecture, wire_layer_bytes
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


@given(layers_strategy, st.integers(0, 200_000))
def test_total_is_the_sum_of_the_layers(layers: list[Layer], tokens: int) -> None:
    model = Architecture("m", Path("m"), tuple(layers), {})
    assert model.kv_bytes(tokens) == sum(model.layer_kv_bytes(tokens))
    assert len(model.layer_kv_bytes(tokens)) == len(layers)


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
    with pytest.raises(ValueError, match="positive"):
        wire_layer_bytes((1,), 0.0)


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

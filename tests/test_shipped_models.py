"""The models in ``profiles/models``: bytes by published shapes, and where their layers lie."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from harness.architecture import architecture_text, load_architecture
from harness.attention import KvDtype
from harness.core import ScenarioError
from harness.scenario import load_scenario, scenario_hash, to_manifest

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "profiles" / "models"
TABLE = ROOT.parent / "shared" / "data" / "models" / "skv.csv"

#: Of each model at 32,768 tokens: growing bytes in bf16 and fp8, window bytes likewise, state.
GEOMETRY = {
    "deepseek-v3": (2_302_672_896, 1_151_336_448, 0, 0, 0),
    "gpt-oss-120b": (1_207_959_552, 603_979_776, 4_718_592, 2_359_296, 0),
    "kimi-k2.5": (2_302_672_896, 1_151_336_448, 0, 0, 0),
    "kimi-k3": (905_969_664, 452_984_832, 0, 0, 449_372_160),
    "kimi-linear-48b": (264_241_152, 132_120_576, 0, 0, 43_417_600),
    "mimo-v2-flash": (754_974_720, 377_487_360, 25_559_040, 12_779_520, 0),
    "minimax-m2.5": (8_321_499_136, 4_160_749_568, 0, 0, 0),
    "prfaas-1t": (566_231_040, 283_115_520, 0, 0, 182_353_920),
    "qwen2.5-72b": (10_737_418_240, 5_368_709_120, 0, 0, 0),
    "qwen3-235b": (6_308_233_216, 3_154_116_608, 0, 0, 0),
    "qwen3-next-80b": (805_306_368, 402_653_184, 0, 0, 77_266_944),
    "qwen3.5-397b": (1_006_632_960, 503_316_480, 0, 0, 192_061_440),
    "ring-2.5-1t": (377_487_360, 188_743_680, 0, 0, 293_601_280),
    "ring-flash-linear-2.0": (268_435_456, 134_217_728, 0, 0, 58_720_256),
}
#: What the models are called in the table of S_kv beside the checkout.
NAMES = {
    "Kimi-K2/K2.5": "kimi-k2.5",
    "Kimi-Linear-48B-A3B": "kimi-linear-48b",
    "PrfaaS-internal-1T(inferred)": "prfaas-1t",
    "Qwen3-235B-A22B": "qwen3-235b",
    "Qwen3-Next-80B-A3B": "qwen3-next-80b",
    "Qwen3.5-397B-A17B": "qwen3.5-397b",
}


def test_every_model_is_shipped_under_its_own_name() -> None:
    loaded = {path.stem: load_architecture(path) for path in MODELS.glob("*.json")}
    assert sorted(loaded) == sorted(GEOMETRY)
    assert {name: model.name for name, model in loaded.items()} == {name: name for name in loaded}


@pytest.mark.parametrize("name", GEOMETRY)
def test_growing_window_and_state_bytes_of_the_models(name: str) -> None:
    growing_bf16, growing_fp8, window_bf16, window_fp8, state = GEOMETRY[name]
    figures: dict[KvDtype, tuple[int, int]] = {
        "bf16": (growing_bf16, window_bf16),
        "fp8": (growing_fp8, window_fp8),
    }
    for kv_dtype, (growing, window) in figures.items():
        model = load_architecture(MODELS / f"{name}.json", kv_dtype)
        assert model.kv_dtype == kv_dtype
        for tokens in (1024, 8192, 32_768, 131_072):
            expected = growing * tokens // 32_768 + window + state
            assert model.kv_bytes(tokens) == sum(model.layer_kv_bytes(tokens)) == expected
        assert model.kv_bytes(0) == model.moved_bytes(0, 0) == state


@pytest.mark.parametrize(
    ("name", "kv_dtype", "tokens", "total"),
    [
        ("kimi-linear-48b", "fp8", 1024, 47_546_368),
        ("mimo-v2-flash", "bf16", 1024, 49_152_000),
        ("mimo-v2-flash", "fp8", 131_072, 1_522_728_960),
        ("qwen3.5-397b", "bf16", 8192, 443_719_680),
        ("qwen3-next-80b", "fp8", 131_072, 1_687_879_680),
        ("ring-2.5-1t", "fp8", 131_072, 1_048_576_000),
        ("ring-flash-linear-2.0", "bf16", 131_072, 1_132_462_080),
        ("kimi-k3", "bf16", 131_072, 4_073_250_816),
        ("prfaas-1t", "fp8", 32_768, 465_469_440),
        ("minimax-m2.5", "bf16", 1024, 260_046_848),
        ("qwen3-235b", "bf16", 131_072, 25_232_932_864),
        ("kimi-k2.5", "fp8", 1024, 35_979_264),
        ("gpt-oss-120b", "bf16", 8192, 306_708_480),
        ("qwen2.5-72b", "fp8", 131_072, 21_474_836_480),
    ],
)
def test_s_kv_of_the_models(name: str, kv_dtype: KvDtype, tokens: int, total: int) -> None:
    assert load_architecture(MODELS / f"{name}.json", kv_dtype).kv_bytes(tokens) == total


def test_every_row_of_the_table_beside_the_checkout() -> None:
    """Where the table is there; the figures above are copies of it."""
    rows = list(csv.DictReader(TABLE.open())) if TABLE.exists() else []
    for row in rows:
        name = NAMES.get(row["model"], row["model"].lower())
        kv_dtype: KvDtype = "fp8" if row["kv_dtype"] == "fp8" else "bf16"
        model = load_architecture(MODELS / f"{name}.json", kv_dtype)
        assert model.kv_bytes(int(row["len"])) == int(row["total_bytes"]), row
        assert model.kv_bytes(0) == int(row["state_bytes"]), row
    assert len(rows) in (0, 112)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("kimi-linear-48b", [3, 7, 11, 15, 19, 23, 26]),
        ("kimi-k3", [*range(3, 92, 4), 92]),
        ("mimo-v2-flash", [0, *range(5, 48, 6)]),
        ("qwen3.5-397b", [*range(3, 60, 4)]),
        ("ring-2.5-1t", [*range(7, 80, 8)]),
        ("gpt-oss-120b", [*range(1, 36, 2)]),
    ],
)
def test_layers_that_grow_are_where_the_models_configs_put_them(name: str, full: list[int]) -> None:
    layers = load_architecture(MODELS / f"{name}.json").layers
    assert [i for i, layer in enumerate(layers) if layer.growing_bytes_per_token] == full


@pytest.mark.parametrize("name", GEOMETRY)
def test_what_is_written_reads_back(name: str) -> None:
    model = load_architecture(MODELS / f"{name}.json")
    document: dict[str, Any] = json.loads(architecture_text(model, "copy", "a note"))
    assert (document["name"], document["notes"]) == ("copy", "a note")
    assert document == {
        **json.loads(model.path.read_text()),
        "name": "copy",
        "notes": "a note",
    }


def test_a_scenario_chooses_the_kv_dtype() -> None:
    path = ROOT / "scenarios" / "paper-case-study.toml"
    wide, narrow = load_scenario(path), load_scenario(path, ["model.kv_dtype=fp8"])
    assert wide.model.architecture.kv_bytes(32_768) == 748_584_960
    assert narrow.model.architecture.kv_bytes(32_768) == 465_469_440
    assert to_manifest(narrow)["model"]["architecture"]["kv_dtype"] == "fp8"
    assert scenario_hash(narrow) != scenario_hash(wide)
    with pytest.raises(ScenarioError, match=r"'model\.kv_dtype'.*bf16.*fp8.*int8"):
        load_scenario(path, ["model.kv_dtype=int8"])

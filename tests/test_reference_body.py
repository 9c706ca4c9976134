"""What completes an architecture: shipped models and their ranks, and what does not fit."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.architecture import load_architecture
from harness.core import EngineError, ScenarioError
from harness.engine.reference import require_torch
from harness.engine.reference.body import complete_architecture, read_body
from harness.engine.reference.config import (
    DeltaConfig,
    GqaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    rank_config,
)

ROOT = Path(__file__).parent.parent
PROFILES = ROOT / "profiles"
SHIPPED = sorted(path.stem for path in (PROFILES / "compute").glob("*.json"))
#: Parameters as published, in 1e9, without embedding and head.
PUBLISHED = {
    "kimi-linear-48b": 48,
    "mimo-v2-flash": 309,
    "minimax-m2.5": 229,
    "prfaas-1t": 1000,
    "qwen3-235b": 235,
}


def shipped(name: str) -> ModelConfig:
    architecture = load_architecture(PROFILES / f"models/{name}.json")
    return complete_architecture(architecture, read_body(PROFILES / f"compute/{name}.json"))


def expert_weights(config: ModelConfig) -> int:
    """Weights of the experts, which are nearly all of such a model."""
    networks = [layer.ffn for layer in config.layers if isinstance(layer.ffn, MoeConfig)]
    return sum(3 * one.local_experts * one.intermediate * config.hidden_size for one in networks)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_has_its_geometry_and_size(name: str) -> None:
    config = shipped(name)
    architecture = load_architecture(PROFILES / f"models/{name}.json")
    assert config.geometry("bf16") == architecture.layers
    assert 0.9 < expert_weights(config) / (PUBLISHED[name] * 1e9) < 1.0
    rank = rank_config(config, 8)
    assert expert_weights(rank) * 8 == expert_weights(config)
    # A latent is on every rank; heads and states are shared.
    for one, whole in zip(rank.layers, config.layers, strict=True):
        assert type(one.attention) is type(whole.attention)
        assert one.attention.heads * 8 == whole.attention.heads
        if isinstance(one.attention, MlaConfig):
            assert one.attention.geometry == whole.attention.geometry


def write_body(tmp_path: Path, **changes: Any) -> Path:
    keys = json.loads((PROFILES / "compute/kimi-linear-48b.json").read_text()) | changes
    path = tmp_path / "body.json"
    path.write_text(json.dumps(keys))
    return path


def test_a_misspelt_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"hiden_size.*did you mean 'hidden_size'"):
        read_body(write_body(tmp_path, hiden_size=3))


def test_a_kind_of_layer_without_its_table_is_named(tmp_path: Path) -> None:
    architecture = load_architecture(PROFILES / "models/kimi-linear-48b.json")
    with pytest.raises(
        ScenarioError, match="has mla layers, so the model file needs a table 'mla'"
    ):
        complete_architecture(architecture, read_body(write_body(tmp_path, mla=None)))


def test_key_heads_that_do_not_meet_the_architecture_are_refused(tmp_path: Path) -> None:
    architecture = load_architecture(PROFILES / "models/kimi-linear-48b.json")
    body = read_body(write_body(tmp_path, linear={"key_heads": 16}))
    with pytest.raises(ScenarioError, match="8192 convolved channels; the architecture has 12288"):
        complete_architecture(architecture, body)


def test_layers_given_by_their_bytes_cannot_be_computed(tmp_path: Path) -> None:
    path = tmp_path / "bytes.json"
    kinds = {"a": {"growing_bytes_per_token": 64, "source": "made up"}}
    document = {"schema_version": 1, "name": "b", "layer_kinds": kinds, "layers": ["a"]}
    path.write_text(json.dumps(document))
    with pytest.raises(ScenarioError, match="gives 'a' by its bytes"):
        complete_architecture(load_architecture(path), read_body(write_body(tmp_path)))


def test_qwen3_next_has_shared_key_heads(tmp_path: Path) -> None:
    architecture = load_architecture(PROFILES / "models/qwen3-next-80b.json")
    body = write_body(
        tmp_path, gqa={"heads": 16, "rotary_dim": 64, "gated": True}, linear={"key_heads": 16}
    )
    config = complete_architecture(architecture, read_body(body))
    delta, full = config.layers[0].attention, config.layers[3].attention
    assert isinstance(delta, DeltaConfig)
    assert (delta.key_heads, delta.heads) == (16, 32)
    assert isinstance(full, GqaConfig)
    assert full.gated
    assert config.geometry("bf16") == architecture.layers


#: Modules of the reference engine that a machine without torch imports.
TORCHLESS = {"__init__", "body", "choice", "config", "model_keys"}


def test_only_the_reference_engine_imports_torch() -> None:
    """The base install has none: whoever needs the engine imports it where it is used. What says
    which model is computed needs none."""
    here = ROOT / "harness/engine/reference"
    for path in sorted(ROOT.glob("harness/**/*.py")):
        if path.is_relative_to(here) and path.stem not in TORCHLESS:
            continue
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] not in {"torch", "safetensors"}, path
                if name.startswith("harness.engine.reference."):
                    assert name.rpartition(".")[2] in TORCHLESS, path


def test_where_torch_is_missing_the_extra_is_named() -> None:
    if find_spec("torch") is not None:
        require_torch()
        return
    with pytest.raises(EngineError, match=r"pip install 'prfaas-bench\[torch\]'"):
        require_torch()

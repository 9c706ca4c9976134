"""Which model a scenario's reference engine computes, and whether its KV is the architecture's."""

from pathlib import Path

from harness.architecture import Architecture, load_architecture
from harness.attention import Attention
from harness.core import ScenarioError
from harness.engine.reference.body import complete_architecture, read_body
from harness.engine.reference.config import ModelConfig, rank_config
from harness.engine.reference.model_keys import read_model
from harness.engine_settings import Reference


def chosen_model(settings: Reference, architecture: Architecture) -> ModelConfig:
    """By the model file that completes ``architecture``, or by a folder's config.json.
    ScenarioError where a file is wrong, or where the model keeps other bytes than the
    architecture says."""
    whole = architecture
    if settings.whole is not None:
        whole = load_architecture(Path(settings.whole), architecture.kv_dtype)
    config = _rank(settings, whole)
    found = config.geometry(architecture.kv_dtype)
    if len(found) != len(architecture.layers):
        raise ScenarioError(
            f"The model {config.name} has {len(found)} layers, and the architecture "
            f"{architecture.path} has {len(architecture.layers)}."
        )
    for index, (ours, theirs) in enumerate(zip(architecture.layers, found, strict=True)):
        for tokens in (1, 1000, 100_000):
            if ours.kv_bytes(tokens) != theirs.kv_bytes(tokens):
                raise ScenarioError(
                    f"Layer {index} of {config.name} keeps {theirs.kv_bytes(tokens)} bytes of "
                    f"{tokens} tokens, and the architecture {architecture.path} says "
                    f"{ours.kv_bytes(tokens)}; name files of one model."
                )
    return config


def rank_shapes(settings: Reference, whole: Architecture) -> dict[str, Attention]:
    """What each kind of layer of ``whole`` keeps on one of the ranks."""
    layers = _rank(settings, whole).layers
    return {
        layer.kind: own.attention.geometry for layer, own in zip(whole.layers, layers, strict=True)
    }


def _rank(settings: Reference, whole: Architecture) -> ModelConfig:
    """The model, or what one of its ranks holds."""
    if settings.compute is not None:
        config = complete_architecture(whole, read_body(Path(settings.compute)))
    else:
        assert settings.model_path is not None, "resolved with one of the two"
        config = read_model(Path(settings.model_path))
    return config if settings.ranks == 1 else rank_config(config, settings.ranks)

"""The reference engine: the same tokens however a prompt is cut, moved and batched, byte for byte.

Sums of float32 run in another order when a chunk or a batch has another size, so logits differ in
their last bits, and by more where that flips the rounding of a cached number. Tokens are compared,
and with them that the margins between the two likeliest tokens are wider than any such difference:
a prompt that is nearly tied would prove nothing.
"""

import random
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from harness.core import EngineError, ScenarioError
from harness.engine.reference.config import (
    GqaConfig,
    LayerConfig,
    ModelConfig,
    MoeConfig,
    rank_config,
)
from tests.reference_models import GQA, MLP, MODELS, MOE, VOCAB

if find_spec("torch") is not None:  # where it is absent, the marker leaves these tests out
    import torch

    from harness.engine.reference.cache import Cache
    from harness.engine.reference.ffn import moe
    from harness.engine.reference.model import Model
    from harness.engine.reference.rows import Rows
    from harness.engine.reference.sampling import greedy, margins
    from harness.engine.reference.softmax_attention import grouped_attention
    from harness.engine.reference.weights import parameters, random_weights

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.torch

#: Of logits with a deviation of 1. A cached number that is rounded the other way costs up to 4e-3.
MOST_ERROR = 6e-3
PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK = 150, 12, 32
#: Prompts whose tokens are nowhere nearly tied.
SEEDS = {
    "gqa": 14,
    "mla": 14,
    "window": 6,
    "kda": 9,
    "gdn": 3,
    "lightning": 3,
    "moe": 6,
    "kda-mla-3:1": 7,
    "gdn-gqa-3:1": 1,
    "window-gqa-5:1": 5,
    "lightning-mla-7:1": 8,
}
NAMES = list(MODELS)


def make(name: str) -> "Model":
    return Model(MODELS[name], random_weights(MODELS[name], seed=7))


def prompt_of(name: str, tokens: int = PROMPT_TOKENS) -> list[int]:
    draw = random.Random(SEEDS[name])
    return [draw.randrange(VOCAB) for _ in range(tokens)]


def new_cache(config: ModelConfig, slots: int = 2) -> "Cache":
    return Cache(config, slots, PROMPT_TOKENS + OUTPUT_TOKENS + 10)


def prefill(
    engine: "Model", prompt: Sequence[int], cache: "Cache", slot: int, cuts: Sequence[int] = ()
) -> "Tensor":
    """The logits after the prompt, given in chunks that end at ``cuts``."""
    start = cache.lengths[slot]
    for end in (*(cut for cut in cuts if cut > start), len(prompt)):
        logits = engine.prefill(prompt[start:end], cache, slot)
        start = end
    return logits


def go_on(
    engine: "Model", cache: "Cache", slot: int, logits: "Tensor"
) -> "tuple[list[int], Tensor]":
    """Greedy tokens from the first one on, and the logits that they were read from."""
    read = [logits]
    tokens = greedy(logits[None])
    while len(tokens) < OUTPUT_TOKENS:
        read.append(engine.decode(tokens[-1:], cache, [slot])[0])
        tokens += greedy(read[-1][None])
    return tokens, torch.stack(read)


def alone(engine: "Model", prompt: Sequence[int]) -> "tuple[list[int], Tensor]":
    """In one process, prefilled at once."""
    cache = new_cache(engine.config)
    return go_on(engine, cache, 0, engine.prefill(prompt, cache, 0))


def same(found: "tuple[list[int], Tensor]", expected: "tuple[list[int], Tensor]") -> None:
    error = float((found[1] - expected[1]).abs().max())
    assert error < MOST_ERROR
    assert min(margins(expected[1])) > 2 * MOST_ERROR, "nearly tied: take another seed"
    assert found[0] == expected[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", [(64, 128), (1, 2, 50, 149), (100,)], ids=str)
def test_a_prompt_may_be_cut_anywhere(name: str, cuts: tuple[int, ...]) -> None:
    engine, prompt = make(name), prompt_of(name)
    cache = new_cache(engine.config)
    same(go_on(engine, cache, 1, prefill(engine, prompt, cache, 1, cuts)), alone(engine, prompt))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 9])
def test_a_short_prompt_token_by_token(name: str, tokens: int) -> None:
    """As many tokens as heads, or fewer than a convolution or a window has."""
    engine, prompt = make(name), prompt_of(name, tokens)
    cache = new_cache(engine.config)
    found = prefill(engine, prompt, cache, 0, range(1, tokens))
    expected = engine.prefill(prompt, new_cache(engine.config), 1)
    assert float((found - expected).abs().max()) < MOST_ERROR


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", [(), (64, 128)], ids=str)
def test_decode_goes_on_from_the_bytes_of_each_layer(name: str, cuts: tuple[int, ...]) -> None:
    """Growing KV leaves after each layer of each chunk, windows and states after the last one;
    their bytes are the geometry's."""
    engine, prompt = make(name), prompt_of(name)
    here, there = new_cache(engine.config), new_cache(engine.config, slots=3)
    received = [0] * len(engine.config.layers)
    start = 0
    for end in (*cuts, len(prompt)):

        def send(layer: int, start: int = start, end: int = end) -> None:
            if here.layers[layer].grows:
                data = here.export_kv(0, layer, start, end)
                there.import_kv(2, layer, start, data)
            elif end == len(prompt):
                data = here.export_state(0, layer)
                there.import_state(2, layer, end, data)
            else:
                return
            received[layer] += data.numel()

        logits = engine.prefill(prompt[start:end], here, 0, send)
        start = end
    there.lengths[2] = len(prompt)
    geometry = engine.config.geometry("bf16")
    assert received == [layer.kv_bytes(len(prompt)) for layer in geometry]
    same(go_on(engine, there, 2, logits), alone(engine, prompt))


@pytest.mark.parametrize("name", NAMES)
def test_moved_bytes_give_the_same_bits(name: str) -> None:
    """Chunks and batches alike, the KV's way is all that differs: no last bit does."""
    engine, prompt = make(name), prompt_of(name)
    here, there = new_cache(engine.config), new_cache(engine.config)
    logits = prefill(engine, prompt, here, 0, (64, 128))
    for layer in range(len(here.layers)):
        there.import_layer(1, layer, len(prompt), here.export_layer(0, layer).clone())
    there.lengths[1] = len(prompt)
    moved, stayed = go_on(engine, there, 1, logits), go_on(engine, here, 0, logits)
    assert torch.equal(moved[1], stayed[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("held", [2 * BLOCK, 77], ids=["block", "exact"])
def test_a_prefill_goes_on_from_a_prefix(name: str, held: int) -> None:
    """Growing KV of the prefix in blocks, and the states as they were at exactly its length."""
    engine, prompt = make(name), prompt_of(name)
    first = new_cache(engine.config)
    prefill(engine, prompt[:held], first, 0)
    layers = range(len(engine.config.layers))
    states = {
        layer: first.export_state(0, layer) for layer in layers if not first.layers[layer].grows
    }
    # The same slot serves on: what the prefix left must not change.
    prefill(engine, [*prompt[:held], *prompt_of(name, 20)], first, 0)
    cache = new_cache(engine.config)
    for layer in layers:
        if layer in states:
            cache.import_state(1, layer, held, states[layer])
            continue
        for start in range(0, held, BLOCK):
            end = min(start + BLOCK, held)
            cache.import_kv(1, layer, start, first.export_kv(0, layer, start, end))
    cache.lengths[1] = held
    same(go_on(engine, cache, 1, prefill(engine, prompt, cache, 1)), alone(engine, prompt))


@pytest.mark.parametrize("name", NAMES)
def test_only_what_is_not_resident_moves(name: str) -> None:
    engine, prompt = make(name), prompt_of(name)
    here, there = new_cache(engine.config), new_cache(engine.config)
    logits = prefill(engine, prompt, here, 0)
    for layer, kept in enumerate(engine.config.geometry("bf16")):
        if there.layers[layer].grows:
            there.import_kv(0, layer, 0, here.export_kv(0, layer, 0, BLOCK))
        data = here.export_layer(0, layer, resident_tokens=BLOCK)
        assert data.numel() == kept.kv_bytes(len(prompt), BLOCK)
        there.import_layer(0, layer, len(prompt), data, resident_tokens=BLOCK)
        with pytest.raises(EngineError, match=f"layer {layer}"):
            there.import_layer(0, layer, len(prompt), data[:-2], resident_tokens=BLOCK)
    there.lengths[0] = len(prompt)
    same(go_on(engine, there, 0, logits), alone(engine, prompt))


@pytest.mark.parametrize("name", NAMES)
def test_a_lost_token_or_state_is_seen(name: str) -> None:
    """What the other tests compare by can fail: one layer's last token, or its state, is zero."""
    engine, prompt = make(name), prompt_of(name)
    cache = new_cache(engine.config)
    logits = prefill(engine, prompt, cache, 0)
    data = cache.export_layer(0, 1).clone()
    grows = cache.layers[1].grows
    data[-(data.numel() // len(prompt)) if grows else 0 :] = 0
    cache.import_layer(0, 1, len(prompt), data)
    with pytest.raises(AssertionError):
        same(go_on(engine, cache, 0, logits), alone(engine, prompt))


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_decodes_as_each_sequence_alone(name: str) -> None:
    """Three sequences of unlike lengths, in slots out of order, one shorter than a window."""
    engine, prompt = make(name), prompt_of(name)
    prompts = [prompt, prompt[:90], prompt[:11]]
    slots = [3, 0, 2]
    cache = new_cache(engine.config, slots=4)
    read = [[prefill(engine, one, cache, slot)] for one, slot in zip(prompts, slots, strict=True)]
    tokens = [greedy(logits[0][None]) for logits in read]
    for _ in range(OUTPUT_TOKENS - 1):
        logits = engine.decode([one[-1] for one in tokens], cache, slots)
        for row, token in enumerate(greedy(logits)):
            tokens[row].append(token)
            read[row].append(logits[row])
    for row, one in enumerate(prompts):
        same((tokens[row], torch.stack(read[row])), alone(engine, one))


@pytest.mark.parametrize("name", NAMES)
def test_a_slot_is_clean_for_the_next_sequence(name: str) -> None:
    engine, prompt = make(name), prompt_of(name)
    cache = new_cache(engine.config)
    prefill(engine, prompt[::-1], cache, 0)
    cache.clear(0)
    same(go_on(engine, cache, 0, prefill(engine, prompt, cache, 0)), alone(engine, prompt))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tokens", [1, 23, 24, 25, 100])
def test_a_layer_has_the_bytes_of_its_geometry(name: str, tokens: int) -> None:
    engine = make(name)
    cache = new_cache(engine.config)
    prefill(engine, prompt_of(name, tokens), cache, 0)
    for layer, kept in enumerate(engine.config.geometry("bf16")):
        assert cache.export_layer(0, layer).numel() == kept.kv_bytes(tokens)


@pytest.mark.parametrize("name", ["gqa", "mla", "window"])
def test_fp8_takes_half_the_bytes(name: str) -> None:
    engine, prompt = make(name), prompt_of(name)
    cache = Cache(engine.config, 1, 200, dtype="fp8")
    logits = prefill(engine, prompt, cache, 0)
    for layer, kept in enumerate(engine.config.geometry("fp8")):
        assert cache.export_layer(0, layer).numel() == kept.kv_bytes(len(prompt))
    exact = alone(engine, prompt)[1][0]
    assert 0 < float((logits - exact).norm() / exact.norm()) < 0.2


def test_weights_are_of_the_seed_and_the_name() -> None:
    config = MODELS["kda-mla-3:1"]
    one, again, other = (random_weights(config, seed) for seed in (1, 1, 2))
    assert one.keys() == parameters(config).keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, again[name])
        assert tuple(tensor.shape) == parameters(config)[name].shape
    assert not torch.equal(one["embedding"], other["embedding"])
    # On every machine: two ends must hold one model.
    assert one["embedding"][0, :2].tolist() == [-0.9772464632987976, 0.10432165116071701]
    assert one["layers.0.attention.qkv"][0, :2].tolist() == [
        -0.18346282839775085,
        -0.02666657418012619,
    ]


def test_a_full_cache_says_so() -> None:
    engine = make("gqa")
    cache = Cache(engine.config, 1, 10)
    engine.prefill(list(range(8)), cache, 0)
    with pytest.raises(EngineError, match="slot 0 holds 8 tokens"):
        engine.prefill([1, 2, 3], cache, 0)
    assert cache.lengths == [8]


def test_the_heads_of_two_ranks_add_up_to_the_layer() -> None:
    weights = random_weights(MODELS["gqa"], 3)
    whole = {key: weights[f"layers.0.attention.{key}"] for key in ("q", "k", "v", "o")}
    norms = {key: weights[f"layers.0.attention.{key}"] for key in ("q_norm", "k_norm")}
    x = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(0))

    def attend(config: GqaConfig, part: "dict[str, Tensor]") -> "Tensor":
        cache = Cache(ModelConfig("one", 64, 2, (LayerConfig(config, MLP),)), 1, 20)
        rows = Rows([0], [0], 20, cache.device)
        return grouped_attention(x, config, part | norms, cache.layers[0], rows, 1e-6)

    parts = [
        {key: one.chunk(2, dim=int(key == "o"))[rank] for key, one in whole.items()}
        for rank in (0, 1)
    ]
    added = sum(attend(GQA.rank(2), part) for part in parts)
    assert torch.allclose(added, attend(GQA, whole), atol=1e-5)


def test_the_experts_of_two_ranks_add_up_to_the_network() -> None:
    weights = random_weights(MODELS["moe"], 3)
    prefix = "layers.1.ffn."
    whole = {key.removeprefix(prefix): one for key, one in weights.items() if prefix in key}
    x = torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(0))
    added = torch.zeros_like(x)
    for rank in (0, 1):
        part = {
            key: one.chunk(2, dim=int(key == "shared_down"))[rank] for key, one in whole.items()
        }
        # A rank holds the first of the router's experts.
        part["router"] = whole["router"].roll(-4 * rank, dims=0)
        part["correction"] = whole["correction"].roll(-4 * rank, dims=0)
        added += moe(x, MOE.rank(2), part)
    assert torch.allclose(added, moe(x, MOE, whole), atol=1e-5)


def test_a_rank_has_its_share_of_heads_experts_and_bytes() -> None:
    rank = rank_config(MODELS["kda-mla-3:1"], 4)
    kda, mla = rank.geometry("bf16")[0], rank.geometry("bf16")[3]
    whole_kda, whole_mla = (MODELS["kda-mla-3:1"].geometry("bf16")[n] for n in (0, 3))
    assert kda.fixed_bytes * 4 == whole_kda.fixed_bytes
    assert mla == whole_mla  # a latent is every rank's
    assert isinstance(rank.layers[3].ffn, MoeConfig)
    assert (rank.layers[3].ffn.local_experts, rank.layers[3].ffn.experts) == (2, 8)
    assert GQA.rank(4).kv_heads == 1
    engine = Model(rank, random_weights(rank, 1))
    assert engine.prefill([1, 2, 3], new_cache(rank), 0).isfinite().all()
    with pytest.raises(ScenarioError, match="4 query heads cannot be shared by 3"):
        rank_config(MODELS["gqa"], 3)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_computes_nearly_the_same(name: str) -> None:
    """What a GPU computes in. Only the numbers that decide much stay float32."""
    config, prompt = MODELS[name], prompt_of(name)
    weights = random_weights(config, seed=7, dtype=torch.bfloat16)
    assert weights["head"].dtype == torch.bfloat16
    assert weights["norm"].dtype == torch.float32
    engine = Model(config, weights)
    cache = new_cache(config)
    found = prefill(engine, prompt, cache, 0, (64,))
    expected = make(name).prefill(prompt, new_cache(config), 0)
    assert float((found - expected).norm() / expected.norm()) < 0.1
    assert engine.decode([1], cache, [0]).isfinite().all()

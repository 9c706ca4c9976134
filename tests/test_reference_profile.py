"""The reference engine under the profiler: ranks of the shipped models, a profile of its own."""

import json
from pathlib import Path

import pytest

from harness.architecture import load_architecture
from harness.cli import main
from harness.core import ScenarioError
from harness.engine.reference.choice import chosen_model
from harness.engine_settings import Reference
from harness.profile_file import load_profile
from harness.profiler.reference import Computing, model_of, rank_of

ROOT = Path(__file__).parent.parent
SHIPPED = sorted((ROOT / "profiles/compute").glob("*.json"))
TINY = ROOT / "profiles/tiny/reference-tiny.json"
TINY_COMPUTE = ROOT / "profiles/tiny/reference-tiny-compute.json"


def computing(architecture: Path, compute: Path, ranks: int) -> Computing:
    settings = Reference(
        compute=str(compute), model_path=None, seed=1, dtype="bfloat16", device="cpu", threads=1,
        chunk_tokens=2048, prefill_slots=2, context_tokens=4096, ready_timeout_s=60.0, ranks=ranks,
    )  # fmt: skip
    return Computing(load_architecture(architecture), settings, 4, 1)


@pytest.mark.parametrize("compute", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_a_ranks_file_is_what_the_rank_computes(compute: Path, ranks: int, tmp_path: Path) -> None:
    """Its architecture is written, read, and found to keep what the model's layers keep there."""
    whole = ROOT / "profiles/models" / compute.name
    given = rank_of(computing(whole, compute, ranks), tmp_path)
    config = model_of(given)
    assert config == chosen_model(given.settings, given.architecture)
    assert len(config.layers) == len(given.architecture.layers)
    mine, all_of_it = given.architecture.kv_bytes(8192), load_architecture(whole).kv_bytes(8192)
    # A latent is on every rank, so a rank may keep more than its share, and never less.
    assert all_of_it <= ranks * mine
    assert (mine == all_of_it) == (ranks == 1)


def test_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="cannot be shared by 3"):
        rank_of(computing(TINY, TINY_COMPUTE, 3), tmp_path)


@pytest.mark.parametrize("lacking", ["--compute", "--hardware", "--context-tokens"])
def test_what_is_lacking_is_named(lacking: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "--model-architecture": str(TINY), "--compute": str(TINY_COMPUTE), "--hardware": "x",
        "--context-tokens": "512",
    }  # fmt: skip
    del given[lacking]
    flags = [word for pair in given.items() for word in pair]
    assert main(["profile", "--engine", "reference", "--device", "cpu", *flags]) == 2
    assert f"{lacking} is needed with --engine reference" in capsys.readouterr().err


@pytest.mark.torch
@pytest.mark.slow
def test_a_profile_is_measured_and_says_what_it_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank of two: every point is there, however loosely."""
    flags = [
        "--engine", "reference", "--rank", "2", "--device", "cpu", "--dtype", "float32",
        "--model-architecture", str(TINY), "--compute", str(TINY_COMPUTE), "--hardware", "a core",
        "--context-tokens", "600", "--max-batch", "2", "--chunk-tokens", "256",
        "--lengths", "64,512", "--batches", "1,2", "--contexts", "64,512",
        "--budget", "180s", "--interval", "90%", "--out", str(tmp_path), "--json",
    ]  # fmt: skip
    assert main(["profile", *flags]) in (0, 1)  # 1: not every point is tight
    told = json.loads(capsys.readouterr().out)
    assert "what ranks say to each other is not in its times" in told["notes"]
    assert any("KV export" in note for note in told["measurement"]["notes"])
    engine = told["measurement"]["engine_flags"]
    assert (engine["ranks"], engine["device"], engine["chunk_tokens"]) == (2, "cpu", 256)
    for row in told["measurement"]["kv"]:
        assert row["moved_bytes"] == row["geometry_bytes"]
    profile = load_profile(Path(told["file"]))
    assert profile.model == "reference-tiny-rank-of-2"
    assert 0 < profile.prefill_s(64) < profile.prefill_s(512)
    assert {(one.batch, one.context_tokens) for one in profile.decode_points} == {
        (batch, context) for batch in (1, 2) for context in (64, 512)
    }

"""aiconfigurator: what it is shipped as, the pinned extra, and the same points from it again."""

import csv
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.architecture import load_architecture
from harness.core import ScenarioError
from harness.profile import Profile
from harness.profile_file import load_profile, read_profile_file
from harness.profile_import import aiconfigurator
from harness.profile_import.document import profile_text

ROOT = Path(__file__).parent.parent
PROFILES = ROOT / "profiles"
SHARED = ROOT.parent / "shared/data/perf"
OPERATOR = sorted((PROFILES / "operator").glob("*.json"))


@pytest.mark.parametrize("path", OPERATOR, ids=lambda path: path.stem)
def test_an_operator_profile_holds_what_it_says(path: Path) -> None:
    profile = load_profile(path)
    model, _, size = path.stem.rpartition("-")
    assert profile.model == model
    assert load_architecture(PROFILES / f"models/{model}.json").name == model
    assert profile.hardware.lower() == size
    assert profile.covered_tokens in ((128, 131_072), (128, 65_536))
    assert {p.cached_tokens for p in profile.prefill_points} == {0, 8192, 32_768, 131_072}
    points = (*profile.prefill_points, *profile.decode_points)
    assert {point.provenance for point in points} == {"modelled"}
    assert all(f"aiconfigurator {aiconfigurator.VERSION}" in point.source for point in points)
    assert profile.can_decode == (model != "deepseek-v3")
    if profile.decode_max_batch is not None:
        assert profile.decode_max_batch == max(p.batch for p in profile.decode_points)
        step_s = profile.decode_step_s(profile.decode_max_batch, 131_072 + 8192)
        assert profile.decode_step_s(1, 128) < step_s
    assert profile_text(read_profile_file(path)) == path.read_text()


def hub_name(profile: Profile) -> str:
    """The model id in a profile's sources: "aiconfigurator V, ID on SYSTEM, ..."."""
    return profile.prefill_points[0].source.split(", ")[1].partition(" on ")[0]


if SHARED.exists():

    def test_the_operator_profiles_are_an_earlier_run_of_the_tool() -> None:
        ours = {(hub_name(p), p.hardware): p for p in map(load_profile, OPERATOR)}
        compared = 0
        for row in csv.DictReader((SHARED / "aic_prefill_h200_h100.csv").open()):
            profile = ours.get((row["model"], f"8x{row['system'][:4].upper()}"))
            if profile is not None:
                new, cached = int(row["new_tokens"]), int(row["prefix_tokens"])
                theirs = float(row["ttft_ms"]) / 1e3
                assert profile.prefill_s(new, cached) == pytest.approx(theirs, abs=6e-7)
                compared += 1
        for row in csv.DictReader((SHARED / "aic_decode_h200.csv").open()):
            profile = ours.get((row["model"], "8xH200"))
            batch, context = int(row["batch"]), int(row["ctx"])
            if profile is not None and batch <= (profile.decode_max_batch or 0):
                theirs = float(row["tpot_ms"]) / 1e3
                assert profile.decode_step_s(batch, context) == pytest.approx(theirs, abs=6e-7)
                compared += 1
        assert compared == 291


@pytest.mark.aiconfigurator
def test_the_tool_gives_the_shipped_points_again() -> None:
    aiconfigurator.require_tool()
    assert aiconfigurator.current_database("h200_sxm", "sglang") == "0.5.14"
    shipped = load_profile(PROFILES / "operator/minimax-m2.5-8xh200.json")
    target = aiconfigurator.Target(hub_name(shipped), "h200_sxm", "sglang", "0.5.14", 8, 1, 1, 8)
    points = aiconfigurator.estimate_prefill(target, (512, 32_768), (0, 8192))
    assert set(points) <= set(shipped.prefill_points)
    assert len(points) == 4
    decode = aiconfigurator.estimate_decode(target, (1, 48, 64), (8192, 139_264))
    assert decode.max_batch == 48  # 64 do not fit
    assert set(decode.points) <= set(shipped.decode_points)
    assert len(decode.points) == 4
    with pytest.raises(ScenarioError, match="Fewer than two of the batches 1, 512"):
        aiconfigurator.estimate_decode(target, (1, 512), (8192, 139_264))
    big = aiconfigurator.Target("moonshotai/Kimi-K3", "h200_sxm", "sglang", "0.5.14", 8, 1, 8, 1)
    with pytest.raises(ScenarioError, match="does not fit in the memory of 8 GPUs"):
        aiconfigurator.estimate_prefill(big, (1024,), (0,))
    with pytest.raises(ScenarioError, match="no operators of sglang measured on h20_sxm"):
        aiconfigurator.current_database("h20_sxm", "sglang")
    lost = aiconfigurator.Target(target.model, "h20_sxm", "sglang", "0.5.14", 8, 1, 1, 8)
    with pytest.raises(ScenarioError, match=r"no estimate of MiniMaxAI/MiniMax-M2\.5 on h20_sxm"):
        aiconfigurator.estimate_prefill(lost, (1024,), (0,))


def test_the_extra_is_pinned_to_the_version_that_is_known() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["aiconfigurator"]
    assert extra == [f"aiconfigurator=={aiconfigurator.VERSION}"]


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("raise metadata.PackageNotFoundError(name)", "which is not installed"),
        ("return '0.13.0'", "aiconfigurator 0.13.0 is installed"),
    ],
)
def test_without_the_pinned_extra_the_error_says_how_to_get_it(
    tmp_path: Path, version: str, words: str
) -> None:
    """In a process of its own that finds this instead of what is installed here."""
    code = (
        "import importlib.metadata as metadata, sys\n"
        f"def version(name): {version}\n"
        "metadata.version = version\n"
        "from harness.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ["--model", "a/b", "--as", "b", "--system", "h200_sxm", "--output", "p.json"]
    result = subprocess.run(
        [sys.executable, "-c", code, "profile", "import", "aiconfigurator", *arguments],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert result.returncode == 2
    assert words in result.stderr
    assert "pip install 'prfaas-bench[aiconfigurator]'" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []

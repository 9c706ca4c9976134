"""For the tests of scenarios: the case study's text, written changed, and how it is refused."""

from pathlib import Path

import pytest

from harness.core import ScenarioError
from harness.scenario import load_scenario

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "scenarios" / "paper-case-study.toml"
TEXT = PAPER.read_text().replace("../profiles/", f"{ROOT.as_posix()}/profiles/")


def written(folder: Path, text: str, name: str = "case.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str) -> str:
    """The message of a scenario that must be refused: one paragraph that names the file."""
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_status == 2
    return message

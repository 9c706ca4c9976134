"""Imports point down only: netem and reports know nothing of harness, and harness has floors."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: Floors from the bottom up; a module may import from its own floor and from those below.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("datafile", "deployment", "child", "server", "sse", "machine"),
    ("architecture", "profile", "statistics"),
    ("profile_file",),
    ("scenario", "scenario_file"),
)


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.add(node.module)
    return found

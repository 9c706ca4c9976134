"""Which code a process runs: a result is only worth comparing with results of the same code.

Versions alone do not tell two checkouts apart, so that the sources are hashed too.
"""

import functools
import hashlib
import sys
from importlib import metadata
from pathlib import Path

import harness
import netem
from harness.datafile import printable

#: Whose arithmetic a simulation's last bits depend on.
_PACKAGES = ("numpy", "scipy")


@functools.cache
def describe_code() -> dict[str, str]:
    """Versions of the project, of Python and of what computes, and the sources' SHA-256."""
    return {
        "prfaas-bench": harness.__version__,
        "sources_sha256": _sources_sha256(),
        "python": ".".join(map(str, sys.version_info[:2])),
        **{name: metadata.version(name) for name in _PACKAGES},
    }


def differences(here: dict[str, str], there: dict[str, str]) -> str:
    """What is not the same, in words; empty where all is."""
    names = dict.fromkeys([*here, *there])
    return ", ".join(
        f"{printable(name)} {_short(there.get(name))} instead of {_short(here.get(name))}"
        for name in names
        if here.get(name) != there.get(name)
    )


def _short(value: str | None) -> str:
    return "none" if value is None else printable(value[:16])


def _sources_sha256() -> str:
    digest = hashlib.sha256()
    for package in (harness, netem):
        assert package.__file__ is not None, "it is a package with a file"
        folder = Path(package.__file__).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{package.__name__}/{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()

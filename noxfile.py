"""Sessions: ``bench-prfaas`` (the main job), ``lint``, ``types``, ``tests``, ``netem``,
``ray``, ``sglang-cpu``."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "venv"

SCENARIO = "scenarios/paper-case-study.toml"
#: What boots a kernel with tc-netem, and how to get one of them (tests/uml.py).
KERNELS = ("linux.uml", "qemu-system-x86_64")
INSTALL_KERNEL = "apt-get install user-mode-linux, or qemu-system-x86 linux-image-amd64"
NETEM_TESTS = [
    f"tests/test_{name}.py"
    for name in (
        "netem_kernel",
        "netem_kernel_changes",
        "netem_testlink",
        "netem_nic",
        "netem_topology",
        "doctor",
    )
]
#: Side by side, each file in one process; in their order, by which the longest come early.
SIDE_BY_SIDE = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
SGLANG_PYTHON = (3, 11)
SGLANG_FILES = Path("tests/sglang_cpu")
#: A package that wants torchvision would replace torch by one with CUDA, of 3 GB, unasked.
NO_CUDA = (
    "import sys, torch; "
    "sys.exit(torch.version.cuda and 'torch is built for CUDA; for pip set "
    "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, and remove this environment')"
)
GROUPS = nox.project.load_toml("pyproject.toml")["dependency-groups"]


@nox.session(name="bench-prfaas")
def bench_prfaas(session: nox.Session) -> None:
    """Run the three deployments side by side, live: [SCENARIO] [options]."""
    arguments = list(session.posargs)
    if not arguments or arguments[0].startswith("-"):
        arguments.insert(0, SCENARIO)
    session.install("-q", ".[torch]" if _wants_torch(Path(arguments[0])) else ".")
    # A verdict that is not supported fails the session; nox makes 1 of every status above 0.
    session.run("prfaas", "bench", *arguments)


def _wants_torch(scenario: Path) -> bool:
    """Whether the scenario is of the reference engine; what is wrong with it `prfaas` will say."""
    try:
        engine = nox.project.load_toml(scenario).get("engine", {})
    except (OSError, ValueError):
        return False
    return isinstance(engine, dict) and engine.get("kind") == "reference"


@nox.session
def tests(session: nox.Session) -> None:
    """All tests that this machine can run: [pytest options], with which one process runs them."""
    session.install("-q", "-e", ".", *GROUPS["test"])
    pytest = ("python", "-m", "pytest")
    if session.posargs:
        session.run(*pytest, *session.posargs)
    else:
        session.run(*pytest, "-m", "quiet")
        session.run(*pytest, "-m", "not quiet", *SIDE_BY_SIDE)
    if any(map(shutil.which, KERNELS)):
        session.notify("netem", posargs=[])
    else:
        session.log(f"not tested: tc-netem on a real kernel; {INSTALL_KERNEL}, then nox -s netem")


@nox.session
def lint(session: nox.Session) -> None:
    """Style and format."""
    session.install("-q", *GROUPS["lint"])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Static types, strict."""
    session.install("-q", "-e", ".", *GROUPS["types"])
    session.run("mypy")


@nox.session
def netem(session: nox.Session) -> None:
    """The tc-netem backend on a real kernel that has it, booted by tests/uml.py."""
    session.install("-q", "-e", ".", *GROUPS["test"])
    pytest = ["python", "-m", "pytest", "-p", "no:cacheprovider", *NETEM_TESTS]
    chosen = ["-k", "test_netem_kernel or [netem]", *session.posargs]
    session.run("python", "tests/uml.py", "--timeout", "480", "--", *pytest, *chosen)


@nox.session
def ray(session: nox.Session) -> None:
    """Sweeps on a real Ray cluster of several local nodes: [pytest options]."""
    session.install("-q", "-e", ".[ray]", *GROUPS["test"])
    session.run("python", "-m", "pytest", "-m", "ray", "tests/test_sweep_ray.py", *session.posargs)


@nox.session(name="sglang-cpu", venv_backend="none")
def sglang_cpu(session: nox.Session) -> None:
    """Real SGLang servers without a GPU, and the reference engine in torch, in an environment that
    is kept: [pytest options]."""
    if sys.version_info[:2] != SGLANG_PYTHON:
        asked, here = (
            ".".join(map(str, version[:2])) for version in (SGLANG_PYTHON, sys.version_info)
        )
        session.error(
            f"SGLang's wheels for the processor are tested with Python {asked}, and nox runs with "
            f"{here}: install nox for python{asked}"
        )
    python = _sglang_environment(session)
    standin = str(SGLANG_FILES / "standin")
    session.run(python, "-m", "pip", "install", "-q", "-e", ".", *GROUPS["test"], external=True)
    session.run(
        python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", standin,
        external=True,
    )  # fmt: skip
    session.run(python, "-c", NO_CUDA, external=True)
    tests = sorted(str(p) for kind in ("sglang", "reference") for p in _tests_of(kind))
    # Several servers start at once, so no two files side by side.
    session.run(
        python, "-m", "pytest", "-m", "sglang or torch", *tests, *session.posargs,
        external=True, env={"PRFAAS_REQUIRE_SGLANG": "1"},
    )  # fmt: skip


def _tests_of(kind: str) -> list[Path]:
    return list(Path("tests").glob(f"test_{kind}*.py"))


def _sglang_environment(session: nox.Session) -> str:
    """The interpreter of an environment with SGLang, made once for a list of requirements."""
    lists = [SGLANG_FILES / "requirements.txt", SGLANG_FILES / "requirements-no-deps.txt"]
    content = b"".join(path.read_bytes() for path in lists) + sys.version.encode()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prfaas-bench"
    folder = cache / f"sglang-cpu-{hashlib.sha256(content).hexdigest()[:16]}"
    python = str(folder / "bin" / "python")
    if (folder / "complete").exists():
        session.log(f"using {folder}")
        return python
    session.log(f"making {folder}: 2.4 GB, some minutes")
    shutil.rmtree(folder, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", str(folder), external=True)
    pip = (python, "-m", "pip", "install", "-q")
    session.run(*pip, "-r", str(lists[0]), external=True)
    session.run(*pip, "--no-deps", "-r", str(lists[1]), external=True)
    session.run(python, "-c", NO_CUDA, external=True)
    (folder / "complete").touch()
    return python

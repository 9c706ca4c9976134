"""Sessions: ``bench-prfaas`` (the main job), ``lint``, ``types``, ``tests``, ``netem``."""

import shutil

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
GROUPS = nox.project.load_toml("pyproject.toml")["dependency-groups"]


@nox.session(name="bench-prfaas")
def bench_prfaas(session: nox.Session) -> None:
    """Run the three deployments side by side, live: [SCENARIO] [options]."""
    session.install("-q", ".")
    arguments = list(session.posargs)
    if not arguments or arguments[0].startswith("-"):
        arguments.insert(0, SCENARIO)
    # A verdict that is not supported fails the session; nox makes 1 of every status above 0.
    session.run("prfaas", "bench", *arguments)


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

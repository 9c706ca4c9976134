"""Why a server failed, told by the last telling lines that it wrote, and by its exit status.

Patterns are those of SGLang 0.5.9 and 0.5.23, PyTorch, Transformers and uvicorn. A phase says where
to look: the launch (interpreter, flags, model path), the driver, loading (weights, config), memory,
the port, readiness, or a death in mid-run.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.core import EngineError

Phase = Literal["launch", "driver", "load", "memory", "port", "ready", "died"]

#: Lines of the log that are kept to tell a failure by.
TAIL_LINES = 400


@dataclass(frozen=True, slots=True)
class Failure:
    """``told`` quotes the line that says it, "" where none does; ``advice`` says what to do."""

    phase: Phase
    told: str
    advice: str


#: (phase, pattern, what to do.) The first sign that any line has, and of its lines the last one: a
#: server whose memory ran out says a dozen other things because of it.
_SIGNS: tuple[tuple[Phase, str, str], ...] = (
    ("port", r"address already in use|EADDRINUSE|\[Errno 98\]", "free the port, or let it choose"),
    (
        "memory",
        r"out of memory|OutOfMemoryError|Not enough memory|can't allocate memory|MemoryError"
        r"|Cannot allocate memory|std::bad_alloc|Not enough space for mamba cache"
        r"|max_total_num_tokens.*(is )?(<=? ?0|non-?positive)",
        "lower engine.max_total_tokens or engine.mem_fraction, raise tp, or free the device",
    ),
    (
        "driver",
        r"no NVIDIA driver|NVIDIA driver on your system is too old|CUDA driver version is insuff"
        r"|not compiled with CUDA|No CUDA GPUs are available|no CUDA-capable device"
        r"|libcuda\.so|CUDA error: (invalid device ordinal|no kernel image|system not yet|unknown)"
        r"|_cuda_setDevice|No accelerator .*available|invalid device ordinal|nvml\w* error",
        'see nvidia-smi and prfaas doctor; without a GPU set engine.device = "cpu"',
    ),
    (
        "launch",
        r"unrecognized arguments|error: argument |invalid choice|expected one argument",
        "this version does not know that flag; see engine.extra_flags and engine.version",
    ),
    (
        "load",
        r"Cannot find any model weights|not a registered model|Cannot find model module"
        r"|SafetensorError|size mismatch|Unsupported architecture|Model architectures? .* not"
        r"|not supported for now|does not recognize this architecture|Unrecognized (model|config)"
        r"|couldn't find them in the cached files|does not appear to have a file named"
        r"|Can't load (tokenizer|the config)|KeyError: 'model|Error while loading",
        "see that engine.model_path holds the weights of a model that this version serves",
    ),
    (
        "launch",
        r"ModuleNotFoundError|ImportError|No module named|Please install|cannot open shared object"
        r"|undefined symbol",
        "install what is missing for engine.python; prfaas doctor looks at it",
    ),
    (
        "launch",
        r"^(\w+\.)*(ValueError|AssertionError|TypeError|NotImplementedError|OSError)\b",
        "flags and model do not go together; see the log",
    ),
)
_COMPILED = tuple((phase, re.compile(sign, re.IGNORECASE), do) for phase, sign, do in _SIGNS)
_KILLED_ADVICE = (
    "the kernel kills what it has no memory for: see dmesg, and engine.max_total_tokens"
)
#: What is said in passing and is no failure.
_HARMLESS = re.compile(
    r"Ignore import error|UserWarning|DeprecationWarning|FutureWarning|available_gpu_mem"
    r"|Sleeping \d+ seconds before crash|is deprecated|server_args=|^usage:",
    re.IGNORECASE,
)
#: What a server says after which it never gets ready, and does not always end by itself.
_HOPELESS = re.compile(r"\[Errno 98\]|address already in use", re.IGNORECASE)
#: A process of the server that the kernel or somebody has killed.
_KILLED = re.compile(r"crashed with exit code -9\b")


def name_failure(status: int | None, lines: Sequence[str], was_ready: bool) -> Failure:
    """The failure of a server that ended with ``status`` (None: it runs) after ``lines``.

    Before it was ready every sign counts, afterwards only memory and the GPU: what a server says
    while it runs is full of words.
    """
    recent = [line.strip() for line in lines[-TAIL_LINES:] if not _HARMLESS.search(line)]
    phases: tuple[Phase, ...] = ("memory", "driver") if was_ready else ()
    for phase, sign, advice in _COMPILED:
        if phases and phase not in phases:
            continue
        if told := next((line for line in reversed(recent) if sign.search(line)), None):
            return Failure(phase, _quoted(told), advice)
    killed = [line for line in recent if _KILLED.search(line)]
    if killed or status == -signal.SIGKILL:
        told = _quoted(killed[-1]) if killed else ""
        return Failure("died" if was_ready else "memory", told, _KILLED_ADVICE)
    return Failure("died" if was_ready else "launch", _quoted(_last_telling(recent)), "see the log")


def is_hopeless(line: str) -> bool:
    """Whether a server that has written ``line`` will never be ready."""
    return _HOPELESS.search(line) is not None and _HARMLESS.search(line) is None


def server_error(name: str, failure: Failure, how: str, log_path: str) -> EngineError:
    """One paragraph: which server, in what phase, what happened, what it wrote, what to do."""
    told = f'; it wrote: "{failure.told}"' if failure.told else ""
    advice = f"; {failure.advice}" if failure.advice else ""
    return EngineError(
        f"SGLang server {name} failed in phase {failure.phase}: it {how}{told}{advice} "
        f"(log: {log_path})"
    )


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exited with {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _last_telling(lines: Sequence[str]) -> str:
    """The last line that is not the end of an orderly way out."""
    words = re.compile(r"kill_process_tree|sigquit|py-spy|coredump", re.IGNORECASE)
    return next((line for line in reversed(lines) if line and not words.search(line)), "")


def _quoted(line: str) -> str:
    """Without its time stamp, on one line, short enough for a message."""
    text = re.sub(r"^\[\d{4}-\d\d-\d\d [\d:.]+[^\]]*\] ?", "", line)
    printable = "".join(c if c.isprintable() else "?" for c in text)
    return printable if len(printable) <= 300 else f"{printable[:297]}..."

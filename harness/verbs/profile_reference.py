"""``prfaas profile --engine reference``: its options, and the target that they describe."""

import argparse
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from harness.core import ScenarioError

if TYPE_CHECKING:
    from harness.engine_settings import Reference
    from harness.profiler.asked import Settings
    from harness.profiler.target import Target

Opening = Callable[[], AbstractAsyncContextManager["Target"]]
READY_TIMEOUT_S = 3600.0


def add_reference(parser: argparse.ArgumentParser) -> None:
    """Options of the reference engine."""
    own = parser.add_argument_group("of --engine reference")
    own.add_argument("--compute", type=Path, metavar="FILE", help="completes the architecture")
    own.add_argument("--rank", type=int, metavar="N", help="one of N tensor-parallel ranks")
    own.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    own.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    own.add_argument("--kv-dtype", choices=("bf16", "fp8"), default="bf16")
    own.add_argument("--threads", type=int, default=1, metavar="N", help="on the processor")
    own.add_argument("--chunk-tokens", type=int, default=2048, metavar="N")
    own.add_argument("--max-batch", type=int, default=8, metavar="N", help="slots of decode")
    own.add_argument("--context-tokens", type=int, metavar="N", help="prompt and output")


def reference_target(
    options: argparse.Namespace, how: dict[str, Any], slo_s: float | None, timeout_s: float
) -> tuple["Opening", "Settings"]:
    """The worker that computes what the options name."""
    from harness.architecture import load_architecture
    from harness.engine.reference import require_device
    from harness.profiler import reference
    from harness.profiler.asked import Settings

    _check(options)
    require_device(options.device, "--device")
    folder = TemporaryDirectory(prefix="prfaas-rank-")
    architecture = load_architecture(options.model_architecture, options.kv_dtype)
    asked = reference.Computing(
        architecture,
        _computes(options),
        options.max_batch,
        options.seed,
        keeps_prefixes=any(how["cached"] or ()),
    )
    given = reference.rank_of(asked, Path(folder.name))
    ranks = given.settings.ranks
    how = how | {"token_ids": how["token_ids"] or (0, reference.model_of(given).vocab_size)}
    settings = Settings(
        architecture=given.architecture,
        hardware=options.hardware,
        gpus=options.gpus or 1,
        slo_tpot_s=slo_s,
        notes=reference.NO_COMMUNICATION.format(ranks=ranks) if ranks > 1 else "",
        identity=reference.describe(given),
        measured_notes=lambda: (reference.export_note(given),),
        **how,
    )

    def open_target() -> AbstractAsyncContextManager["Target"]:
        assert folder.name, "the rank's architecture lies there until the end"
        return reference.reference_pair(given, timeout_s)

    return open_target, settings


def _check(options: argparse.Namespace) -> None:
    for name in ("model_architecture", "compute", "hardware", "context_tokens"):
        if getattr(options, name) is None:
            raise ScenarioError(f"--{name.replace('_', '-')} is needed with --engine reference.")
    for name in ("rank", "threads", "chunk_tokens", "max_batch", "context_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ScenarioError(f"--{name.replace('_', '-')} {value}: a number from 1 is needed.")


def _computes(options: argparse.Namespace) -> "Reference":
    from harness.engine_settings import Reference

    return Reference(
        compute=str(options.compute.absolute()),
        model_path=None,
        seed=options.seed,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        chunk_tokens=options.chunk_tokens,
        prefill_slots=2,
        context_tokens=options.context_tokens,
        ready_timeout_s=READY_TIMEOUT_S,
        ranks=options.rank or 1,
    )

"""Costs from NVIDIA's aiconfigurator: measured operators of an engine, added up by its model.

    T_prefill(new, cached)      ``static_ctx``: one request of new + cached tokens, cached of them
                                found in the prefix cache
    T_decode(batch, context)    ``static_gen``: one step of ``batch`` requests after ``context``
                                tokens

Neither holds queueing, the engine's own fixed cost per request (``harness.profile_import.
calibration`` fits it) nor KV transfer. Operators are measured to 16K-32K tokens and extrapolated
beyond by the tool. It says when weights and KV do not fit in memory: a prefill that does not is
refused, a decode batch that does not is left out, so that ``max_batch`` is what fits at the longest
context asked for.

The package is an optional extra, pinned, since estimates change with its operator data.
"""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.core import ScenarioError
from harness.profile import DecodePoint, PrefillPoint
from harness.profile_import.document import DecodeCosts

if TYPE_CHECKING:
    from aiconfigurator.cli.api import EstimateResult

#: The version that the extra pins, and the only one whose estimates are known here.
VERSION = "0.12.0"
INSTALL = "pip install 'prfaas-bench[aiconfigurator]'"
NEW_TOKENS = tuple(2**power for power in range(7, 18))
CACHED_TOKENS = (0, 8192, 32_768, 131_072)
BATCHES = (1, 2, 4, 8, 16, 20, 32, 48, 64, 96, 128)
#: From the shortest prompt to 128K with 8K of output.
CONTEXTS = (128, 1024, 8192, 32_768, 131_072, 139_264)


@dataclass(frozen=True, slots=True)
class Target:
    """What is estimated: ``model`` is a Hugging Face id, ``database`` the version of ``backend``
    whose operators were measured; widths as the tool names them."""

    model: str
    system: str
    backend: str
    database: str
    tp: int
    pp: int
    moe_tp: int
    moe_ep: int

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp


def require_tool() -> None:
    """ScenarioError unless the extra is installed in its pinned version."""
    try:
        found = importlib.metadata.version("aiconfigurator")
    except importlib.metadata.PackageNotFoundError as error:
        raise ScenarioError(
            f"This importer needs the extra 'aiconfigurator', which is not installed: {INSTALL}"
        ) from error
    if found != VERSION:
        raise ScenarioError(
            f"aiconfigurator {found} is installed, but its estimates are known here for {VERSION} "
            f"only: {INSTALL}"
        )


def current_database(system: str, backend: str) -> str:
    """The newest version of ``backend`` with operators measured on ``system``. ScenarioError."""
    from aiconfigurator.sdk.perf_database import get_latest_database_version

    found = get_latest_database_version(system=system, backend=backend)
    if found is None:
        raise ScenarioError(
            f"aiconfigurator {VERSION} has no operators of {backend} measured on {system}; check "
            "--system and --backend."
        )
    return str(found)


def estimate_prefill(
    target: Target, new_tokens: Sequence[int], cached_tokens: Sequence[int]
) -> tuple[PrefillPoint, ...]:
    """T_prefill on the grid of both. ScenarioError where the tool has none, or memory no room."""
    points = []
    for cached in cached_tokens:
        for new in new_tokens:
            result = _estimate(
                target, "static_ctx", isl=new + cached, prefix=cached, osl=1, batch_size=1
            )
            if result.kv_cache_warning:
                raise ScenarioError(
                    f"{target.model} with {new} new and {cached} cached tokens does not fit in the "
                    f"memory of {target.num_gpus} GPUs of {target.system}, aiconfigurator says. "
                    "Give more GPUs (--tp, --pp) or shorter lengths (--new, --cached)."
                )
            prefill_s, source = _seconds(result.ttft), _source(target, result)
            points.append(PrefillPoint(new, cached, prefill_s, "modelled", source))
    return tuple(points)


def estimate_decode(target: Target, batches: Sequence[int], contexts: Sequence[int]) -> DecodeCosts:
    """T_decode for the batches that fit in memory at the longest context. ScenarioError when fewer
    than two do."""
    longest = max(contexts)
    points: list[DecodePoint] = []
    largest = 0
    for batch in sorted(batches):
        results = {
            context: _estimate(target, "static_gen", isl=context, osl=2, batch_size=batch)
            for context in sorted(contexts)
        }
        if results[longest].kv_cache_warning:
            break
        largest = batch
        points += [
            DecodePoint(batch, context, _seconds(one.tpot), "modelled", _source(target, one))
            for context, one in results.items()
        ]
    if len({point.batch for point in points}) < 2:
        raise ScenarioError(
            f"Fewer than two of the batches {', '.join(map(str, sorted(batches)))} of "
            f"{target.model} fit in the memory of {target.num_gpus} GPUs of {target.system} at "
            f"{longest} tokens of context, aiconfigurator says. Give shorter --contexts, more GPUs "
            "(--tp, --pp), or --no-decode."
        )
    source = (
        f"largest of the batches {', '.join(map(str, sorted(batches)))} that fits in memory at "
        f"{longest} tokens of context, by aiconfigurator {VERSION}"
    )
    return DecodeCosts(largest, "modelled", source, tuple(points))


def _estimate(target: Target, mode: str, **sizes: int) -> "EstimateResult":
    from aiconfigurator.cli.api import cli_estimate  # an optional extra, and slow to import

    try:
        return cli_estimate(
            target.model,
            target.system,
            mode=mode,
            backend_name=target.backend,
            backend_version=target.database,
            tp_size=target.tp,
            pp_size=target.pp,
            moe_tp_size=target.moe_tp,
            moe_ep_size=target.moe_ep,
            **sizes,
        )
    except Exception as error:  # what it raises has no narrower common root
        raise ScenarioError(
            f"aiconfigurator has no estimate of {target.model} on {target.system} with "
            f"{target.backend}: {' '.join(str(error).split())[:500]}"
        ) from error


def _source(target: Target, result: "EstimateResult") -> str:
    raw = result.raw
    return (
        f"aiconfigurator {VERSION}, {target.model} on {target.system}, {target.backend} "
        f"{target.database} operators, tp{target.tp} pp{target.pp} moe_tp{target.moe_tp} "
        f"moe_ep{target.moe_ep}, KV {raw['kvcache']}, GEMM {raw['gemm']}, MoE {raw['moe']}"
    )


def _seconds(milliseconds: float) -> float:
    return round(milliseconds / 1e3, 7)

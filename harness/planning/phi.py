"""KV a second of prefill (Eq. 1): Phi_kv(l) = S_kv(l) / T_prefill(l), and what it asks of a link.

Table 3 of arXiv 2604.15039 again, from the geometry and the profiles, and beside it an operator
model's: as it is and with a fixed cost and a factor, T = a + k T_tool, fitted to the four lengths
(``harness.profile_import.calibration``). Egress of N GPUs that prefill without a pause is

    (N / P) Phi_kv(l)            P GPUs an instance                     (Eq. 2)

Rates in bytes a second.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from harness.core import ScenarioError
from harness.planning.catalogue import Catalogue, Costed
from harness.profile import Profile
from harness.profile_import.calibration import Calibration, fit
from harness.published import Published

WALL_GPUS = (512, 10_000)
WALL_TOKENS = (32_768, 131_072)


@dataclass(frozen=True, slots=True)
class PhiCell:
    """One model at one length; ``*_error`` is the figure over the paper's, less 1."""

    tokens: int
    kv_bytes: int
    prefill_s: float
    phi_bytes_per_s: float
    paper_phi_bytes_per_s: float
    error: float
    operator_prefill_s: float | None
    operator_phi_bytes_per_s: float | None
    fitted_phi_bytes_per_s: float | None
    fitted_error: float | None


@dataclass(frozen=True, slots=True)
class PhiModel:
    """One row of Table 3; the operator model's figures are None where it does not cover it."""

    model: str
    printed_name: str
    cells: tuple[PhiCell, ...]
    intercept_s: float | None
    slope: float | None


@dataclass(frozen=True, slots=True)
class EgressRow:
    """What ``gpus`` GPUs send if all they do is to prefill prompts of ``tokens`` tokens."""

    model: str
    hardware: str
    tokens: int
    kv_bytes_per_s_per_instance: float
    gpus: int
    egress_bytes_per_s: float
    provenance: str


def phi_table(catalogue: Catalogue) -> tuple[PhiModel, ...]:
    """Table 3, model by model. ScenarioError for one whose profile is not in the folder."""
    published = catalogue.published
    models = dict.fromkeys(cell.model for cell in published.phi)
    return tuple(_phi_model(catalogue, published, model) for model in models)


def bandwidth_wall(catalogue: Catalogue) -> tuple[EgressRow, ...]:
    """Egress by model of 512 and 10,000 GPUs at 32K and 128K, where the profiles cover it.

    A model and hardware that is both measured or derived and estimated appears with the former.
    """
    known = {(one.profile.model, one.profile.hardware) for one in catalogue.profiles}
    estimated = (
        one for one in catalogue.operator if (one.profile.model, one.profile.hardware) not in known
    )
    return tuple(_egress(chain(catalogue.profiles, estimated)))


def _phi_model(catalogue: Catalogue, published: Published, model: str) -> PhiModel:
    own = _of(catalogue.profiles, model, published.hardware)
    if own is None:
        raise ScenarioError(
            f"The folder {catalogue.folder} has no profile of {model} on {published.hardware}, "
            f"which Table 3 of {published.source} has."
        )
    operator = _of(catalogue.operator, model, published.hardware)
    lengths = [cell.tokens for cell in published.phi_of(model)]
    fitted = _fit(own.profile, operator.profile, lengths) if operator else None
    cells = []
    for cell in published.phi_of(model):
        kv_bytes = own.architecture.kv_bytes(cell.tokens)
        prefill_s = own.profile.prefill_s(cell.tokens)
        phi = kv_bytes / prefill_s
        tool_s = operator.profile.prefill_s(cell.tokens) if operator else None
        fitted_phi = kv_bytes / fitted.seconds(tool_s) if fitted and tool_s else None
        cells.append(
            PhiCell(
                tokens=cell.tokens,
                kv_bytes=kv_bytes,
                prefill_s=prefill_s,
                phi_bytes_per_s=phi,
                paper_phi_bytes_per_s=cell.phi_bytes_per_s,
                error=phi / cell.phi_bytes_per_s - 1,
                operator_prefill_s=tool_s,
                operator_phi_bytes_per_s=kv_bytes / tool_s if tool_s else None,
                fitted_phi_bytes_per_s=fitted_phi,
                fitted_error=fitted_phi / cell.phi_bytes_per_s - 1 if fitted_phi else None,
            )
        )
    name = published.phi_of(model)[0].printed_name
    return PhiModel(
        model,
        name,
        tuple(cells),
        fitted.intercept_s if fitted else None,
        fitted.slope if fitted else None,
    )


def _fit(own: Profile, operator: Profile, lengths: list[int]) -> Calibration:
    tool_s = [operator.prefill_s(tokens) for tokens in lengths]
    return fit(tool_s, [own.prefill_s(tokens) for tokens in lengths])


def _of(costed: Iterable[Costed], model: str, hardware: str) -> Costed | None:
    found = (one for one in costed if one.profile.model == model)
    return next((one for one in found if one.profile.hardware == hardware), None)


def _egress(costed: Iterable[Costed]) -> Iterable[EgressRow]:
    for one in costed:
        low, high = one.profile.covered_tokens
        for tokens in (tokens for tokens in WALL_TOKENS if low <= tokens <= high):
            phi = one.architecture.kv_bytes(tokens) / one.profile.prefill_s(tokens)
            for gpus in WALL_GPUS:
                yield EgressRow(
                    model=one.profile.model,
                    hardware=one.profile.hardware,
                    tokens=tokens,
                    kv_bytes_per_s_per_instance=phi,
                    gpus=gpus,
                    egress_bytes_per_s=gpus / one.profile.gpus_per_instance * phi,
                    provenance=_known(one.profile, tokens),
                )


def _known(profile: Profile, tokens: int) -> str:
    """How the points on both sides of a length are known."""
    points = [point for point in profile.prefill_points if point.cached_tokens == 0]
    below = [point for point in points if point.new_tokens <= tokens][-1]
    above = next(point for point in points if point.new_tokens >= tokens)
    return "/".join(dict.fromkeys((below.provenance, above.provenance)))

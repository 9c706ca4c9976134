"""The rate at which each stage of a deployment saturates, and which does first."""

from dataclasses import dataclass, fields
from typing import Literal

from harness.utilisation import Utilisation

#: "paper": T(E[l]) and L_out steps; "exact": E[T(l)] and L_out - 1.
Objective = Literal["paper", "exact"]
OBJECTIVES: tuple[Objective, ...] = ("paper", "exact")
#: The paper's, so that a plan is comparable with its tables; plan, bench and simulate search by it.
DEFAULT_OBJECTIVE: Objective = "paper"
#: The stages in the order of ``StageRates``.
STAGES = ("prfaas_prefill", "pd_prefill", "pd_decode", "link", "fabric")


@dataclass(frozen=True, slots=True)
class StageRates:
    """Requests a second of the whole deployment at which each stage saturates; None: no such
    stage, or no request meets it. Summed over clusters, so with several of them an upper bound."""

    prfaas_prefill: float | None
    pd_prefill: float | None
    pd_decode: float
    link: float | None
    fabric: float | None = None

    def bottleneck(self) -> tuple[str, float]:
        """The stage that saturates first, and the rate at which it does."""
        rates = {f.name: getattr(self, f.name) for f in fields(self)}
        present = {name: rate for name, rate in rates.items() if rate is not None}
        name = min(present, key=present.__getitem__)
        return name, present[name]

    def utilisation(self, rate_req_per_s: float) -> Utilisation:
        """Utilisation of each stage at an offered rate."""
        return Utilisation(
            prfaas_prefill=self.prfaas_prefill and rate_req_per_s / self.prfaas_prefill,
            pd_prefill=self.pd_prefill and rate_req_per_s / self.pd_prefill,
            pd_decode=rate_req_per_s / self.pd_decode,
            link=self.link and rate_req_per_s / self.link,
            fabric=self.fabric and rate_req_per_s / self.fabric,
        )

"""Time to first token at an offered load, in closed form.

A request's way is that of ``harness.simulator``; every stage is a queue of ``harness.queueing``:

    ttft_s = hop out + prefill wait + T_prefill + exposed transfer + hop back + decode admission

* Prefill: the instances of a cluster are one G/G/c queue (least remaining work is first come first
  served at a central queue), fed by what the threshold sends there.
* Transfer of b bytes of KV in L layers over a path of rate R for which it waits W_R, with A what
  shows of it on a free path (``harness.transfer_model``, one chunk):

      layer by layer       max(A, W_R + b / R - T_prefill (L - 1) / L)
      at the end           W_R + b / R

  The link is a G/G/1 queue of whole KVs, whose wait layer by layer first uses up what prefill
  leaves of the time. Inside the PD cluster each sender has a path of its own, a G/G/1 queue of the
  requests of that sender (``harness.ttft.queues``). Where the route crosses the first hop is the
  link's delay from near to far and the second that from far to near, else both are 0.
* Decode: the slots of a cluster are one G/G/c queue with (output_tokens - 1) steps of service. The
  scheduler chooses an instance at dispatch, which waits a little longer.
* Link and decode see what leaves prefill. Over the time x that matters to them its index of
  dispersion lies between that of the arrivals I and the scv of prefill C_s^2 (after the weight of
  Whitt and You 2018), with rate, rho of prefill and S, C^2, c, rho' of the stage that follows:

      (I + y C_s^2) / (1 + y),     y = rho (I + C_s^2) / ((1 - rho)^2 rate x)
      x = S max(1, (I + C^2) rho' / (2 c (1 - rho')^2))

With ``reserve_first`` the slot is waited for before prefill, and held through it; with
``ttft_source = "prefill"`` the first token waits neither for transfer nor for decode.

Taken as independent: the waits of one request at its stages, KV sizes and gaps. Of several clusters
of one kind each gets a random share, and a crossing KV waits for the sender's link alone. Not in
it: jitter and loss of the link, failed admissions, time in gateway and workers.
"""

from collections.abc import Sequence

from harness.deployment import Deployment
from harness.scenario import Scenario
from harness.ttft.accuracy import Accuracy
from harness.ttft.arrivals import workload_stream
from harness.ttft.model import Parts, RouteTtft, Ttft, TtftModel, TtftPoint
from harness.workload import LengthDistribution

__all__ = [
    "Accuracy",
    "Parts",
    "RouteTtft",
    "Ttft",
    "TtftModel",
    "TtftPoint",
    "predict_ttft",
    "ttft_curve",
    "workload_stream",
]


def predict_ttft(
    scenario: Scenario,
    deployment: Deployment,
    rate_req_per_s: float,
    lengths: LengthDistribution | None = None,
) -> Ttft:
    """TTFT of a deployment as planned; ``lengths`` default to the scenario's.

    ScenarioError where a profile does not cover them.
    """
    return TtftModel(scenario, deployment, lengths).predict(rate_req_per_s)


def ttft_curve(
    scenario: Scenario,
    deployment: Deployment,
    rates_req_per_s: Sequence[float],
    lengths: LengthDistribution | None = None,
) -> list[TtftPoint]:
    """Mean and P90 TTFT at each rate."""
    model = TtftModel(scenario, deployment, lengths)
    return [model.point(rate) for rate in rates_req_per_s]

"""Discrete events over the same scheduler and profiles as the live run: TTFT with queueing.

The serving model of the emulated engine:

* The gateway hands a request to its prefill instance at once, a hop out later across the link.
* A prefill instance serves one request at a time, first come first served, for T_prefill; with
  ``serving.prefill_batch_tokens`` or ``chunk_tokens`` in steps (``simulator.prefill_steps``).
* KV leaves over ``harness.kv_path``: one path for the whole link of a PrfaaS cluster, shared by all
  that crosses it and followed by a hop back; inside a PD cluster one path per sending instance at
  the fabric's rate. Where more than the link's rate bounds what crosses (a cap of each flow,
  pacing, loss, what may enter a PD cluster) links are shared fairly (``simulator.fair_links``).
* ``push_then_admit``: the decode instance grants slots in the order in which KV lands;
  ``reserve_first``: in the order of dispatch, and the request joins the prefill queue only then.
  A slot is held until (output_tokens - 1) steps after decoding began, each as long as that of a
  full batch or, with ``serving.decode_steps = "by_batch"``, as the batch that runs
  (``simulator.decode_steps``). With ``serving.decode_memory`` it comes with room for the KV.
* The first token reaches the gateway when the slot is granted (``ttft_source = "decode"``) or at
  the end of prefill, a hop back later across the link (``"prefill"``).
* A request that has no slot ``admission_deadline_s`` after it asked for one fails; one that the
  scheduler refuses fails at once, in phase "rejected".

A hop out is the delay of the link from near to far, where the gateway and PD are and where PrfaaS
is; a hop back that from far to near, the way KV and answers go.

The link's changes during a run are followed: an outage, which is every packet lost in either
direction, is a rate of 0, and a dispatch across it arrives when it is over. What would have to wait
for ever fails at the request timeout. They are the first PrfaaS cluster's: further links stay.

With a prefix cache every instance has its pool (``harness.simulator.prefixes``): the true hit is
looked up when a prefill begins, what lies elsewhere in the cluster is fetched first, and only what
the decoding cluster does not hold is sent. A prefix that is copied between clusters takes its way
over the link, from near to far over a path of its own, before the request joins the prefill queue.

Requests come as scheduled, or in a closed loop as others end (``harness.simulator.closed``).
Instances die, come back and are slow by schedule (``harness.simulator.faults``); a request that is
placed again waits, until its last placement, in ``gateway_s``.

What the scheduler is told beside that (``harness.simulator.pulse``): each control period what the
link carries, and a tick; changes of the pools, ``cache_staleness_s`` late.

Not modelled: jitter of the link, protocol overhead, time spent in gateway and workers.

With ``ttft_source = "decode"``, and with hop = the hop out where the route crosses, else 0:

    ttft_s = hop + prefill_queue_s + prefill_s + (landed - prefill end) + decode_admission_s
    transfer_s = (landed - prefill end) + hop

``transfer_s`` contains the acknowledgement's way back, since a live sender measures until then, and
the request's way out is in no measured term: the two are equal, so the terms add up to ``ttft_s``.
``prefill_s`` contains the fetch of a prefix, ``prefill_queue_s`` its copy across the link.
"""

from collections.abc import Sequence

from harness.core import Request
from harness.scenario import Scenario
from harness.scheduling.config import scheduler_config
from harness.simulator.costs import tabulated
from harness.simulator.records import RoleTaken, SimulatedRequest, Simulation, ThresholdSet
from harness.simulator.rows import SimulatedRows, Sink
from harness.simulator.run import Run

__all__ = [
    "RoleTaken",
    "SimulatedRequest",
    "SimulatedRows",
    "Simulation",
    "Sink",
    "ThresholdSet",
    "simulate",
]


def simulate(
    scenario: Scenario,
    deployment_name: str,
    schedule: Sequence[Request],
    *,
    transfer: bool = True,
    sink: Sink | None = None,
) -> Simulation:
    """Run ``schedule`` through a deployment. Without ``transfer`` KV moves, and the link is
    crossed, in no time. A ``sink`` takes the rows in blocks as requests end, which are then not
    kept. Deterministic: events at one instant happen in the order they were caused.
    """
    profiles = {name: hardware.profile for name, hardware in scenario.hardware.items()}
    config = tabulated(
        scheduler_config(scenario, deployment_name, transfer=transfer),
        schedule,
        profiles,
        scenario.model.architecture,
    )
    return Run(scenario, config, schedule, deployment_name, transfer=transfer, sink=sink).run()

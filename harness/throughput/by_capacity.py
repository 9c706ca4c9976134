"""Balancing by capacity as a split of the requests: every length goes either way, the share q far.

    q = sum_far N / E[T_far]  /  (sum_far N / E[T_far] + sum_near N / E[T_near])

over the clusters of either kind. It is what least expected completion tends to under load, when
all prefill instances are busy; a quiet system sends more to the faster side.
"""

from dataclasses import replace

import numpy as np

from harness.deployment import Deployment
from harness.scenario import Scenario
from harness.workload import LengthDistribution


def far_share(scenario: Scenario, deployment: Deployment, lengths: LengthDistribution) -> float:
    """q: the share of the requests that PrfaaS prefills. ScenarioError where a profile does not
    cover the lengths."""

    def capacity(hardware: str, instances: int) -> float:
        profile = scenario.hardware[hardware].profile
        prefill_s = profile.prefill_s_array(lengths.lengths, lengths.cached_tokens)
        return instances / float(np.average(prefill_s, weights=lengths.weights))

    far = [(one.hardware, one.num_instances) for one in deployment.prfaas_clusters(0.0)]
    near = [(one.hardware, one.num_prefill) for one in deployment.pd_clusters(0.0)]
    remote, local = (sum(capacity(*one) for one in side) for side in (far, near))
    return remote / (remote + local)


def on_both_sides(
    scenario: Scenario, deployment: Deployment, lengths: LengthDistribution
) -> LengthDistribution:
    """Each point twice: all that stay first, then all that cross."""
    share = far_share(scenario, deployment, lengths)
    return replace(
        lengths,
        lengths=np.concatenate([lengths.lengths, lengths.lengths]),
        weights=np.concatenate([(1 - share) * lengths.weights, share * lengths.weights]),
        cached_tokens=np.concatenate([lengths.cached_tokens, lengths.cached_tokens]),
    )

"""How many requests a second a deployment can carry, and at which threshold and split most.

Equations 3 to 6 of arXiv 2604.15039, with l the uncached input length, t the threshold and
p = P(l > t):

    Th_prfaas  = min(N_prfaas / T_prfaas(l_long), B_out / S_kv(l_long))     l_long  = E[l | l > t]
    Th_pd_p    = N_p / T_pd(l_short)                                        l_short = E[l | l <= t]
    Th_pd_d    = N_d BS_max / (T_decode L_out)
    Lambda_max = min(Th_prfaas / p, Th_pd_p / (1 - p), Th_fabric / (1 - p), Th_pd_d)

The paper takes the network inside a cluster as free. Here each local prefill instance sends over a
path of its own at the fabric's rate R, which bounds Lambda_max like any stage, the bottleneck
"fabric":

    Th_fabric  = N_p R / S_kv(l_short)

The paper puts mean lengths into T: T(E[l]), "paper" below. A queue sees E[T(l)], which is larger
wherever T is convex, so "exact" has E[T_prfaas | l > t], E[T_pd | l <= t], E[S_kv | l > t] and
L_out - 1 decode steps, since prefill computes the first token.

With ``reserve_first`` a decode slot is held through prefill and transfer too, and T_decode L_out
becomes T_decode L_out + p (T_prfaas + exposed transfer + hops) + (1 - p) (T_pd + exposed transfer),
each at the mean length or in the mean; waits are not in it, so that Lambda_max is an upper bound.

With a cached prefix T is T_prefill(new, cached) and S_kv what has to move: the growing part of the
new tokens, the window and the whole fixed state.

Several clusters: each PrfaaS cluster j has its own egress, each PD cluster i its own ingress, any
may send to any, and requests are spread over the PD clusters as they can carry them:

    Th_prfaas  = sum_j min(N_j / T_j(l_long), B_j / S_kv(l_long))
    lambda_i   = min(N_p,i min(1 / T_i(l_short), R / S_kv(l_short)) / (1-p),
                     N_d,i BS_max / (T_decode L_out), B_i / (S_kv(l_long) p))
    Lambda_max = min(Th_prfaas / p, sum_i lambda_i)

Times in seconds, sizes in bytes, rates in requests a second over the whole deployment.
"""

from harness.throughput.limits import left_out
from harness.throughput.model import DeploymentModel, deployment_model
from harness.throughput.rates import DEFAULT_OBJECTIVE, OBJECTIVES, Objective, StageRates
from harness.throughput.search import Grid, capacity_grid, solve

__all__ = [
    "DEFAULT_OBJECTIVE",
    "OBJECTIVES",
    "DeploymentModel",
    "Grid",
    "Objective",
    "StageRates",
    "capacity_grid",
    "deployment_model",
    "left_out",
    "solve",
]

"""A plan's figures in words: the stages, the units that people read, and the answer in sentences.

Everything is taken from the planner's document (``harness.planning.plan``), whose units are bytes,
seconds and requests a second.
"""

from collections.abc import Iterable
from typing import Any

from harness.phrases import percent
from harness.planning.variants import BASELINE, OFFLOADING

STAGES = {
    "prfaas_prefill": "PrfaaS prefill",
    "pd_prefill": "PD prefill",
    "pd_decode": "PD decode",
    "link": "link",
    "fabric": "fabric",
}
GBIT_BYTES = 1e9 / 8
_TERA = 1e12 / 8
#: Lambda_max by either set of equations.
THROUGHPUT = {"paper": "throughput_req_per_s", "exact": "throughput_exact_req_per_s"}


def instances(plan: dict[str, Any]) -> str:
    """N_prfaas / N_p / N_d as Table 6 writes them; "+" between clusters, a dash for none."""
    roles = (_counts(plan, role) for role in ("prfaas", "prefill", "decode"))
    return "/".join("+".join(map(str, counts)) or "-" for counts in roles)


def _counts(plan: dict[str, Any], role: str) -> list[int]:
    """Instances of a role ("prfaas", "prefill", "decode") in each cluster that has them."""
    more = plan["more_prfaas"] if role == "prfaas" else plan["more_pd"]
    key = "num_instances" if role == "prfaas" else f"num_{role}"
    return [count for count in (plan[f"num_{role}"], *(one[key] for one in more)) if count]


def tokens_text(tokens: float | None) -> str | None:
    """A number of tokens, thousands apart."""
    return None if tokens is None else f"{tokens:,.0f}"


def length_text(tokens: int) -> str:
    """A prompt length as the field names it: 32K for 32,768."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def rate_text(bytes_per_s: float) -> str:
    """A rate of bytes in decimal bits."""
    if bytes_per_s >= _TERA:
        return f"{bytes_per_s / _TERA:.3g} Tbit/s"
    return f"{bytes_per_s / GBIT_BYTES:.3g} Gbit/s"


def share_text(share: float) -> str:
    """A round share in percent."""
    return f"{100 * share:.3g} %"


def value_text(value: float, unit: str) -> str:
    """A value of an input with its unit, as a person would give it."""
    if unit == "bytes/s":
        return rate_text(value)
    if unit == "share":
        return share_text(value)
    if unit == "s":
        return f"{1e3 * value:.4g} ms"
    if unit == "times":
        return f"x {value:.3g}"
    if unit == "ln tokens":
        return f"{value:.4g}"
    return f"{value:,.4g} {unit}".rstrip()


def listed(parts: Iterable[str]) -> str:
    """Words with commas and an "and"."""
    words = list(parts)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + f" and {words[-1]}"


def link_bytes_per_s(document: dict[str, Any], deployment: dict[str, Any]) -> float:
    """The rate of all links out of a deployment's PrfaaS clusters; the first has the scenario's."""
    more = sum(one["link_bytes_per_s"] for one in deployment["more_prfaas"])
    return float(document["link_bytes_per_s"] + more)


def main_name(document: dict[str, Any]) -> str:
    """The deployment that the answer is about."""
    names = document["deployments"]
    return OFFLOADING if OFFLOADING in names else str(next(iter(names)))


def answer(document: dict[str, Any]) -> tuple[str, ...]:
    """What the plan is and how far it carries, a sentence each: plan, bottleneck and link, what
    the paper's equations leave out, and TTFT at the scenario's load."""
    return (
        _plan_sentence(document),
        _bottleneck_sentence(document),
        _exact_sentence(document),
        _ttft_sentence(document),
    )


def is_sound(document: dict[str, Any]) -> bool:
    """Whether the plan answered about carries the scenario's load and no less than the other
    deployments, and its link does not hold it back."""
    deployments, key = document["deployments"], THROUGHPUT[document["objective"]]
    one = deployments[main_name(document)]
    return bool(
        document["rate_req_per_s"] < one["throughput_exact_req_per_s"]
        and one[key] >= max(each[key] for each in deployments.values())
        and _needed_bytes_per_s(document) <= document["link_bytes_per_s"]
        and one["bottleneck"] != "link"
    )


def _needed_bytes_per_s(document: dict[str, Any]) -> float:
    """The rate of the scenario's link from which on it holds no plan back; 0: any rate."""
    sweeps = document["sweeps"]
    return sweeps["bandwidth"]["hard_limit_bytes_per_s"] if sweeps is not None else 0.0


def _plan_sentence(document: dict[str, Any]) -> str:
    name, key = main_name(document), THROUGHPUT[document["objective"]]
    one = document["deployments"][name]
    roles = (("prfaas", "PrfaaS"), ("prefill", "prefill"), ("decode", "decode"))
    counts = [f"{sum(_counts(one, role))} {words}" for role, words in roles if _counts(one, role)]
    offloads = ""
    if one["threshold_tokens"] is not None:
        offloads = (
            f", prompts of more than {tokens_text(one['threshold_tokens'])} uncached tokens "
            f"offloaded ({percent(one['offload_fraction'], sign=False)} of them)"
        )
    others = [
        f"{one[key] / other[key]:.2f} times {other_name} "
        f"({instances(other)}, {other[key]:.2f} req/s)"
        for other_name, other in document["deployments"].items()
        if other_name != name
    ]
    compared = f": {listed(others)}" if others else ""
    return (
        f"{name} carries at most {one[key]:.2f} req/s by the {document['objective']} equations, "
        f"with {listed(counts)} instances{offloads}{compared}."
    )


def _bottleneck_sentence(document: dict[str, Any]) -> str:
    one = document["deployments"][main_name(document)]
    stage = STAGES[one["bottleneck"]]
    egress = one["egress_bytes_per_s"]
    if egress is None:
        return f"Its bottleneck by the exact equations is {stage}; nothing crosses a link."
    link, needed = link_bytes_per_s(document, one), _needed_bytes_per_s(document)
    if document["link_bytes_per_s"] < needed:
        verdict = f"the link holds every plan back; it would take {rate_text(needed)}"
    elif one["bottleneck"] == "link":
        verdict = "the link carries no more"
    else:
        verdict = "the link carries it"
        verdict += f", and would down to {rate_text(needed)}" if needed > 0 else ""
    return (
        f"Its bottleneck by the exact equations is {stage}. At its most it sends "
        f"{rate_text(egress)} of the {rate_text(link)} there are: {verdict}."
    )


def _exact_sentence(document: dict[str, Any]) -> str:
    """The paper puts mean lengths into T; a queue sees mean times."""
    one = document["deployments"][main_name(document)]
    paper, exact = one["throughput_req_per_s"], one["throughput_exact_req_per_s"]
    best = one["exact_optimum"]
    text = (
        f"The paper's equations take T at the mean length: {paper:.2f} req/s. With mean service "
        f"times, E[T(l)], the same plan carries {exact:.2f} req/s ({percent(exact / paper - 1)})"
    )
    if instances(best) == instances(one) and best["threshold_tokens"] == one["threshold_tokens"]:
        return f"{text}, and no other plan carries more."
    threshold = tokens_text(best["threshold_tokens"])
    at = f" at t = {threshold}" if threshold is not None else ""
    return (
        f"{text}; the best plan by them, {instances(best)}{at}, carries "
        f"{best['throughput_exact_req_per_s']:.2f} req/s."
    )


def _ttft_sentence(document: dict[str, Any]) -> str:
    parts = []
    for name in dict.fromkeys((main_name(document), BASELINE)):
        one = document["deployments"].get(name)
        if one is None:
            continue
        loaded_s, service_s = (one["ttft"][f"{kind}ttft_mean_s"] for kind in ("", "service_"))
        loaded = "without bound" if loaded_s is None else f"{loaded_s:.2f} s"
        parts.append(f"{loaded} with {name}, of which service alone is {service_s:.2f} s")
    return (
        f"At the scenario's load of {document['rate_req_per_s']:g} req/s mean TTFT with queueing "
        f"is {listed(parts)}; the paper's TTFTs hold no queueing."
    )

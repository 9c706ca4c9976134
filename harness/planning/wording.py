"""A plan's figures in words: the stages, the units that people read, and the answer in sentences.

Everything is taken from the planner's document (``harness.planning.plan``), whose units are bytes,
seconds and requests a second.
"""

from collections.abc import Iterable
from typing import Any

from harness.phrases import percent
from harness.planning.variants import OFFLOADING

STAGES = {
    "prfaas_prefill": "PrfaaS prefill",
    "pd_prefill": "PD prefill",
    "pd_decode": "PD decode",
    "link": "link",
    "fabric": "fabric",
}
GBIT_BYTES = 1e9 / 8
_TERA = 1e12 / 8
#: Plans whose Lambda_max differ by less, as a share, carry the same.
_SAME = 1e-6
_PLAN_KEYS = (
    "threshold_tokens",
    "num_prfaas",
    "num_prefill",
    "num_decode",
    "more_prfaas",
    "more_pd",
)
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
    """What the plan is and how far it carries, a sentence or two each: plan, bottleneck and link,
    what the paper's equations leave out, and TTFT at the scenario's load."""
    return (
        _plan_sentence(document),
        _bottleneck_sentence(document),
        _exact_sentence(document),
        _ttft_sentence(document),
    )


def planned_by(document: dict[str, Any]) -> str:
    """Where threshold and split come from."""
    if document["kept"]:
        return "the scenario's own threshold and splits"
    return f"searched by the {document['objective']} equations"


def limit_text(document: dict[str, Any]) -> str | None:
    """From which rate of the scenario's link on more of it gives the best plan nothing; None where
    no plan was searched over the link's rate. Said of the link, or of what a search finds."""
    sweeps = document["sweeps"]
    if sweeps is None:
        return None
    limit = sweeps["bandwidth"]["hard_limit_bytes_per_s"]
    if limit is None:
        return "more of it always carries more, since a reserved slot is held through the transfer"
    if limit <= 0:
        return f"no limit: the best plan of {OFFLOADING} sends nothing across the link"
    one = document["deployments"][OFFLOADING]
    kept = ", further links as they are" if one["more_prfaas"] or one["more_pd"] else ""
    return (
        f"with link.rate below {rate_text(limit)} no threshold and split of {OFFLOADING} carries "
        f"what it does with more{kept}"
    )


def accuracy_lines(document: dict[str, Any]) -> tuple[str, ...]:
    """How far each TTFT at the scenario's load is from simulation, or that it is not known."""
    promised: dict[float, list[str]] = {}
    minded: dict[str, list[str]] = {}
    deployments = document["deployments"]
    for name, one in deployments.items():
        accuracy = one["ttft"]["accuracy"]
        if accuracy["note"] is None:
            promised.setdefault(accuracy["promised"], []).append(name)
        else:
            minded.setdefault(accuracy["note"], []).append(name)
    lines = []
    for promise, names in promised.items():
        found = {name: deployments[name]["ttft"]["accuracy"] for name in names}
        errors = [one["measured"] for one in found.values()]
        mean, p99 = (max(one[key] for one in errors) for key in ("mean", "p99"))
        low = min(one["measured_loads"][0] for one in found.values())
        high = max(one["measured_loads"][1] for one in found.values())
        loads = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
        lighter = [
            name
            for name, one in found.items()
            if deployments[name]["ttft"]["load"] < one["measured_loads"][0]
        ]
        below = f" ({listed(lighter)} at less, where nothing was measured)" if lighter else ""
        lines.append(
            f"TTFT of {listed(names)}: in simulation of the paper's case study at {loads} load"
            f"{below} the mean was within {mean:.1%}, P99 within {p99:.1%}; promised is "
            f"{promise:.0%} of the mean."
        )
    lines += [f"TTFT of {listed(names)}: {note}" for note, names in minded.items()]
    return tuple(lines)


def as_planned_lines(document: dict[str, Any]) -> tuple[str, ...]:
    """What the scenario's own plan carries, and its TTFT, where the one found is another."""
    lines = []
    for name, one in document["deployments"].items():
        own = one["as_planned"]
        if all(own[key] == one[key] for key in _PLAN_KEYS):
            continue
        at = "" if own["threshold_tokens"] is None else f" at t = {own['threshold_tokens']:,}"
        ttft_s = own["ttft"]["ttft_mean_s"]
        ttft = "no TTFT at that load" if ttft_s is None else f"mean TTFT {ttft_s:.2f} s"
        lines.append(
            f"{name} as the scenario plans it, {instances(own)}{at}: "
            f"{own['throughput_req_per_s']:.2f} req/s by the paper equations, "
            f"{own['throughput_exact_req_per_s']:.2f} by the exact ones, {ttft}"
        )
    return tuple(lines)


def is_sound(document: dict[str, Any]) -> bool:
    """Whether the plan answered about carries the scenario's load and no less than the other
    deployments, and its link does not hold it back."""
    deployments, key = document["deployments"], THROUGHPUT[document["objective"]]
    one = deployments[main_name(document)]
    return bool(
        document["rate_req_per_s"] < one["throughput_exact_req_per_s"]
        and one[key] >= max(each[key] for each in deployments.values())
        and _limit_bytes_per_s(document) <= document["link_bytes_per_s"]
        and one["bottleneck"] != "link"
    )


def _limit_bytes_per_s(document: dict[str, Any]) -> float:
    """The rate of the scenario's link from which on the best plan gains nothing; 0: any rate."""
    sweeps = document["sweeps"]
    limit = sweeps["bandwidth"]["hard_limit_bytes_per_s"] if sweeps is not None else None
    return limit or 0.0


def _plan_sentence(document: dict[str, Any]) -> str:
    name, key = main_name(document), THROUGHPUT[document["objective"]]
    one = document["deployments"][name]
    roles = (("prfaas", "PrfaaS"), ("prefill", "prefill"), ("decode", "decode"))
    counts = [f"{sum(_counts(one, role))} {words}" for role, words in roles if _counts(one, role)]
    others = [
        f"{one[key] / other[key]:.2f} times {other_name} "
        f"({instances(other)}, {other[key]:.2f} req/s)"
        for other_name, other in document["deployments"].items()
        if other_name != name
    ]
    compared = f": {listed(others)}" if others else ""
    kept = " as the scenario plans it" if document["kept"] else ""
    return (
        f"{name} carries at most {one[key]:.2f} req/s by the {document['objective']} equations"
        f"{kept}, with {listed(counts)} instances{_offloads(one)}{compared}."
    )


def _offloads(plan: dict[str, Any]) -> str:
    """What crosses, where there is a choice."""
    threshold, share = plan["threshold_tokens"], plan["offload_fraction"]
    if threshold is None:
        return ""
    if share == 0:
        return ", no prompt offloaded"
    if threshold == 0 or not plan["num_prefill"]:
        return ", every prompt offloaded"
    return (
        f", prompts of more than {tokens_text(threshold)} uncached tokens offloaded "
        f"({percent(share, sign=False)} of them)"
    )


def _bottleneck_sentence(document: dict[str, Any]) -> str:
    one = document["deployments"][main_name(document)]
    bottleneck = f"Its bottleneck by the {document['objective']} equations is "
    bottleneck += STAGES[one["bottleneck"]]
    egress = one["egress_bytes_per_s"]
    if egress is None:
        return f"{bottleneck}; nothing crosses a link."
    link, limit = link_bytes_per_s(document, one), limit_text(document)
    carries = "the link carries no more" if one["bottleneck"] == "link" else "the link carries it"
    sentence = (
        f"{bottleneck}. At its most it sends {rate_text(egress)} of the {rate_text(link)} there "
        f"are: {carries}."
    )
    return sentence if limit is None else f"{sentence} Searched anew, {limit}."


def _exact_sentence(document: dict[str, Any]) -> str:
    """The paper puts mean lengths into T; a queue sees mean times."""
    one = document["deployments"][main_name(document)]
    paper, exact = one["throughput_req_per_s"], one["throughput_exact_req_per_s"]
    best = one["exact_optimum"]
    text = (
        f"The paper's equations take T at the mean length: {paper:.2f} req/s. With mean service "
        f"times, E[T(l)], the same plan carries {exact:.2f} req/s ({percent(exact / paper - 1)})"
    )
    if best["throughput_exact_req_per_s"] <= exact * (1 + _SAME):
        return f"{text}, and no other division of its instances carries more."
    threshold = tokens_text(best["threshold_tokens"])
    at = f" at t = {threshold}" if threshold is not None else ""
    return (
        f"{text}; the best plan by them, {instances(best)}{at}, carries "
        f"{best['throughput_exact_req_per_s']:.2f} req/s."
    )


def _ttft_sentence(document: dict[str, Any]) -> str:
    known, overloaded = [], []
    for name, one in document["deployments"].items():
        loaded_s, service_s = (one["ttft"][f"{kind}ttft_mean_s"] for kind in ("", "service_"))
        if loaded_s is None:
            stage = STAGES.get(one["ttft"]["unstable_stage"], "a stage")
            overloaded.append(f"{name} ({stage} at {one['ttft']['load']:.0%})")
        else:
            known.append(f"{loaded_s:.2f} s with {name} (service alone {service_s:.2f} s)")
    at = f"At the scenario's load of {document['rate_req_per_s']:g} req/s"
    sentences = []
    if known:
        sentences.append(
            f"{at} mean TTFT with queueing is {listed(known)}; the paper's TTFTs hold no queueing."
        )
    if overloaded:
        at = "That load" if known else at.replace("At the", "The", 1)
        sentences.append(
            f"{at} is more than {listed(overloaded)} can serve: queues grow without bound, and "
            "there is no TTFT."
        )
    return " ".join(sentences)

"""Scenario files that the project writes: another file's tables with a plan, or with servers.

The document is the file's own TOML with ``--set`` laid over it, so that quantities stay as people
wrote them; what changes is its deployments, its attached servers, and paths, which are relative to
the file that holds them. Comments of the file are not kept; new ones say where numbers are from.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.deployment import Deployment
from harness.planning.plan import Plan
from harness.record.run_directory import write_atomically
from harness.scenario import Scenario
from harness.scenario_file import read_scenario_document

#: Keys that are paths relative to the file; "*" is any name.
PATHS = (
    ("model", "architecture"),
    ("hardware", "*", "profile"),
    ("workload", "trace"),
    ("link", "file"),
    ("link", "schedule"),
    ("gateway", "tokenizer"),
    ("gateway", "api_key_file"),
    ("engine", "model_path"),
    ("engine", "python"),
    ("engine", "compute"),
)
_BARE = re.compile(r"[A-Za-z0-9_-]+")
Comments = Mapping[tuple[str, ...], Sequence[str]]


def emit_plan(plan: Plan, settings: Sequence[str], target: Path) -> None:
    """Write the plan's scenario with what was solved as its deployments, a complete file."""
    scenario = plan.scenario
    document, _ = read_scenario_document(scenario.path, settings)
    document = rebased(document, scenario.path.parent, target.parent)
    document["name"] = scenario.name
    comments: dict[tuple[str, ...], list[str]] = {
        ("hardware", name): list(_provenance(scenario, name)) for name in scenario.hardware
    }
    comments[()] = [
        f"Written by prfaas plan from {scenario.path.name}, solved by the {plan.objective} "
        "equations: modelled, and as good as the profiles named below."
    ]
    for name, solved in plan.solved.items():
        document["deployments"][name] = _table(document["deployments"][name], solved.deployment)
        model = solved.model
        comments["deployments", name] = [
            f"Modelled: {model.lambda_max_req_per_s:.4g} req/s with T(E[l]), "
            f"{model.lambda_max_exact_req_per_s:.4g} with E[T(l)]. "
            f"Given was {_split(scenario.deployments[name])}."
        ]
    write_atomically(target, toml_text(document, comments).encode())


def emit_attached(
    scenario: Scenario,
    settings: Sequence[str],
    attach: Mapping[str, Any],
    name: str,
    target: Path,
) -> None:
    """Write the scenario of one deployment alone, attached to the servers of ``attach``."""
    document, _ = read_scenario_document(scenario.path, settings)
    document = rebased(document, scenario.path.parent, target.parent)
    document["name"] = f"{scenario.name}-{name}"[:64]
    given = document["deployments"][name]
    document["deployments"] = {name: _table(given, scenario.deployments[name])}
    # What would be launched is on the nodes, and need not be where the gateway is.
    kept = {k: v for k, v in document["engine"].items() if k not in ("model_path", "python")}
    document["engine"] = {**kept, "attach": dict(attach)}
    comments: Comments = {
        (): [
            f"Written by prfaas bench --dry-run from {scenario.path.name}: the deployment {name} "
            "on servers that run already."
        ]
    }
    write_atomically(target, toml_text(document, comments).encode())


def rebased(document: Mapping[str, Any], source: Path, target: Path) -> dict[str, Any]:
    """A copy whose relative paths mean in folder ``target`` what they meant in ``source``."""
    copy: dict[str, Any] = json.loads(json.dumps(document))
    for steps in PATHS:
        for table, key in _places(copy, steps):
            path = table[key]
            if not isinstance(path, str) or os.path.isabs(path):
                continue
            if steps == ("engine", "python") and "/" not in path:
                continue  # a name, which PATH finds
            table[key] = os.path.relpath(source.absolute() / path, target.absolute())
    return copy


def toml_text(document: Mapping[str, Any], comments: Comments) -> str:
    """``document`` as TOML; ``comments`` by the table that they stand above."""
    return "\n".join(_table_lines(document, (), comments)).lstrip("\n") + "\n"


def _table_lines(
    table: Mapping[str, Any], at: tuple[str, ...], comments: Comments
) -> Iterator[str]:
    yield from (f"# {line}" for line in comments.get(at, ()))
    inner = {}
    for key, value in table.items():
        if isinstance(value, dict) or _is_tables(value):
            inner[key] = value
        else:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in inner.items():
        place = (*at, key)
        dotted = ".".join(map(_key, place))
        if isinstance(value, dict):
            lines = list(_table_lines(value, place, comments))
            told = len(comments.get(place, ()))
            # A table that holds tables alone needs no head of its own.
            bare = bool(lines) and not told and lines[0] == ""
            yield from lines if bare else ("", *lines[:told], f"[{dotted}]", *lines[told:])
        else:
            for one in value:
                yield from ("", f"[[{dotted}]]", *_table_lines(one, place, {}))


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _quoted(key)


def _quoted(text: str) -> str:
    """A basic string; JSON's escapes are TOML's, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _places(document: Any, steps: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each table that has the key, and the key."""
    if not isinstance(document, dict):
        return
    first, rest = steps[0], steps[1:]
    for key in list(document) if first == "*" else [first]:
        if key not in document:
            continue
        if rest:
            yield from _places(document[key], rest)
        else:
            yield document, key


def _table(given: Mapping[str, Any], solved: Deployment) -> dict[str, Any]:
    """The deployment's table with the threshold and the splits of ``solved``."""
    table = {key: value for key, value in given.items() if key != "threshold_tokens"}
    if solved.threshold_tokens is not None and solved.num_prefill:
        table = {"threshold_tokens": solved.threshold_tokens, **table}
    table["num_prefill"], table["num_decode"] = solved.num_prefill, solved.num_decode
    if solved.more_pd:
        table["more_pd"] = [
            {**own, "num_prefill": one.num_prefill, "num_decode": one.num_decode}
            for own, one in zip(given["more_pd"], solved.more_pd, strict=True)
        ]
    return table


def _provenance(scenario: Scenario, name: str) -> Iterator[str]:
    profile = scenario.hardware[name].profile
    points = Counter(point.provenance for point in profile.prefill_points)
    told = ", ".join(f"{count} {kind}" for kind, count in points.most_common())
    yield (
        f"{profile.name}: {profile.engine_name} {profile.engine_version} on {profile.hardware}; "
        f"prefill points: {told}."
    )
    if profile.decode_points:
        steps = Counter(point.provenance for point in profile.decode_points)
        told = ", ".join(f"{count} {kind}" for kind, count in steps.most_common())
        yield f"decode points: {told}; largest batch {profile.decode_max_batch_provenance}."


def _split(deployment: Deployment) -> str:
    counts = (deployment.num_prfaas, deployment.num_prefill, deployment.num_decode)
    t = deployment.threshold_tokens
    return "/".join(map(str, counts)) + ("" if t is None else f" at {t} tokens")

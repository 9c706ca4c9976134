"""``prfaas profile``: measure an engine and write its profile, samples and page."""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import ScenarioError
from harness.verbs.output import check_output_folder
from harness.verbs.profile_reference import add_reference, reference_target

if TYPE_CHECKING:
    from harness.profiler.asked import Settings
    from harness.profiler.target import Target

DEFAULT_BUDGET, DEFAULT_INTERVAL = "20min", "2%"
#: The variable that holds the engine's key, so that it stands in no argument list.
KEY_VARIABLE = "PRFAAS_ENGINE_KEY"


def add_measure(parser: argparse.ArgumentParser) -> None:
    """Options of measuring."""
    where = parser.add_argument_group("what is measured")
    where.add_argument("--url", metavar="URL", help="a server that prefills and decodes")
    where.add_argument("--prefill-url", metavar="URL", help="of a disaggregated pair")
    where.add_argument("--decode-url", metavar="URL", help="of a disaggregated pair")
    where.add_argument(
        "--bootstrap-port", type=int, metavar="N", help="default: what the prefill tells"
    )
    where.add_argument("--kind", choices=("sglang", "openai"), default="sglang")
    where.add_argument("--engine", choices=tuple(ENGINES), help="start one instead")
    where.add_argument("--scenario", type=Path, metavar="FILE", help="of the emulated engine")
    where.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    where.add_argument("--noise-cv", type=float, default=0.0, metavar="X", help="emulated: spread")
    described = parser.add_argument_group("what it is")
    described.add_argument("--model-architecture", type=Path, metavar="FILE")
    described.add_argument("--hardware", metavar="TEXT", help='such as "8xH200"; emulated: a name')
    described.add_argument("--gpus", type=int, metavar="N", help="GPUs an instance")
    how = parser.add_argument_group("how")
    how.add_argument("--out", type=Path, default=Path("profiles"), metavar="FOLDER")
    how.add_argument("--budget", default=DEFAULT_BUDGET, metavar="TIME", help="default %(default)s")
    how.add_argument(
        "--interval",
        default=DEFAULT_INTERVAL,
        metavar="X%",
        help="half width of each 95%% interval (default "
        + DEFAULT_INTERVAL.replace("%", "%%")
        + ")",
    )
    how.add_argument("--lengths", type=_several, default=(), metavar="N,N,...", help="prefill")
    how.add_argument("--cached", type=_several, metavar="N,N,...", help="prefixes; 0: none")
    how.add_argument("--batches", type=_several, default=(), metavar="N,N,...", help="decode")
    how.add_argument("--contexts", type=_several, default=(), metavar="N,N,...", help="decode")
    how.add_argument("--no-decode", action="store_true", help="a profile of prefill only")
    how.add_argument("--slo-tpot", metavar="TIME", help="for BS_max, such as 25ms")
    how.add_argument("--token-ids", metavar="LOW:HIGH", help="ids that prompts are made of")
    how.add_argument("--capture", action="store_true", help="also when KV is released")
    how.add_argument("--seed", type=int, default=1, metavar="N")
    how.add_argument("--request-timeout", default="10min", metavar="TIME")
    add_reference(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.set_defaults(call=_measure)


def _several(text: str) -> tuple[int, ...]:
    """Whole numbers, ascending; argparse puts this function's name into its message."""
    return tuple(sorted({int(part) for part in text.split(",")}))


def _measure(options: argparse.Namespace) -> int:
    import asyncio  # a tenth of a second that no other verb needs

    from harness.profiler.display import ProfileConsole, write_page
    from harness.profiler.session import measure

    open_target, settings = _chosen(options)
    check_output_folder(options.out, "--out")
    options.out.mkdir(parents=True, exist_ok=True)

    with ProfileConsole(settings.budget_s) as console:

        async def run() -> Any:
            async with open_target() as target:
                return await measure(target, settings, console.progress)

        try:
            measured = asyncio.run(run())
        except KeyboardInterrupt:
            print(
                "prfaas: interrupted; the samples are kept, and the same command goes on",
                file=sys.stderr,
            )
            raise
    page = write_page(measured.file, measured.path.with_suffix(".html"))
    console.show(measured.file)
    console.say(f"profile: {measured.path}; page: {page}")
    if options.json:
        told = measured.file.model_dump(mode="json")
        print(json.dumps({"file": str(measured.path), "is_whole": measured.is_whole, **told}))
    return 0 if measured.is_whole else 1


Opening = Callable[[], AbstractAsyncContextManager["Target"]]


def _chosen(options: argparse.Namespace) -> tuple[Opening, "Settings"]:
    """The target that the options describe and what is asked of it; ScenarioError."""
    pair = options.prefill_url is not None or options.decode_url is not None
    chosen = [options.url is not None, pair, options.engine is not None]
    if sum(chosen) != 1:
        raise ScenarioError(
            "Say what is to be measured: --url of a server, --prefill-url and --decode-url of a "
            "pair, --engine emulated with --scenario, or --engine reference with --compute."
        )
    if options.engine is not None:
        return ENGINES[options.engine](options)
    if pair and None in (options.prefill_url, options.decode_url):
        raise ScenarioError("A pair has two servers: give --prefill-url and --decode-url.")
    if pair and options.kind != "sglang":
        raise ScenarioError("A pair speaks SGLang's protocol: --kind openai is of one server.")
    return _served(options)


def _served(options: argparse.Namespace) -> tuple[Opening, "Settings"]:
    """Servers that run already."""
    from harness.architecture import load_architecture
    from harness.profiler.asked import Settings

    for name in ("model_architecture", "hardware", "gpus"):
        if getattr(options, name) is None:
            raise ScenarioError(f"--{name.replace('_', '-')} is needed with a server's URL.")
    if options.noise_cv or options.scenario is not None:
        raise ScenarioError("--noise-cv and --scenario are of --engine emulated.")
    settings = Settings(
        architecture=load_architecture(options.model_architecture),
        hardware=options.hardware,
        gpus=options.gpus,
        slo_tpot_s=None if options.slo_tpot is None else _duration_s("slo-tpot", options.slo_tpot),
        **_how(options),
    )

    @asynccontextmanager
    async def open_target() -> AsyncIterator["Target"]:
        from harness.profiler.probe import Probe, open_session
        from harness.profiler.target import Pair, Single

        timeout_s = _duration_s("request-timeout", options.request_timeout)
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with open_session(headers) as session:

            def probe(url: str) -> Probe:
                return Probe(session, url, options.kind, timeout_s)

            if options.url is not None:
                yield Single(probe(options.url), options.kind)
            else:
                prefill, decode = probe(options.prefill_url), probe(options.decode_url)
                yield Pair(prefill, decode, options.bootstrap_port)

    return open_target, settings


def _emulated(options: argparse.Namespace) -> tuple[Opening, "Settings"]:
    """A worker of our own with the costs of a scenario's hardware."""
    from harness.profiler.asked import Settings
    from harness.profiler.emulation import Emulation, emulated_pair
    from harness.scenario import load_scenario

    if options.scenario is None:
        raise ScenarioError("--engine emulated needs --scenario FILE, which holds its costs.")
    scenario = load_scenario(options.scenario, options.set)
    name = options.hardware or next(iter(scenario.hardware))
    if name not in scenario.hardware:
        known = ", ".join(scenario.hardware)
        raise ScenarioError(f"--hardware {name}: the scenario's hardware is {known}.")
    if not options.noise_cv >= 0:
        raise ScenarioError(f"--noise-cv {options.noise_cv}: a number from 0 is needed.")
    profile = scenario.hardware[name].profile
    slo_s = scenario.slo.tpot_s
    settings = Settings(
        architecture=scenario.model.architecture,
        hardware=profile.hardware,
        gpus=profile.gpus_per_instance,
        slo_tpot_s=slo_s if options.slo_tpot is None else _duration_s("slo-tpot", options.slo_tpot),
        limit_tokens=profile.covered_tokens[1],
        noise_cv=options.noise_cv,
        is_emulated=True,
        identity={"costs_sha256": hashlib.sha256(profile.path.read_bytes()).hexdigest()},
        **_how(options),
    )
    timeout_s = _duration_s("request-timeout", options.request_timeout)
    given = Emulation(scenario, name, options.noise_cv, options.seed, options.capture)
    return lambda: emulated_pair(given, timeout_s), settings


def _reference(options: argparse.Namespace) -> tuple[Opening, "Settings"]:
    """A worker of our own that computes."""
    slo_s = None if options.slo_tpot is None else _duration_s("slo-tpot", options.slo_tpot)
    timeout_s = _duration_s("request-timeout", options.request_timeout)
    return reference_target(options, _how(options), slo_s, timeout_s)


#: Engines that are started to be measured.
ENGINES: dict[str, Callable[[argparse.Namespace], tuple[Opening, "Settings"]]] = {
    "emulated": _emulated,
    "reference": _reference,
}


def _how(options: argparse.Namespace) -> dict[str, Any]:
    """What every kind of target takes."""
    from netem.units import parse_fraction

    try:
        bound = parse_fraction(options.interval)
    except ValueError as error:
        raise ScenarioError(f"--interval: {error}") from error
    if not 0 < bound < 1:
        raise ScenarioError(f"--interval {options.interval}: between 0 and 100% is needed.")
    for name in ("lengths", "batches", "contexts"):
        if any(one < 1 for one in getattr(options, name)):
            raise ScenarioError(f"--{name}: numbers from 1 are needed.")
    return {
        "out": options.out,
        "bound": bound,
        "budget_s": _duration_s("budget", options.budget),
        "seed": options.seed,
        "lengths": options.lengths,
        "cached": options.cached,
        "batches": options.batches,
        "contexts": options.contexts,
        "wants_capture": options.capture,
        "wants_decode": not options.no_decode,
        "token_ids": _token_ids(options.token_ids),
    }


def _token_ids(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise ScenarioError(f"--token-ids {text!r} is not LOW:HIGH, such as 1000:30000.")
    return int(low), int(high)


def _duration_s(flag: str, text: str) -> float:
    from netem.units import parse_duration_s

    try:
        return parse_duration_s(text)
    except ValueError as error:
        raise ScenarioError(f"--{flag}: {error}") from error

"""``prfaas profile import``: tables, published rates and aiconfigurator as profile files."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import ScenarioError
from harness.verbs.output import check_output_file

if TYPE_CHECKING:
    from harness.profile import PrefillPoint
    from harness.profile_import.calibration import Calibration
    from harness.profile_import.document import DecodeCosts, Description


def add_import(actions: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """``import`` and its sources."""
    importers = actions.add_parser("import", help="write a profile file").add_subparsers(
        required=True, metavar="FROM"
    )
    _add_table(importers)
    _add_published(importers)
    _add_aiconfigurator(importers)


def _add_table(importers: Any) -> None:
    parser = importers.add_parser("table", help="a CSV or JSON table of points")
    parser.add_argument("prefill", type=Path, metavar="PREFILL", help="table of prefill points")
    parser.add_argument("--decode", type=Path, metavar="TABLE", help="table of decode points")
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="the model, as its architecture file says"
    )
    parser.add_argument("--hardware", required=True, metavar="TEXT", help='such as "8xH200"')
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs an instance")
    parser.add_argument("--engine", required=True, metavar="NAME")
    parser.add_argument("--engine-version", required=True, metavar="TEXT")
    kinds = ("published", "derived", "stand_in", "measured", "modelled")
    parser.add_argument(
        "--provenance", required=True, choices=kinds, help="how the points are known"
    )
    parser.add_argument("--source", required=True, metavar="TEXT", help="where they come from")
    parser.add_argument(
        "--max-batch", type=int, metavar="N", help="default: the largest batch of the table"
    )
    _add_pairs(parser, "--column", "OURS=THEIRS", "where the table has another column name")
    _add_pairs(parser, "--where", "COLUMN=VALUE", "read only the rows with this value")
    _add_calibrate(parser)
    _add_output(parser)
    parser.set_defaults(call=_import_table)


def _add_published(importers: Any) -> None:
    parser = importers.add_parser("published", help="rates of the paper's Table 3 and a geometry")
    parser.add_argument("tables", type=Path, metavar="TABLES", help="such as paper-tables.json")
    parser.add_argument("--architecture", type=Path, required=True, metavar="FILE")
    _add_output(parser)
    parser.set_defaults(call=_import_published)


def _add_aiconfigurator(importers: Any) -> None:
    parser = importers.add_parser("aiconfigurator", help="NVIDIA's operator model (an extra)")
    parser.add_argument("--model", required=True, metavar="ID", help="a Hugging Face model id")
    parser.add_argument(
        "--as", dest="model_name", required=True, metavar="NAME",
        help="the same model, as its architecture file says",
    )  # fmt: skip
    parser.add_argument("--system", required=True, metavar="NAME", help="such as h200_sxm")
    parser.add_argument("--backend", default="sglang", metavar="NAME", help="default sglang")
    parser.add_argument(
        "--database", metavar="VERSION", help="of the operator data (default: the current one)"
    )
    for width, default, what in (
        ("tp", 8, "tensor parallel width"),
        ("pp", 1, "pipeline stages"),
        ("moe-tp", 1, "tensor parallel width of the experts"),
        ("moe-ep", 8, "expert parallel width"),
    ):
        parser.add_argument(
            f"--{width}",
            type=count,
            default=default,
            metavar="N",
            help=f"{what} (default {default})",
        )
    for grid, what in (
        ("new", "new tokens of a prefill"),
        ("cached", "cached tokens of a prefill, from 0"),
        ("batches", "decode batches"),
        ("contexts", "tokens of context of a decode step"),
    ):
        parser.add_argument(f"--{grid}", type=numbers, metavar="N,N,...", help=what)
    parser.add_argument("--no-decode", action="store_true", help="a profile of prefill only")
    _add_calibrate(parser)
    _add_output(parser)
    parser.set_defaults(call=_import_aiconfigurator)


def count(text: str) -> int:
    """A number from 1; argparse puts this function's name into its message."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def numbers(text: str) -> tuple[int, ...]:
    """Distinct whole numbers, ascending; argparse puts this function's name into its message."""
    return tuple(sorted({int(part) for part in text.split(",")}))


def _add_pairs(parser: argparse.ArgumentParser, flag: str, shape: str, what: str) -> None:
    parser.add_argument(
        flag, action="append", default=[], metavar=shape, help=f"{what} (repeatable)"
    )


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="TABLE",
        help="a table of measured prefill points: fit T = a + k x time to them and apply it",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.add_argument("--name", metavar="TEXT", help="default: the file's name")
    parser.add_argument("--notes", default="", metavar="TEXT", help="what a user should know")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def _check_output(options: argparse.Namespace) -> None:
    kept = None if options.force else "give another --output, or --force to replace it"
    check_output_file(options.output, "--output", kept=kept)


def _import_table(options: argparse.Namespace) -> int:
    _check_output(options)
    from harness.profile_import.document import DecodeCosts
    from harness.profile_import.tables import TableReading, read_decode_table, read_prefill_table

    reading = TableReading(
        options.provenance,
        options.source,
        _pairs("--column", options.column),
        _pairs("--where", options.where),
    )
    prefill = read_prefill_table(options.prefill, reading)
    decode = None
    if options.decode is not None:
        points = read_decode_table(options.decode, reading)
        largest = options.max_batch
        if largest is None:
            largest = max(point.batch for point in points)
        decode = DecodeCosts(largest, options.provenance, options.source, points)
    elif options.max_batch is not None:
        raise ScenarioError("--max-batch is of the decode side: give --decode TABLE too.")
    described = _description(
        options, options.model, options.hardware, options.gpus,
        (options.engine, options.engine_version),
    )  # fmt: skip
    return _write(options, described, prefill, decode, options.calibrate)


def _import_published(options: argparse.Namespace) -> int:
    _check_output(options)
    from harness.architecture import load_architecture
    from harness.profile_import.published import derive_prefill
    from harness.published import load_published

    published = load_published(options.tables)
    architecture = load_architecture(options.architecture)
    described = _description(
        options, architecture.name, published.hardware, published.gpus_per_instance,
        (published.engine_name, published.engine_version),
    )  # fmt: skip
    return _write(options, described, derive_prefill(published, architecture), None)


def _import_aiconfigurator(options: argparse.Namespace) -> int:
    _check_output(options)
    from harness.profile_import import aiconfigurator as tool

    tool.require_tool()
    database = options.database or tool.current_database(options.system, options.backend)
    target = tool.Target(
        options.model, options.system, options.backend, database,
        options.tp, options.pp, options.moe_tp, options.moe_ep,
    )  # fmt: skip
    prefill = tool.estimate_prefill(
        target, options.new or tool.NEW_TOKENS, options.cached or tool.CACHED_TOKENS
    )
    decode = None
    if not options.no_decode:
        decode = tool.estimate_decode(
            target, options.batches or tool.BATCHES, options.contexts or tool.CONTEXTS
        )
    gpu = options.system.partition("_")[0].upper()
    described = _description(
        options, options.model_name, f"{target.num_gpus}x{gpu}", target.num_gpus,
        (options.backend, database),
    )  # fmt: skip
    return _write(options, described, prefill, decode, options.calibrate)


def _description(
    options: argparse.Namespace, model: str, hardware: str, gpus: int, engine: tuple[str, str]
) -> "Description":
    from harness.profile_import.document import Description

    name = options.output.stem if options.name is None else options.name
    return Description(name, model, hardware, gpus, *engine, options.notes)


def _write(
    options: argparse.Namespace,
    described: "Description",
    prefill: tuple["PrefillPoint", ...],
    decode: "DecodeCosts | None",
    reference: Path | None = None,
) -> int:
    """Calibrate to ``reference`` where there is one, write the file and print what it holds."""
    from harness.profile_import.document import profile_document, write_profile

    calibration = None
    if reference is not None:
        from harness.profile_file import profile_of
        from harness.profile_import.calibration import calibrate

        measured = _reference(reference)
        raw = profile_of(profile_document(described, prefill, decode), options.output)
        prefill, found = calibrate(raw, measured, reference.name)
        calibration = _calibration_document(found, measured)
    file = profile_document(described, prefill, decode)
    write_profile(file, options.output, overwrite=options.force)
    print_profile(options.output, calibration, as_json=options.json)
    return 0


def _reference(path: Path) -> tuple["PrefillPoint", ...]:
    """A calibration's table, under the standard names of columns."""
    from harness.profile_import.tables import TableReading, read_prefill_table

    return read_prefill_table(path, TableReading("measured", path.name, {}, {}))


def _calibration_document(
    found: "Calibration", reference: tuple["PrefillPoint", ...]
) -> dict[str, Any]:
    return {
        "intercept_s": found.intercept_s,
        "slope": found.slope,
        "max_relative_error": found.max_relative_error,
        "residuals": [
            {
                "new_tokens": point.new_tokens,
                "cached_tokens": point.cached_tokens,
                "reference_s": point.prefill_s,
                "relative_error": residual,
            }
            for point, residual in zip(reference, found.residuals, strict=True)
        ],
    }


def print_profile(path: Path, calibration: dict[str, Any] | None, *, as_json: bool) -> None:
    """What ``show`` shows, and how an imported profile was calibrated."""
    from harness.profile_summary import profile_summary, summary_lines

    summary = profile_summary(path)
    if as_json:
        print(json.dumps(summary | {"calibration": calibration}, indent=2))
        return
    for line in summary_lines(summary):
        print(line)
    if calibration is not None:
        print(
            f"calibration: T = {calibration['intercept_s']:.4g} s + {calibration['slope']:.4g} x "
            f"time, within {calibration['max_relative_error']:.1%}"
        )
        for one in calibration["residuals"]:
            print(
                f"  {one['new_tokens']} new, {one['cached_tokens']} cached: "
                f"{one['relative_error']:+.1%} of {one['reference_s']:.4g} s"
            )


def _pairs(flag: str, given: list[str]) -> dict[str, str]:
    """``LEFT=RIGHT`` options as a mapping."""
    pairs = {}
    for text in given:
        left, separator, right = text.partition("=")
        if not (left and separator):
            raise ScenarioError(f"{flag} {text!r} is not a column, '=' and what it stands for.")
        pairs[left] = right
    return pairs

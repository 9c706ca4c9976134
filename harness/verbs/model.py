"""``prfaas model inspect``: what a model's layers hand over, from its config or our file."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.attention import DEFAULT_KV_DTYPE, KV_ELEMENT_BYTES, KvDtype
from harness.verbs.output import check_output_file

if TYPE_CHECKING:
    from rich.table import Table

    from harness.architecture import Architecture

#: Prompt lengths at which S_kv is shown, and their short names.
LENGTHS = {1024: "1K", 8192: "8K", 32_768: "32K", 131_072: "128K", 1_048_576: "1M"}


def add(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """The verb, its one action and that one's options."""
    parser = verbs.add_parser("model", help="inspect a model's KV geometry")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    inspect = actions.add_parser(
        "inspect", help="show layers and S_kv of a model; write an architecture file"
    )
    inspect.add_argument(
        "model",
        type=Path,
        metavar="PATH",
        help="an architecture file, a Hugging Face config.json or a folder that holds one",
    )
    inspect.add_argument(
        "--kv-dtype", choices=list(KV_ELEMENT_BYTES), help="show this KV dtype only"
    )
    inspect.add_argument(
        "--output", type=Path, metavar="FILE", help="write it as an architecture file, a new one"
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    inspect.set_defaults(call=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    if options.output is not None:
        check_output_file(options.output, "--output", kept="it is not overwritten: name a new file")
    found = _read(options.model, options.kv_dtype)
    if options.output is not None:
        _write(next(iter(found.values())), options.model, options.output)
    if options.json:
        print(json.dumps(_document(found), indent=2))
        return 0
    from rich.console import Console

    console = Console()
    console.print(_kinds_table(found))
    console.print(_lengths_table(found))
    if options.output is not None:
        print(f"written: {options.output}")
    return 0


def _read(path: Path, kv_dtype: KvDtype | None) -> "dict[KvDtype, Architecture]":
    """The model for the KV dtype asked for, else for each one that its file can tell of."""
    from harness.model_config import read_architecture

    if kv_dtype is not None:
        return {kv_dtype: read_architecture(path, kv_dtype)}
    first = read_architecture(path, DEFAULT_KV_DTYPE)
    found = {DEFAULT_KV_DTYPE: first}
    if len(first.attention) == len(first.kind_counts):  # no kind is given by its bytes
        found |= {other: read_architecture(path, other) for other in KV_ELEMENT_BYTES}
    return found


def _write(architecture: "Architecture", source: Path, output: Path) -> None:
    from harness.architecture import architecture_text
    from harness.record.run_directory import write_atomically

    notes = f"Written by prfaas model inspect from {source.name or architecture.name}."
    text = architecture_text(architecture, output.stem[:200], notes)
    write_atomically(output, text.encode())


def _document(found: "dict[KvDtype, Architecture]") -> dict[str, Any]:
    """The model as JSON. Bytes, per KV dtype; ``kv_bytes`` by prompt length in tokens."""
    one = next(iter(found.values()))
    by_dtype = {
        dtype: {layer.kind: asdict(layer) for layer in architecture.kind_counts}
        for dtype, architecture in found.items()
    }
    kinds = {}
    for layer, count in one.kind_counts.items():
        shape = one.attention.get(layer.kind)
        kinds[layer.kind] = {
            "count": count,
            "shape": None if shape is None else asdict(shape),
            "source": one.sources[layer.kind],
            "bytes": {
                dtype: _without_kind(layers[layer.kind]) for dtype, layers in by_dtype.items()
            },
        }
    return {
        "name": one.name,
        "path": str(one.path),
        "num_layers": len(one.layers),
        "layer_kinds": kinds,
        "layers": [layer.kind for layer in one.layers],
        "kv_bytes": {
            dtype: {str(tokens): architecture.kv_bytes(tokens) for tokens in LENGTHS}
            for dtype, architecture in found.items()
        },
    }


def _without_kind(layer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in layer.items() if key != "kind"}


def _kinds_table(found: "dict[KvDtype, Architecture]") -> "Table":
    """A row for each thing that a kind of layer keeps: KV of all tokens, of the last, a state."""
    from rich import box
    from rich.table import Table

    one = next(iter(found.values()))
    table = Table(
        title=f"{one.name}: {len(one.layers)} layers",
        caption="bytes of one layer",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("kind", no_wrap=True)
    table.add_column("layers", justify="right")
    table.add_column("keeps", no_wrap=True)
    for dtype in found:
        table.add_column(dtype, justify="right", no_wrap=True)
    layers = zip(*(architecture.kind_counts for architecture in found.values()), strict=True)
    for of_kind, count in zip(layers, one.kind_counts.values(), strict=True):
        window = f"a token, of the last {of_kind[0].window_tokens:,}"
        rows = {
            "a token": [layer.growing_bytes_per_token for layer in of_kind],
            window: [layer.window_bytes_per_token for layer in of_kind],
            "state": [layer.fixed_bytes for layer in of_kind],
        }
        for keeps, sizes in rows.items():
            if any(sizes):
                table.add_row(of_kind[0].kind, str(count), keeps, *(f"{size:,}" for size in sizes))
    return table


def _lengths_table(found: "dict[KvDtype, Architecture]") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(
        title="S_kv of a request by prompt length, MiB",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("KV")
    for name in LENGTHS.values():
        table.add_column(name, justify="right", no_wrap=True)
    for dtype, architecture in found.items():
        sizes = (architecture.kv_bytes(tokens) / 2**20 for tokens in LENGTHS)
        table.add_row(dtype, *(f"{size:,.1f}" for size in sizes))
    return table

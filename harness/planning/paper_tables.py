"""The paper's tables on a terminal: Phi_kv, reduction factors and the bandwidth wall.

Rows are those of ``prfaas plan --table NAME --json``. Rates are shown in Gbit/s as the paper does.
"""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from harness.planning.wording import length_text

_GBIT_BYTES = 1e9 / 8


def print_phi(rows: Sequence[dict[str, Any]]) -> None:
    """Table 3 beside the paper's figures and the operator model's."""
    table = _table(
        "Phi_kv in Gbit/s, 8xH200 (Table 3)",
        "ours: S_kv / T_prefill of the profile, whose T is derived from the paper's Phi; oper.: of "
        "an operator model's T; fit: of a + k T of that; off: ours, and fit, over the paper's, "
        "less 1; a dash: the operator model does not cover it",
    )
    table.add_column("model", no_wrap=True)
    for column in ("len", "paper", "ours", "off", "oper.", "fit", "off", "a s", "k"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        for index, cell in enumerate(row["cells"]):
            first = index == 0
            table.add_row(
                row["printed_name"] if first else "",
                length_text(cell["tokens"]),
                _gbit(cell["paper_phi_bytes_per_s"]),
                _gbit(cell["phi_bytes_per_s"]),
                _percent(cell["error"]),
                _gbit(cell["operator_phi_bytes_per_s"]),
                _gbit(cell["fitted_phi_bytes_per_s"]),
                _percent(cell["fitted_error"]),
                _number(row["intercept_s"]) if first else "",
                _number(row["slope"]) if first else "",
            )
    Console().print(table)


def print_reduction(rows: Sequence[dict[str, Any]]) -> None:
    """Which part of a model's design shrinks its KV, and what its state takes back."""
    table = _table(
        "KV against the same layers, all of them full attention",
        "MLA: 8 KV heads of 192 + 128 over its 512 + 64; mix: layers over growing layers; both: "
        "their product; at a length the fixed state counts too",
    )
    table.add_column("model", no_wrap=True)
    lengths = list(rows[0]["at_tokens"]) if rows else []
    for column in ("MLA", "mix", "both", *(f"{int(n) // 1024}K" for n in lengths)):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["model"],
            _factor(row["attention_factor"]),
            _factor(row["mix_factor"]),
            _factor(row["both_factor"]),
            *(_factor(row["at_tokens"][n]) for n in lengths),
        )
    Console().print(table)


def print_wall(rows: Sequence[dict[str, Any]]) -> None:
    """What N GPUs would send if they did nothing but prefill."""
    table = _table(
        "Egress of GPUs that only prefill",
        "in Gbit/s: an instance's Phi_kv times the instances; known: how the prefill times on both "
        "sides of the length are known",
    )
    table.add_column("model", no_wrap=True)
    numbers = list(dict.fromkeys(row["gpus"] for row in rows))
    table.add_column("hardware", no_wrap=True)
    for column in ("len", "instance", *(f"{count:,} GPUs" for count in numbers)):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("known")
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["hardware"], row["tokens"]), []).append(row)
    for (model, hardware, tokens), group in groups.items():
        table.add_row(
            model,
            hardware,
            length_text(tokens),
            _gbit(group[0]["kv_bytes_per_s_per_instance"]),
            *(f"{row['egress_bytes_per_s'] / _GBIT_BYTES:,.0f}" for row in group),
            group[0]["provenance"],
        )
    Console().print(table)


def _table(title: str, caption: str) -> Table:
    return Table(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        padding=0,
        title_justify="left",
        caption_justify="left",
    )


def _gbit(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / _GBIT_BYTES:.2f}"


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    shown = f"{share:+.1%}"
    return "0.0%" if shown in ("+0.0%", "-0.0%") else shown


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _factor(value: float) -> str:
    return f"{value:.2f}"

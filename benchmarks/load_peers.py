"""aiperf on the cases of benchmarks/load.py: the same server, rates and lengths, its own arrivals.

It is given prompts of text, five digits a word and as many words as ours have tokens, so as many
bytes, and a tokenizer of words made here, so that it needs nothing from a network. What TTFT it
reports of a request is compared with what the server wrote
for the request of the same ``x-request-id``. Its lag is not known: it does not say when it meant
to send.
"""

import json
import math
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.load.truth import Truth, TruthRow, TruthServer, read_rows

PATIENCE_S = 600.0

#: Prompts it takes in turn; the server keeps no cache that could tell.
NUM_PROMPTS = 20


def aiperf_at(given: Sequence[str]) -> Path | None:
    """The command, beside a Python given as ``aiperf=PYTHON``, or on PATH; None: not installed."""
    for peer in given:
        name, _, python = peer.partition("=")
        if name != "aiperf":
            raise SystemExit(f"--peer {peer}: the peer that this benchmark knows is aiperf=PYTHON")
        command = Path(python).with_name("aiperf")
        if not command.exists():
            raise SystemExit(f"--peer {peer}: there is no {command}")
        return command
    found = shutil.which("aiperf")
    return None if found is None else Path(found)


def aiperf(
    command: Path,
    rate_req_per_s: float,
    prompt_tokens: int,
    requests: int,
    output_tokens: int,
    truth_in: Callable[[Path], Truth],
) -> dict[str, Any]:
    """One case of aiperf's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_prompts(folder, prompt_tokens, min(requests, NUM_PROMPTS))
        with TruthServer(truth_in(folder)) as server:
            argv = [
                *(str(command), "profile", "--model", "truth", "--tokenizer", str(folder)),
                *("--url", f"http://127.0.0.1:{server.port}", "--endpoint-type", "completions"),
                *("--streaming", "--use-server-token-count", "--ui", "none"),
                *("--request-rate", str(rate_req_per_s), "--arrival-pattern", "poisson"),
                *("--request-count", str(requests), "--random-seed", "8"),
                *("--input-file", str(folder / "prompts.jsonl")),
                *("--custom-dataset-type", "single_turn"),
                *("--osl", str(output_tokens), "--osl-stddev", "0"),
                *("--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder / "out")),
                *("--export-level", "records", "--no-server-metrics", "--no-gpu-telemetry"),
            ]
            used_s, rss_bytes = _run(argv, folder)
            late_p99_s = server.stop().late_p99_s
        truth = {row.request_id: row for row in read_rows(folder / "truth.jsonl")}
        said = [json.loads(line) for line in (folder / "out" / "profile_export.jsonl").open()]
    errors_s, sent_s = _errors(said, truth)
    whole = len(errors_s) == requests
    return {
        "tool": "aiperf",
        "rate_req_per_s": rate_req_per_s,
        "prompt_tokens": prompt_tokens,
        "requests": len(errors_s),
        "achieved_ratio": (len(sent_s) - 1) / (sent_s[-1] - sent_s[0]) / rate_req_per_s,
        "lag_p99_s": None,
        "ttft_error_p50_s": errors_s[math.ceil(0.5 * len(errors_s)) - 1] if whole else None,
        "ttft_error_p99_s": errors_s[math.ceil(0.99 * len(errors_s)) - 1] if whole else None,
        "cpu_s_per_1000": used_s / requests * 1000,
        "rss_bytes": rss_bytes,
        "server_late_p99_s": late_p99_s,
    }


def _write_prompts(folder: Path, words: int, count: int) -> None:
    """The prompts, which begin differently, and the tokenizer."""
    generator = random.Random(8)
    text = " ".join(str(generator.randrange(10_000, 100_000)) for _ in range(words - 1))
    with (folder / "prompts.jsonl").open("w") as lines:
        for index in range(count):
            lines.write(json.dumps({"text": f"{10_000 + index} {text}"}) + "\n")
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "ok": 1}, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _errors(
    said: list[dict[str, Any]], truth: dict[str | None, TruthRow]
) -> tuple[list[float], list[float]]:
    """Sorted TTFT errors of the requests that both know, and sorted send instants; seconds."""
    errors_s, sent_s = [], []
    for record in said:
        told = truth.get(record["metadata"].get("x_request_id"))
        ttft = record["metrics"].get("time_to_first_token")
        if told is None or ttft is None or not told.written_mono_ns:
            continue
        assert ttft["unit"] == "ms"
        true_s = (told.written_mono_ns[0] - told.read_mono_ns) / 1e9
        errors_s.append(ttft["value"] / 1e3 - true_s)
        sent_s.append(record["metadata"]["request_start_ns"] / 1e9)
    return sorted(errors_s), sorted(sent_s)


def _run(argv: list[str], folder: Path) -> tuple[float, int]:
    """Processor seconds of all its processes, its start included, and the largest one's memory."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            process.kill()
    if process.returncode:
        raise SystemExit(f"aiperf failed: {(folder / 'log').read_text(errors='replace')[-2000:]}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024

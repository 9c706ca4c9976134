"""ServeGen (Alibaba): a folder of clients, each with a rate and a law of gaps for every window, and
laws of lengths for every few hours. It holds no requests: they are drawn, by the load's seed.

- ``chunk-N-trace.csv``, no header: ``start (s), rate (req/s), cv, Gamma | Weibull | nothing, shape,
  scale`` a line; a window ends where the next one starts, the last one as long as the one before.
- ``chunk-N-dataset.json``: ``{"start (s)": {"input_tokens": "{tokens: probability, ...}",
  "output_tokens": ...}}``; the last that is not empty at or before a window holds in it.

A client's window has round(rate x length) requests. One gap more than that of the law's shape is
drawn and all are scaled to fill the window, as ServeGen does; its requests lie between them. Input
and output lengths are drawn independently. Every (client, window) draws from a generator of its
own, so that a longer part begins like a shorter one.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.core import ScenarioError
from harness.datafile import read_bytes
from harness.trace.record import (
    MAX_TOKENS,
    MAX_TRACE_BYTES,
    FloatArray,
    IntArray,
    Rows,
    malformed,
)

MAX_DRAWN = 1_000_000
NO_LENGTHS = "of windows without a law of lengths"
NO_TOKENS = "drawn with no input or no output token"
_CHUNK = re.compile(r"chunk-(\d{1,9})-trace\.csv", re.ASCII)
_PAIR = re.compile(r"(\d{1,10}): ([0-9.]+(?:e-?\d+)?)", re.ASCII)
_LAWS = ("Gamma", "Weibull")
#: Tells the draws of a folder from all others of the seed.
_SPAWN = 0x5E67


@dataclass(frozen=True, slots=True)
class _Window:
    start_s: float
    end_s: float
    rate_req_per_s: float
    law: str
    shape: float


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Token counts and their cumulative probabilities; the last is 1."""

    tokens: IntArray
    upto: FloatArray

    def draw(self, rng: np.random.Generator, count: int) -> IntArray:
        return self.tokens[np.searchsorted(self.upto, rng.random(count), side="right")]


def client_files(folder: Path) -> list[tuple[int, Path, Path]]:
    """(client, its windows, its lengths) by client; empty where the folder is of another kind."""
    found = []
    for path in folder.iterdir():
        if match := _CHUNK.fullmatch(path.name):
            client = int(match[1])
            found.append((client, path, folder / f"chunk-{client}-dataset.json"))
    return sorted(found)


def read_servegen(folder: Path, seed: int, start_s: float, until_s: float | None) -> Rows:
    """Requests from ``start_s`` of the folder's time to ``until_s``; times count from ``start_s``.

    ScenarioError names ``file:line`` of a bad window and the key of a bad law.
    """
    clients = [(client, _windows(where), laws) for client, where, laws in client_files(folder)]
    ends_s = max(windows[-1].end_s for _, windows, _ in clients)
    until_s = ends_s if until_s is None else min(until_s, ends_s)
    chosen = [
        (client, [w for w in windows if w.start_s < until_s and w.end_s > start_s], laws)
        for client, windows, laws in clients
    ]
    expected = sum(
        w.rate_req_per_s * (min(w.end_s, until_s) - max(w.start_s, start_s))
        for _, windows, _ in chosen
        for w in windows
    )
    if expected > MAX_DRAWN:
        raise ScenarioError(
            f"The trace folder {folder} gives about {expected:.0f} requests from {start_s:g} s to "
            f"{until_s:g} s; at most {MAX_DRAWN} are drawn. Set load.duration (or --duration), or "
            "leave clients out of the folder."
        )
    parts: list[tuple[FloatArray, IntArray, IntArray]] = []
    lawless = 0
    for client, windows, path in chosen:
        laws = _laws(path, [w for w in windows if w.rate_req_per_s > 0])
        for window in windows:
            drawn, without = _drawn(seed, client, window, laws)
            lawless += int(((start_s <= without) & (without < until_s)).sum())
            parts.append(drawn)
    return _rows(folder, parts, lawless, start_s, until_s)


def _rows(
    folder: Path,
    parts: list[tuple[FloatArray, IntArray, IntArray]],
    lawless: int,
    start_s: float,
    until_s: float,
) -> Rows:
    at_s = np.concatenate([part[0] for part in parts]) if parts else np.zeros(0)
    inside = (start_s <= at_s) & (at_s < until_s)
    if not inside.any():
        raise ScenarioError(
            f"The trace folder {folder} has no request from {start_s:g} s to {until_s:g} s; set "
            "workload.trace_start to where its clients have a rate and lengths."
        )
    inputs = np.concatenate([part[1] for part in parts])
    outputs = np.concatenate([part[2] for part in parts])
    spoken = inside & (inputs > 0) & (outputs > 0)
    left_out = {NO_LENGTHS: lawless, NO_TOKENS: int(inside.sum() - spoken.sum())}
    return Rows(
        arrival_s=at_s[spoken] - start_s,
        input_tokens=inputs[spoken],
        output_tokens=outputs[spoken],
        hash_ids=((),) * int(spoken.sum()),
        end_s=until_s - start_s,
        left_out={why: count for why, count in left_out.items() if count},
    )


def _drawn(
    seed: int, client: int, window: _Window, laws: dict[float, tuple[_Lengths, _Lengths]]
) -> tuple[tuple[FloatArray, IntArray, IntArray], FloatArray]:
    """A window's (times, inputs, outputs), and the times of those that no law gives lengths."""
    none, nothing = np.zeros(0), np.zeros(0, dtype=np.int64)
    length_s = window.end_s - window.start_s
    count = round(window.rate_req_per_s * length_s)
    if count == 0:
        return (none, nothing, nothing), none
    key = (_SPAWN, client, int(window.start_s))
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
    gaps = (
        rng.standard_gamma(window.shape, count + 1)
        if window.law == "Gamma"
        else rng.weibull(window.shape, count + 1)
    )
    upto = np.cumsum(gaps)
    if upto[-1] > 0:
        at_s = window.start_s + length_s * (upto[:-1] / upto[-1])
    else:  # a shape so small that every gap underflows
        at_s = np.full(count, window.start_s)
    found = laws.get(window.start_s)
    if found is None:
        return (none, nothing, nothing), at_s
    new, out = found
    return (at_s, new.draw(rng, count), out.draw(rng, count)), none


def _windows(path: Path) -> list[_Window]:
    starts: list[float] = []
    rows: list[tuple[float, str, float]] = []
    lines = read_bytes(path, "trace file", MAX_TRACE_BYTES).splitlines()
    if not lines:
        raise ScenarioError(f"The trace file {path} is empty; it needs at least one window.")
    for number, line in enumerate(lines, start=1):
        cells = line.decode("utf-8", "replace").strip().split(",")
        if len(cells) != 6:
            raise malformed(path, number, f"6 values are needed, not {len(cells)}")
        try:
            start_s, rate, _cv, shape, _scale = (float(cells[at]) for at in (0, 1, 2, 4, 5))
        except ValueError as error:
            raise malformed(path, number, error) from error
        law = cells[3]
        if not (0 <= start_s <= 1e9 and start_s == int(start_s)):
            raise malformed(path, number, f"{cells[0][:80]!r} is not a start in whole seconds")
        if starts and start_s <= starts[-1]:
            raise malformed(path, number, "a window must start after the one before it")
        if law and (law not in _LAWS or not 0 < shape <= 1e6):
            raise malformed(path, number, 'the law must be "Gamma" or "Weibull" with a shape')
        if not 0 <= rate <= 1e6:
            raise malformed(path, number, f"{cells[1][:80]!r} is not a rate")
        starts.append(start_s)
        rows.append((rate if law else 0.0, law, shape))
    last_s = starts[-1] - starts[-2] if len(starts) > 1 else 600.0
    ends = [*starts[1:], starts[-1] + last_s]
    return [_Window(s, e, *row) for s, e, row in zip(starts, ends, rows, strict=True)]


def _laws(path: Path, windows: list[_Window]) -> dict[float, tuple[_Lengths, _Lengths]]:
    """The laws of (input, output) lengths of each window that has any, by its start."""
    if not windows:
        return {}
    try:
        content = json.loads(read_bytes(path, "trace file", MAX_TRACE_BYTES))
    except (ValueError, RecursionError) as error:
        raise ScenarioError(f"The trace file {path} is not JSON: {error}.") from error
    if not isinstance(content, dict) or not all(key.isdecimal() for key in content):
        raise ScenarioError(f"The trace file {path} is not an object of starts in seconds.")
    starts = sorted(map(int, content))
    read: dict[int, tuple[_Lengths, _Lengths] | None] = {}
    found = {}
    for window in windows:
        for start in reversed([one for one in starts if one <= window.start_s]):
            if start not in read:
                read[start] = _pair(path, str(start), content[str(start)])
            if (laws := read[start]) is not None:
                found[window.start_s] = laws
                break
    return found


def _pair(path: Path, start: str, fields: object) -> tuple[_Lengths, _Lengths] | None:
    """None where either law is empty."""
    names = ("input_tokens", "output_tokens")
    if not isinstance(fields, dict) or any(not isinstance(fields.get(one), str) for one in names):
        raise ScenarioError(
            f"The trace file {path} has no laws of input_tokens and output_tokens in its entry "
            f"{start!r} (those of multimodal requests cannot be replayed)."
        )
    laws = [_law(path, f"{start}.{name}", fields[name]) for name in names]
    return None if laws[0] is None or laws[1] is None else (laws[0], laws[1])


def _law(path: Path, key: str, text: str) -> _Lengths | None:
    inside = text.strip()
    pairs = _PAIR.findall(inside)
    rebuilt = ", ".join(f"{count}: {share}" for count, share in pairs)
    if inside != "{" + rebuilt + "}":
        raise ScenarioError(
            f"The trace file {path} has no table {{tokens: probability, ...}} at {key!r}."
        )
    if not pairs:
        return None
    counts = np.array([int(count) for count, _ in pairs], dtype=np.int64)
    shares = np.array([float(share) for _, share in pairs])
    if abs(shares.sum() - 1) > 1e-6 or counts.max() > MAX_TOKENS:
        raise ScenarioError(
            f"The trace file {path} has probabilities that do not add up to 1, or too many tokens, "
            f"at {key!r}."
        )
    upto = np.cumsum(shares)
    upto[-1] = 1.0
    return _Lengths(counts, upto)

"""BurstGPT (HPMLL): CSV with the columns ``Timestamp`` (seconds from anywhere), ``Request tokens``
and ``Response tokens`` by name; the files of 2024 have six columns, those of release 2.0 eight,
``Session ID`` and ``Elapsed time`` being put in after the first.

A request without response tokens failed where the trace was taken, and one without request tokens
is none: such lines are left out and counted. Whole seconds are a quantum of 1 s, inside which a
replay spreads the arrivals as it does for Mooncake. Sessions are named but their text is not, so
that nothing is known of shared prefixes and no hash ids are made up.
"""

import re
from pathlib import Path

import numpy as np

from harness.core import ScenarioError
from harness.trace.record import Rows, malformed, quantised, tokens

BURSTGPT_START = "Timestamp,"
_NEEDED = ("Timestamp", "Request tokens", "Response tokens")
_SECONDS = re.compile(r"\d{1,12}(\.\d{1,9})?", re.ASCII)
NO_TOKENS = "without request or response tokens (failed when recorded)"


def read_burstgpt(path: Path, lines: list[bytes]) -> Rows:
    names = lines[0].decode("utf-8-sig", "replace").strip().split(",")
    for name in _NEEDED:
        if names.count(name) != 1:
            raise malformed(path, 1, f'the header must name "{name}" once, not {",".join(names)!r}')
    if len(lines) == 1:
        raise ScenarioError(f"The trace file {path} holds a header but no request.")
    time, new, out = (names.index(name) for name in _NEEDED)
    arrival_s, inputs, outputs, failed = [], [], [], 0
    for number, line in enumerate(lines[1:], start=2):
        text = line.decode("utf-8", "replace").strip()
        if not text:
            raise malformed(path, number, "the line is empty")
        cells = text.split(",")
        if len(cells) != len(names):
            raise malformed(path, number, f"{len(names)} values are needed, not {len(cells)}")
        try:
            at_s, given, got = _seconds(cells[time]), tokens(cells[new], 0), tokens(cells[out], 0)
        except ValueError as error:
            raise malformed(path, number, error) from error
        if not (given and got):
            failed += 1
            continue
        arrival_s.append(at_s)
        inputs.append(given)
        outputs.append(got)
    if not arrival_s:
        raise ScenarioError(f"The trace file {path} holds no request with tokens in and out.")
    times_s, quantum_s = quantised(np.array(arrival_s, dtype=np.float64), 1.0, 0.0)
    return Rows(
        arrival_s=times_s,
        input_tokens=np.array(inputs, dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
        hash_ids=((),) * len(inputs),
        quantum_s=quantum_s,
        left_out={NO_TOKENS: failed} if failed else None,
    )


def _seconds(text: str) -> float:
    if not _SECONDS.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is not a time in seconds such as 45 or 19440110.0")
    return float(text)

"""The scenario's [gateway]: defaults, units, the files it names, and that a live gateway has it."""

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live import live, scenario
from scenario_files import PAPER, TEXT, refusal, written

from harness.core import ScenarioError
from harness.gateway.prompts import load_tokenizer
from harness.gateway_settings import MAX_TOKENIZER_BYTES
from harness.scenario import load_scenario, scenario_hash, to_manifest
from harness.scenario_values import BodySize
from harness.settings import Gateway, Timeouts
from harness.surface.generate import MAX_BODY_BYTES

KEY = "0123456789abcdef"


def test_what_a_scenario_without_the_table_has() -> None:
    assert load_scenario(PAPER).gateway == Gateway(
        timeouts=Timeouts(5.0, None, None, None, None, 60.0),
        max_retries=2,
        max_body_bytes=MAX_BODY_BYTES,
        tokenizer=None,
        tokenizer_sha256=None,
        api_key_file=None,
    )


def test_every_key_reaches_its_field(tmp_path: Path) -> None:
    written(tmp_path, "{}", "tokenizer.json")
    written(tmp_path, f"{KEY}\n", "key")
    table = """
[gateway]
connect_timeout_wall = "1s"
prefill_queue_timeout = "2s"
prefill_timeout = "3000ms"
transfer_timeout = "4s"
decode_admission_timeout = "5s"
between_tokens_timeout = "0.1min"
max_retries = 0
max_body = "1MiB"
tokenizer = "tokenizer.json"
api_key_file = "key"
"""
    assert load_scenario(written(tmp_path, TEXT + table)).gateway == Gateway(
        timeouts=Timeouts(1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
        max_retries=0,
        max_body_bytes=2**20,
        tokenizer=tmp_path / "tokenizer.json",
        tokenizer_sha256="44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        api_key_file=tmp_path / "key",
    )


def test_the_key_is_recorded_nowhere_and_the_tokenizer_by_what_it_holds(tmp_path: Path) -> None:
    path, key = written(tmp_path, "{}", "t.json"), written(tmp_path, KEY, "key")
    flags = [f"gateway.tokenizer={path}", f"gateway.api_key_file={key}"]
    given = load_scenario(PAPER, flags)
    assert KEY not in json.dumps(to_manifest(given))
    moved = written(tmp_path, "{}", "moved.json")
    assert scenario_hash(given) == scenario_hash(
        load_scenario(PAPER, [f"gateway.tokenizer={moved}"])
    )
    path.write_text("{ }")
    assert scenario_hash(given) != scenario_hash(load_scenario(PAPER, flags))


def test_no_body_may_be_longer_than_a_worker_reads() -> None:
    read: Any = BodySize.__metadata__[0].func  # type: ignore[attr-defined]  # of Annotated
    assert read("16MiB") == MAX_BODY_BYTES
    assert "give 1KiB to 16MiB" in refusal(PAPER, "gateway.max_body=17MiB")


#: An override of the case study and what the refusal must say. ``{}``: a folder with files.
WRONG = {
    "gateway.max_retry=1": ["'gateway.max_retry'", "did you mean 'max_retries'"],
    "gatewy.max_retries=1": ["'gatewy'", "did you mean 'gateway'"],
    "gateway=1": ["'gateway'", "must be a table"],
    "gateway.timeouts=1s": ["'gateway.timeouts'", "prefill_timeout"],
    "gateway.timeouts.prefill_s=1": ["'gateway.timeouts'"],
    "gateway.max_retries=-1": ["'gateway.max_retries'", "got -1"],
    "gateway.max_retries=101": ["'gateway.max_retries'"],
    "gateway.max_retries=1.0": ["'gateway.max_retries'", "got 1.0"],
    "gateway.max_retries=true": ["'gateway.max_retries'", "got True"],
    "gateway.prefill_timeout=5": ["'gateway.prefill_timeout'", "units: ns, us, ms, s"],
    "gateway.prefill_timeout=0s": ["'0s' is out of bounds"],
    "gateway.prefill_queue_timeout=-1s": ["'gateway.prefill_queue_timeout'"],
    "gateway.transfer_timeout=nan": ["'gateway.transfer_timeout'"],
    "gateway.decode_admission_timeout=9000h": ["at most 8800h"],
    "gateway.between_tokens_timeout=none": ["'gateway.between_tokens_timeout'", "'none'"],
    "gateway.connect_timeout=5s": ["did you mean 'connect_timeout_wall'"],
    "gateway.connect_timeout_wall=[]": ["'gateway.connect_timeout_wall'"],
    "gateway.max_body=1B": ["give 1KiB to 16MiB"],
    "gateway.max_body=1000000": ["'gateway.max_body'", '"64KiB"'],
    "gateway.max_body_bytes=1MB": ["did you mean 'max_body'"],
    "gateway.tokenizer={}/nothing.json": ["'gateway.tokenizer'", "does not exist"],
    "gateway.tokenizer={}": ["'gateway.tokenizer'", "not a regular file"],
    "gateway.tokenizer={}/huge": ["'gateway.tokenizer'", "at most"],
    "gateway.tokenizer=''": ["'gateway.tokenizer'"],
    "gateway.tokenizer=7": ["'gateway.tokenizer'", "got 7"],
    "gateway.api_key=secret": ["did you mean 'api_key_file'"],
    "gateway.api_key_file={}/nothing": ["'gateway.api_key_file'", "does not exist"],
    "gateway.api_key_file={}/empty": ["'gateway.api_key_file'", "holds no key"],
    "gateway.api_key_file={}/two": ["holds no key", "without white space"],
    "gateway.api_key_file={}/bytes": ["holds no key"],
    "gateway.api_key_file={}/huge": ["at most 512"],
}  # fmt: skip


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_told_by_name(tmp_path: Path, override: str) -> None:
    written(tmp_path, " \n", "empty")
    written(tmp_path, f"{KEY} {KEY}", "two")
    (tmp_path / "bytes").write_bytes(b"caf\xe9")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)
    message = refusal(PAPER, override.replace("{}", str(tmp_path)))
    assert all(word in message for word in WRONG[override]), message
    assert KEY not in message


def test_a_tokenizer_that_nothing_can_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "no tokenizer", "tokenizer.json")
    has_package = importlib.util.find_spec("tokenizers") is not None
    words = "cannot read the tokenizer" if has_package else "pip install tokenizers"
    with pytest.raises(ScenarioError, match=words) as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_a_live_gateway_has_the_scenarios_limits_and_key(tmp_path: Path) -> None:
    key = written(tmp_path, f"{KEY}\n", "key")
    given = scenario(
        f"gateway.api_key_file={key}", "gateway.max_body=2KiB", "gateway.prefill_timeout=50ms"
    )

    async def post(url: str, tokens: int, key: str) -> tuple[int, str]:
        body = {"input_ids": list(range(tokens)), "sampling_params": {"max_new_tokens": 2}}
        headers = {"Authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{url}/generate", json=body) as answer,
        ):
            return answer.status, await answer.text()

    with live(given, "homogeneous_pd", tmp_path / "runs") as opened:
        assert asyncio.run(post(opened.url, 200, "another"))[0] == 401
        assert asyncio.run(post(opened.url, 2000, KEY))[0] == 413
        status, text = asyncio.run(post(opened.url, 200, KEY))
        assert (status, json.loads(text)["error"]["code"]) == (502, "prefill")

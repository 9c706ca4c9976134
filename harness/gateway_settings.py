"""The scenario's [gateway] as a record, and the files it names: a tokenizer and a key."""

import hashlib
from pathlib import Path

from harness.core import ScenarioError
from harness.datafile import printable, read_bytes
from harness.resolution import wrong
from harness.scenario_tables.machinery import GatewayTable
from harness.settings import Gateway, Timeouts

#: The tokenizers of models in use have 2 to 35 MB.
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
MAX_KEY_BYTES = 512


def resolve_gateway(table: GatewayTable, where: str, folder: Path) -> Gateway:
    """Paths are relative to ``folder``. ScenarioError for a file that is not there, or no key."""
    tokenizer = None if table.tokenizer is None else folder / table.tokenizer
    key_file = None if table.api_key_file is None else folder / table.api_key_file
    if key_file is not None:
        try:
            read_api_key(key_file)
        except ScenarioError as error:
            raise wrong("gateway.api_key_file", where, _told(error)) from error
    return Gateway(
        timeouts=Timeouts(
            connect_wall_s=table.connect_timeout_wall,
            prefill_queue_s=table.prefill_queue_timeout,
            prefill_s=table.prefill_timeout,
            transfer_s=table.transfer_timeout,
            decode_admission_s=table.decode_admission_timeout,
            between_tokens_s=table.between_tokens_timeout,
        ),
        max_retries=table.max_retries,
        max_body_bytes=table.max_body,
        tokenizer=tokenizer,
        tokenizer_sha256=None if tokenizer is None else _sha256(tokenizer, where),
        api_key_file=key_file,
    )


def read_api_key(path: Path) -> str:
    """The key that a file holds, without the white space around it; no error shows any of it."""
    key = read_bytes(path, "key file", MAX_KEY_BYTES).strip()
    if not key or not all(0x21 <= byte <= 0x7E for byte in key):
        raise ScenarioError(
            f"The key file {printable(str(path))} holds no key: write one into it, of letters, "
            "digits and signs without white space, as openssl rand -hex 24 prints."
        )
    return key.decode("ascii")


def _sha256(tokenizer: Path, where: str) -> str:
    try:
        content = read_bytes(tokenizer, "tokenizer", MAX_TOKENIZER_BYTES)
    except ScenarioError as error:
        raise wrong("gateway.tokenizer", where, _told(error)) from error
    return hashlib.sha256(content).hexdigest()


def _told(error: ScenarioError) -> str:
    """Its words as the end of a sentence."""
    text = str(error).removesuffix(".")
    return text[0].lower() + text[1:]

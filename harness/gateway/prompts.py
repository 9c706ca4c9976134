"""A call's prompt as the scheduler and the workers need it: how many tokens, and its ids' text.

Ids pass through as they came. Text becomes the ids of the tokenizer whose ``tokenizer.json`` was
given (the ``tokenizers`` package reads it), which the workers then get instead of the text; without
one the text goes to the workers, whose emulated tokenizer has one token a UTF-8 byte. A real engine
has another one, so there text without a tokenizer is refused.
"""

import importlib
from typing import Any

import msgspec

from harness.core import EngineError, ScenarioError
from harness.surface.generate import encode, prompt_ids_text, prompt_of
from harness.surface.openai import Call


class Prompts:
    """Reads prompts; made once a process."""

    def __init__(self, tokenizer_path: str | None, *, bytes_are_tokens: bool = True) -> None:
        self._tokenizer = None if tokenizer_path is None else load_tokenizer(tokenizer_path)
        self._bytes_are_tokens = bytes_are_tokens

    def count(self, call: Call) -> int:
        """Tokens of the prompt, whose text has become ids where there is a tokenizer."""
        body = call.body
        if self._tokenizer is not None and not body.input_ids and body.text:
            ids = self._tokenizer.encode(body.text).ids
            body.input_ids, body.text = msgspec.Raw(encode(ids)), None
        if not body.input_ids and not self._bytes_are_tokens:
            raise EngineError(
                "the prompt is text, whose tokens nobody here can count: send token ids, or give "
                "the scenario a gateway.tokenizer"
            )
        return call.prompt_tokens or prompt_of(body).tokens


def ids_text(call: Call) -> bytes:
    """The canonical JSON text of the ids, which the worker will also see: no white space."""
    if call.prompt_tokens is not None:
        return bytes(call.body.input_ids)
    return prompt_ids_text(call.body)


def load_tokenizer(path: str) -> Any:
    """ScenarioError for a file that is no tokenizer, or without the package that reads it."""
    try:
        package = importlib.import_module("tokenizers")
    except ModuleNotFoundError as error:
        raise ScenarioError(
            f"the tokenizer {path} needs the package tokenizers: pip install tokenizers, or send "
            "prompts as token ids"
        ) from error
    try:
        return package.Tokenizer.from_file(path)
    except Exception as error:  # the package raises plain Exception for a bad file
        raise ScenarioError(f"cannot read the tokenizer {path}: {error}") from error

"""How instances serve what they are given: steps, batches, memory."""

from typing import Literal

from harness.scenario_tables.table import Table
from harness.scenario_values import ByteSize, Tokens


class ServingTable(Table):
    decode_steps: Literal["full_batch", "by_batch"] = "full_batch"
    """Decode at the step time of a full batch always, or at the profile's of the batch that runs.
    An SGLang engine steps as it does."""
    decode_memory: ByteSize | None = None
    """Memory of a decode instance for the KV of prompts and outputs; no bound unless given. An
    SGLang engine has what it is launched with, and refuses this."""
    prefill_batch_tokens: Tokens | None = None
    """New tokens up to which waiting requests are prefilled together; one at a time unless given.
    In simulation."""
    chunk_tokens: Tokens | None = None
    """New tokens of one request in a prefill step; longer prompts are cut and the others take
    turns. Not cut unless given. In simulation."""

"""What every table of a scenario is: strict, without unknown keys."""

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """A key that is not listed is an error; text that looks like a number is none."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

"""What goes wrong in a run, and when, in scenario time from the start of the load."""

from typing import Annotated, Literal

from pydantic import Field

from harness.scenario_tables.table import Table
from harness.scenario_values import Duration, Name, PositiveDuration


class InstanceFaultTable(Table):
    """One instance that dies or is slow for a while."""

    instance: Name
    """As the decisions and the report name it: "prfaas-p0", "pd-p1", "pd-d0"."""
    at: Duration
    lasts: PositiveDuration | None = None
    """Left out: until the end of the run."""
    kind: Literal["kill", "slow"] = "kill"
    """kill: all that it was doing and held is lost, and it comes back empty. slow: what begins
    meanwhile takes ``factor`` times as long."""
    factor: Annotated[float, Field(gt=1, le=1000)] | None = None
    deployments: Annotated[list[Name], Field(min_length=1, max_length=16)] | None = None
    """Left out: every deployment that has the instance."""


class FaultsTable(Table):
    """Faults by schedule; of a simulation alone, which bench refuses."""

    instances: Annotated[list[InstanceFaultTable], Field(max_length=10_000)] = Field(
        default_factory=list
    )

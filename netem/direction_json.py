"""What a helper process is told of a direction, as JSON objects and back.

The fields of the records under their names; a loss model also has its class under ``model``.
"""

from dataclasses import asdict
from typing import Any

from netem.link import Direction, Slot
from netem.loss import FourStateLoss, GilbertElliott, IndependentLoss
from netem.way import WaySettings

_MODELS = {model.__name__: model for model in (IndependentLoss, GilbertElliott, FourStateLoss)}


def settings_to_json(settings: WaySettings) -> dict[str, Any]:
    """An object that ``settings_from_json`` turns into an equal record."""
    record = asdict(settings)
    loss = settings.direction.loss
    if loss is not None:
        record["direction"]["loss"] |= {"model": type(loss).__name__}
    return record


def settings_from_json(record: dict[str, Any]) -> WaySettings:
    """The record of an object; KeyError or TypeError when it is not one."""
    direction = dict(record["direction"])
    if direction["loss"] is not None:
        fields = dict(direction["loss"])
        direction["loss"] = _MODELS[fields.pop("model")](**fields)
    if direction["slot"] is not None:
        direction["slot"] = Slot(**direction["slot"])
    return WaySettings(**record | {"direction": Direction(**direction)})

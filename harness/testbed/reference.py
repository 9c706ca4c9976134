"""What a run on the reference engine asks of its scenario, and of the machine."""

from harness.core import ScenarioError
from harness.engine.reference import require_device
from harness.scenario import Scenario


def context_tokens(scenario: Scenario) -> int:
    """The longest prompt with its output that an instance has room for; 0 where none computes."""
    computes = scenario.engine.reference
    if computes is None:
        return 0
    longest = scenario.workload.max_tokens + scenario.workload.output_max_tokens
    return computes.context_tokens or longest


def check_reference(scenario: Scenario) -> None:
    """ScenarioError names the key that a run of the reference engine cannot have, and what would be
    right; EngineError where this machine lacks torch or the device."""
    for key, why in _faults(scenario):
        raise ScenarioError(
            f"'{key}' in the scenario file {scenario.path} does not go with engine.kind = "
            f'"reference": {why}.'
        )
    computes = scenario.engine.reference
    assert computes is not None, "the engine is the reference"
    require_device(computes.device, "engine.device")


def _faults(scenario: Scenario) -> list[tuple[str, str]]:
    scale, serving = scenario.scale, scenario.serving
    longest = scenario.workload.max_tokens + scenario.workload.output_max_tokens
    checks = (
        ("scale.time", scale.time != 1, "it computes in real time; set it to 1"),
        ("scale.bytes", scale.bytes != 1, "it sends all of its KV; set it to 1"),
        (
            "engine.context_tokens",
            context_tokens(scenario) < longest,
            f"the workload's longest request has {longest} tokens, prompt and output",
        ),
        (
            "serving.decode_steps",
            serving.decode_steps != "by_batch",
            "its requests step together, in the time that their batch takes; the model and the "
            'simulation have to as well: set it to "by_batch"',
        ),
        (
            "scheduling.cache_copy",
            scenario.scheduling.cache_copy and scenario.prefix_cache.enabled,
            "a prefix is not copied between clusters with its tensors; set it to false",
        ),
    )
    return [(key, why) for key, is_wrong, why in checks if is_wrong]

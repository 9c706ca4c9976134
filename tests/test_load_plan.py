"""Plan and schedule files: round trips, and refusals that name the place."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from load_process import evenly, load_process, plan_in

from harness.core import Request, ScenarioError
from harness.load.plan import Plan, load_plan, read_schedule, write_plan, write_schedule


def changed_plan(folder: Path, **changes: Any) -> Path:
    path = plan_in(folder, 8000, evenly(2, 0.1))
    plan = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in plan.items() if value is not ...}))
    return path


def test_a_plan_is_read_back_with_paths_beside_it(tmp_path: Path) -> None:
    plan = load_plan(plan_in(tmp_path, 8123, evenly(2, 0.1), api_key="secret"))
    assert (plan.port, plan.api_key, plan.time_scale) == (8123, "secret", 1.0)
    assert plan.schedule_path == str(tmp_path / "schedule.jsonl")
    assert plan.spool_path == str(tmp_path / "client.jsonl")


def test_a_plan_is_nobody_elses_to_read(tmp_path: Path) -> None:
    plan = load_plan(plan_in(tmp_path, 8123, evenly(2, 0.1), api_key="secret"))
    write_plan(plan, tmp_path / "written.json")
    assert (tmp_path / "written.json").stat().st_mode & 0o077 == 0
    assert load_plan(tmp_path / "written.json") == plan


def test_a_schedule_is_read_back(tmp_path: Path) -> None:
    requests = (
        Request("000000", 0, 0.0, 1, 1),
        Request("000001", 1, 0.25, 128_000, 512, (7, 9), 64),
    )
    write_schedule(requests, tmp_path / "schedule.jsonl")
    assert tuple(read_schedule(tmp_path / "schedule.jsonl")) == requests


def test_a_line_has_the_fields_of_a_request(tmp_path: Path) -> None:
    write_schedule(evenly(1, 1.0), tmp_path / "s")
    assert list(json.loads((tmp_path / "s").read_text())) == [
        field.name for field in fields(Request)
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "x"}, "unknown key 'schedule'; did you mean 'schedule_path'?"),
        ({"zzz": 1}, "unknown key 'zzz'; known keys: host, port"),
        ({"port": 0}, r"\$\.port"),
        ({"port": "80"}, r"Expected `int`, got `str` - at `\$\.port`"),
        ({"salt": ...}, "missing required field `salt`"),
        ({"time_scale": 0}, r"\$\.time_scale"),
        ({"path": "v1"}, r"\$\.path"),
        ({"path": "/v1\r\nX: y"}, r"\$\.path"),
        ({"api_key": "a b"}, r"\$\.api_key"),
        ({"request_timeout_s": -1}, r"\$\.request_timeout_s"),
    ],
)
def test_a_wrong_plan_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message) as refusal:
        load_plan(changed_plan(tmp_path, **changes))
    assert str(tmp_path / "plan.json") in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\xff"])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ScenarioError, match=r"plan\.json: "):
        load_plan(tmp_path / "plan.json")


LINE = '{"rid":"a","index":0,"planned_s":1.0,"input_tokens":5,"output_tokens":1}\n'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "the schedule is empty"),
        (LINE + "\n", "s:2: the line is empty"),
        (LINE + "{\n", "s:2: not a JSON object"),
        (LINE + "[]\n", "s:2: Expected `object`"),
        (LINE.replace("index", "indx"), "s:1: unknown key 'indx'; did you mean 'index'?"),
        (LINE.replace(',"output_tokens":1', ""), "s:1: .*missing required field `output_tokens`"),
        (LINE.replace('tokens":5', 'tokens":0'), r"s:1: .*\$\.input_tokens"),
        (LINE.replace('tokens":5', 'tokens":1000001'), r"s:1: .*\$\.input_tokens"),
        (LINE.replace("1.0", "-1.0"), r"s:1: .*\$\.planned_s"),
        (LINE + LINE, "s:2: rid 'a' or index 0 occurs twice"),
        (LINE + LINE.replace("1.0", "0.5"), "s:2: planned_s 0.5 is before the line above"),
    ],
)
def test_a_wrong_schedule_is_refused(tmp_path: Path, lines: str, message: str) -> None:
    (tmp_path / "s").write_text(lines)
    with pytest.raises(ScenarioError, match=message):
        read_schedule(tmp_path / "s")


def test_a_missing_schedule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ScenarioError, match=r"absent\.jsonl: cannot read the schedule: No such file"
    ):
        read_schedule(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tmie_scale": 2}, ["unknown key 'tmie_scale'", "'time_scale'"]),
        ({"schedule_path": "absent"}, ["absent", "No such file"]),
        ({"spool_path": "absent/client.jsonl"}, ["cannot write the spool"]),
    ],
)
def test_the_process_refuses_in_one_paragraph(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with load_process(changed_plan(tmp_path, **changes)) as load:
        status, stderr = load.refusal()
    assert status == 2
    assert stderr.count("\n") == 1
    assert all(word in stderr for word in words)


def test_a_spool_with_rows_is_not_appended_to(tmp_path: Path) -> None:
    plan = changed_plan(tmp_path)
    (tmp_path / "client.jsonl").write_text("{}\n")
    with load_process(plan) as load:
        status, stderr = load.refusal()
    assert status == 2
    assert "already has rows" in stderr
    assert (tmp_path / "client.jsonl").read_text() == "{}\n"


def test_the_plan_has_the_keys_of_the_contract() -> None:
    assert set(Plan.__struct_fields__) == {
        "host", "port", "path", "api_key", "model", "time_scale", "schedule_path", "spool_path",
        "salt", "request_timeout_s", "keep_alive", "concurrency", "think_time_s", "workers",
        "remote_workers", "bind_host", "bind_port", "token", "web_fd", "samples_path",
    }  # fmt: skip

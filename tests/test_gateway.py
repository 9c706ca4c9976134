"""The gateway and workers, live: surfaces, proof that KV moved, refusals, clients that go away."""

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from live import Live, live, scenario

from harness.engine.emulated import token_at
from harness.surface.generate import prompt_of_ids

IDS = list(range(20_000, 20_300))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    given = scenario("scale.time=50", "deployments.prfaas_pd.threshold_tokens=1000")
    with live(given, "prfaas_pd", tmp_path_factory.mktemp("runs")) as testbed:
        yield testbed


def headers(served: Live) -> dict[str, str]:
    return {"Authorization": f"Bearer {served.testbed.gateway_key}"}


def post(served: Live, path: str, body: Any) -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(served.url + path, raw, headers(served), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def stream(served: Live, path: str, body: dict[str, Any]) -> list[Any]:
    raw = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(served.url + path, raw, headers(served), method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        text = answer.read().decode()
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def get(served: Live, path: str) -> str:
    request = urllib.request.Request(served.url + path, headers=headers(served))
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def expected_ids(ids: list[int], count: int) -> list[int]:
    digest = prompt_of_ids(json.dumps(ids).encode()).digest
    return [token_at(digest, position) for position in range(count)]


def test_generate_answers_the_prompts_own_tokens(served: Live) -> None:
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 40}}
    status, answer = post(served, "/generate", body)
    assert status == 200
    assert answer["output_ids"] == expected_ids(IDS, 40)
    assert answer["meta_info"]["prompt_tokens"] == len(IDS)
    assert answer["meta_info"]["completion_tokens"] == 40
    assert answer["meta_info"]["finish_reason"] == {"type": "length"}


def test_completions_stream_counts_tokens_for_the_client(served: Live) -> None:
    body = {
        "model": "m",
        "prompt": IDS,
        "max_tokens": 40,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    chunks = stream(served, "/v1/completions", body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]]
    assert counts[:2] == [1, 2]
    assert counts == sorted(counts)
    assert counts[-1] == 40
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])
    assert text == "".join(f" {token}" for token in expected_ids(IDS, 40))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 300,
        "completion_tokens": 40,
        "total_tokens": 340,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat_and_text_prompts_are_served(served: Live) -> None:
    turns = [{"role": "user", "content": "hello"}]
    status, answer = post(served, "/v1/chat/completions", {"messages": turns, "max_tokens": 3})
    assert status == 200
    assert len(answer["choices"][0]["message"]["content"].split()) == 3
    chunks = stream(served, "/v1/chat/completions", {"messages": turns, "max_tokens": 3})
    said = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert said == answer["choices"][0]["message"]["content"]
    status, answer = post(served, "/v1/completions", {"prompt": "hello", "max_tokens": 1})
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 5


def test_the_threshold_sends_long_prompts_across_the_link(served: Live) -> None:
    long_ids = [10_000 + i % 90_000 for i in range(1001)]
    for rid, ids in (("short", IDS), ("at-threshold", long_ids[:1000]), ("long", long_ids)):
        body = {"input_ids": ids, "rid": rid, "sampling_params": {"max_new_tokens": 2}}
        assert post(served, "/generate", body)[0] == 200
    rows = {row["rid"]: row for row in served.rows("gateway")}
    assert [rows[rid]["crosses"] for rid in ("short", "at-threshold", "long")] == [0, 0, 1]
    assert rows["long"]["prefill_instance"].startswith("prfaas-p")
    for rid in ("short", "at-threshold", "long"):
        prefill, decode = rows[rid]["prefill"], rows[rid]["decode"]
        assert prefill["kv_wire_bytes_sent"] == decode["kv_wire_bytes_received"] > 0
        assert decode["kv_layers"] == 57
        assert prefill["end_mono_ns"] >= prefill["start_mono_ns"] >= prefill["received_mono_ns"]
        assert decode["first_written_mono_ns"] >= decode["granted_mono_ns"]
    decisions = {row["rid"]: row for row in served.rows("decisions")}
    assert decisions["long"]["input_tokens"] == 1001
    assert decisions["long"]["threshold_tokens"] == 1000


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", b"{", "not valid"),
        ("/v1/completions", {"prompt": []}, "empty"),
        ("/v1/completions", {"prompt": ["x"]}, "token ids"),
        ("/v1/completions", {"prompt": [1], "max_tokens": 0}, "max_tokens is 0"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/generate", {"sampling_params": {}}, "needs input_ids"),
        ("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "from 1 to"),
        ("/generate", {"input_ids": [1] * 200_000}, "covers"),
        ("/generate", {"input_ids": [1], "rid": "r" * 300}, "256 characters"),
        ("/v1/completions", b'{"prompt": "\xff", "max_tokens": 3}', "not valid"),
        ("/v1/completions", b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid"),
    ],
)
def test_a_wrong_request_is_refused_with_its_reason(
    served: Live, path: str, body: Any, said: str
) -> None:
    status, answer = post(served, path, body)
    assert status == 400
    assert said in answer["error"]["message"]


def test_a_stranger_does_not_join_a_run(served: Live) -> None:
    rows = len(served.rows("gateway"))
    request = urllib.request.Request(served.url + "/generate", b'{"input_ids": [1]}')
    for key in (None, "Bearer wrong", "Bearer \u00fc"):
        if key is not None:
            request.add_header("Authorization", key)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(request, timeout=10)
    assert len(served.rows("gateway")) == rows


def test_a_body_beyond_the_bound_is_refused(served: Live) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.testbed.gateway_port, timeout=10)
    connection.putrequest("POST", "/generate")
    connection.putheader("Authorization", headers(served)["Authorization"])
    connection.putheader("Content-Length", str(2**30))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_models_health_metrics_and_state_answer(served: Live) -> None:
    assert json.loads(get(served, "/v1/models"))["data"][0]["owned_by"] == "prfaas-bench"
    assert get(served, "/health") == ""
    assert "prfaas_gateway_requests_total" in get(served, "/metrics")
    state = json.loads(get(served, "/state"))
    assert set(state["queue_lengths"]) >= {"prfaas-p0", "pd-p0", "pd-d0"}


def test_a_client_that_goes_away_leaves_nothing_behind(served: Live) -> None:
    body = json.dumps(
        {
            "input_ids": IDS,
            "rid": "gone",
            "stream": True,
            "sampling_params": {"max_new_tokens": 100_000},
        }
    ).encode()
    with socket.create_connection(("127.0.0.1", served.testbed.gateway_port), 10) as client:
        head = (
            f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            f"Authorization: Bearer {served.testbed.gateway_key}\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        assert b"200 OK" in client.recv(4096)
    wait_until(lambda: json.loads(get(served, "/state"))["in_flight"] == 0)
    row = next(row for row in served.rows("gateway") if row["rid"] == "gone")
    assert (row["outcome"], row["failure_phase"]) == ("failed", "cancelled")
    assert not any(json.loads(get(served, "/state"))["queue_lengths"].values())

    def workers_idle() -> bool:
        latest = {row["instance"]: row for row in served.rows("engines")}
        return not any(row["running"] or row["queued"] for row in latest.values())

    wait_until(workers_idle)


def test_a_rid_in_flight_is_not_taken_twice(served: Live) -> None:
    body = {"input_ids": IDS, "rid": "twice", "sampling_params": {"max_new_tokens": 4000}}
    raw = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(served.url + "/generate", raw, headers(served), method="POST")
    with urllib.request.urlopen(request, timeout=30) as first:
        status, answer = post(served, "/generate", body)
        assert first.status == 200
    assert status == 400
    assert "in flight" in answer["error"]["message"]


def wait_until(condition: Any, timeout_s: float = 10.0) -> None:
    """Poll a condition that another process makes true; failing is the test's failure."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.02)


def test_what_the_senders_see_of_the_link_reaches_the_gateway(served: Live) -> None:
    ids = list(range(2000))  # beyond the threshold: its KV crosses
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}}
    assert post(served, "/generate", body)[0] == 200

    def links() -> list[dict[str, Any]]:
        return [row for row in served.rows("link") if row["kind"] == "estimate"]

    deadline_s = time.monotonic() + 20
    while not (seen := links()) or max(row["utilisation"] for row in seen) == 0:
        assert time.monotonic() < deadline_s, seen
        time.sleep(0.05)
    state = json.loads(get(served, "/state"))["links"]["prfaas"]
    assert state["at_s"] is not None
    assert state["goodput_bytes_per_s"] > 0
    assert state["scarce"] is False
    assert {row["cluster"] for row in seen} == {"prfaas"}
    assert "prfaas_link_utilisation" in get(served, "/metrics")

"""Run inside the near site: asks prompts of SGLang servers, alone and by pairs, and prints JSON.

Reads a plan from stdin (``test_sglang_pd.Servers.ask_all``). Nothing of the harness takes part, so
that what it finds says something about the harness too.
"""

import json
import re
import secrets
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SUM = re.compile(rb"^sglang:kv_transfer_total_mb_sum\{.*\} (\S+)$", re.MULTILINE)


def call(address: tuple[str, int], path: str, key: str, body: Any = None) -> bytes:
    host, port = address
    asked = urllib.request.Request(
        f"http://{host}:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        whole: bytes = answer.read()
    return whole


def counted(address: tuple[str, int], key: str) -> int:
    """KV bytes that a prefill server has sent."""
    return round(sum(float(one) for one in SUM.findall(call(address, "/metrics", key))) * 2**20)


def main() -> None:
    plan = json.load(sys.stdin)
    key = plan["key"]
    params = {
        "max_new_tokens": plan["output_tokens"],
        "temperature": 0,
        "ignore_eos": True,
    }
    tokens: dict[str, list[list[int]]] = {"alone": []}
    moved: dict[str, int] = {}
    for ids in plan["prompts"]:
        body = {"input_ids": ids, "sampling_params": params}
        answer = json.loads(call(tuple(plan["alone"]), "/generate", key, body))
        tokens["alone"].append(answer["output_ids"])
    for name, (host, port, bootstrap_port) in plan["prefill"].items():
        before = counted((host, port), key)
        tokens[name] = []
        for ids in plan["prompts"]:
            pair = {
                "input_ids": ids,
                "sampling_params": params,
                "bootstrap_host": host,
                "bootstrap_port": bootstrap_port,
                "bootstrap_room": secrets.randbits(60),
            }
            with ThreadPoolExecutor(2) as both:
                halves = [
                    both.submit(call, address, "/generate", key, pair)
                    for address in ((host, port), tuple(plan["decode"]))
                ]
                tokens[name].append(json.loads(halves[1].result())["output_ids"])
                halves[0].result()
        moved[name] = counted((host, port), key) - before
    json.dump({"tokens": tokens, "moved": moved}, sys.stdout)


if __name__ == "__main__":
    main()

"""Listens, says that it is well, and behaves as ``SGLANG_MANNER`` has it.

well: answers. slow: is never well. taken: says that its port is taken and stays. memory: runs out
of memory. killed: its scheduler was killed. unwell: is well until asked for its settings. Like the
real one it has a child that heeds no SIGTERM, and prints its bearer token.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ENDS = {
    "memory": (1, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."),
    "killed": (-9, "Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering SIGQUIT"),
    "flag": (2, "launch_server.py: error: unrecognized arguments: --nonsense"),
}
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def main() -> None:
    flags = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_argument("--host")
    flags.add_argument("--port", type=int)
    flags.add_argument("--api-key", default="")
    flags.add_argument("--disaggregation-mode", default="null")
    flags.add_argument("--page-size", type=int, default=1)
    given, rest = flags.parse_known_args()
    manner = os.environ.get("SGLANG_MANNER", "well")
    print(f"server_args={rest} api_key={given.api_key!r} TMPDIR={os.environ['TMPDIR']}")
    child = subprocess.Popen([sys.executable, "-c", STUBBORN])
    print(f"scheduler {child.pid}", flush=True)
    if manner in ENDS:
        status, words = ENDS[manner]
        print(words, flush=True)
        if status < 0:
            os.kill(os.getpid(), -status)
        sys.exit(status)
    if manner == "taken":
        print("ERROR: [Errno 98] error while attempting to bind on address: address already in use")
        sys.stdout.flush()
        time.sleep(600)
    serve(given, manner)


def serve(given: argparse.Namespace, manner: str) -> None:
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if self.path == "/health":
                unwell = manner == "slow" or (manner == "unwell" and "/server_info" in asked)
                self._say(503 if unwell else 200, "")
            elif self.headers.get("Authorization", "") != f"Bearer {given.api_key}":
                self._say(401, "{}")
            elif self.path == "/server_info":
                info = {"version": "0.5.23", "api_key": given.api_key, "model_path": "m"}
                info["disaggregation_mode"] = given.disaggregation_mode
                info["internal_states"] = [{"page_size": given.page_size}]
                self._say(200, json.dumps(info))
            else:
                self._say(200, "sglang:num_running_reqs 0.0\n", "text/plain")

        def _say(self, status: int, body: str, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer((given.host, given.port), Answer).serve_forever()


if __name__ == "__main__":
    main()

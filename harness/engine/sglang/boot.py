"""Run as a script by the interpreter that has sglang: one server, gone when its launcher is.

The first line of stdin is a JSON list, the arguments of ``sglang.launch_server``: a bearer token
among them is then in no argument list that other users of the host can read. End of file after it
means that the launcher is gone, however it died: the whole process group is killed, that is, the
server with its scheduler and detokenizer. Nothing of the harness is imported, since that
interpreter need not have it.
"""

import json
import os
import runpy
import signal
import sys
import threading


def main() -> None:
    # This file's folder holds modules named like others'; none of them may be found.
    sys.path[:] = [place for place in sys.path if os.path.realpath(place or ".") != _HERE]
    arguments = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    sys.argv = ["sglang.launch_server", *arguments]
    # As ``python -m`` does: processes that the server spawns import it as their main module.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _end_with_launcher() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


_HERE = os.path.realpath(os.path.dirname(__file__))

if __name__ == "__main__":
    main()

"""The alarm: nobody wakes early, all wake, and in order; those killed in their sleep harm nobody.

In a process of its own, as gevent's loop belongs to one."""

import subprocess
import sys

CODE = """
import time, gevent
from harness.load.alarm import Alarm

woken = []
with Alarm() as alarm:
    def sleeper(at_ns):
        alarm.sleep_until(at_ns)
        woken.append((at_ns, time.monotonic_ns()))

    start_ns = time.monotonic_ns() + 2_000_000_000  # all of them sleep by then
    instants = [start_ns + number * 7919 % 100 * 1_000_000 for number in range(100)]
    sleepers = [gevent.spawn(sleeper, at_ns) for at_ns in instants]
    killed = gevent.spawn(sleeper, start_ns + 1)
    gevent.sleep(0)
    killed.kill()
    gevent.joinall(sleepers, raise_error=True)
    sleeper(time.monotonic_ns() - 1)
    sleeper(time.monotonic_ns() + 1_000_000)
assert [at_ns for at_ns, _ in woken[:100]] == sorted(instants)
assert len(woken) == 102
assert all(now_ns >= at_ns for at_ns, now_ns in woken)
"""


def test_sleepers_wake_in_order_and_never_early() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

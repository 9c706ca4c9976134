"""How late a running link takes the changes of a schedule. Prints JSON.

    python benchmarks/schedule_lateness.py [--backend forwarder] [--changes 100] [--every 100ms]

The rate of an open link goes up and down at equal intervals; late is the time from the instant
that was planned to the one at which the backend had taken the change. The link idles otherwise.
On a quiet machine every change should be in force within 20 ms. Where changes come faster than the
backend takes them (tc-netem: some milliseconds) they queue, and lateness adds up.
"""

import argparse
import json
import math
import os
import statistics

from netem.link import symmetric
from netem.testlink import open_link
from netem.units import parse_duration_s
from netem.variation import Change, LinkSchedule
from netem.variation_run import ScheduleRun

TARGET_S = 20e-3
BASE = symmetric("benchmark", 125e6, 0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--every", type=parse_duration_s, default="100ms")
    given = parser.parse_args()
    schedule = LinkSchedule(
        tuple(
            Change(given.every * (n + 1), rate_bytes_per_s=BASE.rate_bytes_per_s / (2 + n % 2))
            for n in range(given.changes)
        )
    )
    with (
        open_link(BASE, given.backend) as link,
        ScheduleRun(link.path, BASE, schedule) as run,
    ):
        run.wait()
    late_s = sorted(one.applied_s - one.planned_s for one in run.log)
    print(
        json.dumps(
            {
                "backend": link.backend,
                "changes": len(late_s),
                "late_p50_s": round(statistics.median(late_s), 6),
                "late_p99_s": round(late_s[math.ceil(0.99 * len(late_s)) - 1], 6),
                "late_max_s": round(late_s[-1], 6),
                "meets_target": late_s[-1] <= TARGET_S,
                "cores": os.cpu_count(),
                "load_average_1min": round(os.getloadavg()[0], 2),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()

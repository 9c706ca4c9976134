"""``python -m harness`` is ``prfaas``."""

import os
import sys


def start() -> int:
    """``prfaas``, Ctrl-C while it is still being imported included."""
    # Nothing here multiplies large matrices, and the threads that numpy and scipy would start for
    # it spin: a sixth of a plan's processor time, and cores that a run's processes need.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from harness.cli import main

        return main()
    except KeyboardInterrupt:
        print("prfaas: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(start())

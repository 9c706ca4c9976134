"""``python -m harness`` is ``prfaas``."""

import sys


def start() -> int:
    """``prfaas``, Ctrl-C while it is still being imported included."""
    try:
        from harness.cli import main

        return main()
    except KeyboardInterrupt:
        print("prfaas: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(start())

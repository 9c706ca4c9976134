"""``python -m netem link ...`` and ``python -m netem doctor``: the links alone, without a harness.

Exit status: 0; 1 a link is not what it should be; 2 bad usage; 3 a link cannot be built.
"""

import argparse
import sys

from netem.arguments import add_link
from netem.command import call
from netem.described import UsageError
from netem.doctor import examine, print_examination
from netem.link import LinkError


def main() -> int:
    parser = argparse.ArgumentParser(prog="netem", description="Shaped links between two sites.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    add_link(verbs, call)
    doctor = verbs.add_parser("doctor", help="say what this machine can run, and what it lacks")
    doctor.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    doctor.set_defaults(call=_doctor)
    options = parser.parse_args()
    try:
        status: int = options.call(options)
    except LinkError as error:
        print(f"netem: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 3
    except OSError as error:
        print(f"netem: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    return status


def _doctor(options: argparse.Namespace) -> int:
    examination = examine()
    print_examination(examination, as_json=options.json)
    return 1 if examination.backend is None else 0


if __name__ == "__main__":
    sys.exit(main())

"""The options of ``link up | show | verify | run -- CMD | down | profiles``.

Apart from what they do (``netem.command``), because a command line is parsed more often than a link
is made, and what makes one takes a third of a second to import.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Keys of a link file that have an option of their own.
VALUES = ("rate", "rtt", "jitter", "loss")
_MOST_FLOWS = 64


def add_link(
    verbs: Any,  # argparse publishes no name for what add_subparsers gives
    call: Callable[[argparse.Namespace], int],
) -> None:
    """The verb ``link`` and its own, in ``link_verb``; ``call`` is for whatever was chosen."""
    link = verbs.add_parser("link", help="make, show, measure and remove a shaped link")
    link.set_defaults(call=call)
    own = link.add_subparsers(required=True, metavar="VERB")
    up = own.add_parser("up", help="make a link that stays up")
    up.add_argument("name", nargs="?", help="what to call it (default: the profile's or file's)")
    _add_description(up)
    _add_interface(up)
    up.add_argument(
        "--vary", action="store_true", help="let it change as its [variation] says, from now on"
    )
    up.add_argument("--schedule", type=Path, metavar="TOML|CSV", help="let it change as this says")
    up.add_argument("--for", dest="duration", metavar="TIME", help='take it down after "2h"')
    up.set_defaults(link_verb="up")
    show = own.add_parser("show", help="what is up, with counters")
    verify = own.add_parser("verify", help="measure a link against its description")
    down = own.add_parser("down", help="remove a link and all that is left of it")
    for parser, verb in ((show, "show"), (verify, "verify"), (down, "down")):
        parser.add_argument("name", nargs="?", help="which one, where several are up")
        parser.set_defaults(link_verb=verb)
    verify.add_argument("--flows", type=_flows, default=4, metavar="N", help="how many (default 4)")
    other = verify.add_argument_group("the other end of an interface's link")
    other.add_argument("--peer-shell", metavar="COMMAND", help='such as "ssh gpu-far-1"')
    other.add_argument("--peer-address", metavar="ADDRESS", help="where this node reaches it")
    other.add_argument("--peer-python", default="python3", metavar="PATH", help="its interpreter")
    down.add_argument("--all", action="store_true", help="every link a keeper keeps up")
    down.add_argument(
        "--forget", action="store_true", help="drop the record also if something is not undone"
    )
    run = own.add_parser("run", help="run a command inside a site of a link")
    run.add_argument("--name", help="a link that is up (default: the only one)")
    run.add_argument("--site", choices=("near", "far"), default="near")
    _add_description(run, purpose="a link for the command alone")
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")
    run.set_defaults(link_verb="run")
    profiles = own.add_parser("profiles", help="the named links")
    profiles.add_argument("name", nargs="?", help="one of them, value by value")
    profiles.set_defaults(link_verb="profiles")
    for parser in (up, show, verify, down, profiles):
        parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def _flows(text: str) -> int:
    """Each is a thread at both ends."""
    if not (text.isdecimal() and 1 <= int(text) <= _MOST_FLOWS):
        raise argparse.ArgumentTypeError(f"{text!r} is no number between 1 and {_MOST_FLOWS}")
    return int(text)


def _add_description(parser: argparse.ArgumentParser, purpose: str = "the link") -> None:
    group = parser.add_argument_group(purpose)
    chosen = group.add_mutually_exclusive_group()
    chosen.add_argument("--profile", metavar="NAME", help="see `link profiles`")
    chosen.add_argument("--file", type=Path, metavar="TOML", help="a link file")
    for key, example in zip(VALUES, ("10gbit", "20ms", "1ms", "0.1%"), strict=True):
        group.add_argument(
            f"--{key}", metavar=key.upper(), help=f'such as "{example}"'.replace("%", "%%")
        )
    group.add_argument("--backend", choices=("auto", "netem", "forwarder", "relay"), default="auto")


def _add_interface(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a real node's interface, in place of sites on this machine")
    group.add_argument("--nic", metavar="INTERFACE", help="shape the peers' traffic on it")
    group.add_argument(
        "--peer", action="append", default=[], metavar="NETWORK", dest="peers",
        help="an address or network of the other cluster (repeatable)",
    )  # fmt: skip
    group.add_argument("--site", choices=("near", "far"), default="near", help="which end this is")
    group.add_argument("--shape", choices=("egress", "ingress", "both"), default="both")
    group.add_argument(
        "--share", choices=("router_node", "per_node_share", "mq"), default="per_node_share",
        help="how the senders of this cluster share the link",
    )  # fmt: skip
    group.add_argument("--nodes", type=int, default=1, metavar="N", help="senders that share it")
    group.add_argument(
        "--replace", action="store_true", help="take other qdiscs off, and put them back at the end"
    )

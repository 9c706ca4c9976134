"""``prfaas link``: make, show, measure and remove a shaped link; what it does is ``netem``'s."""

import argparse
from typing import Any

from harness.core import LinkError, ScenarioError
from netem.arguments import add_link


def add(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """The verb and its own."""
    add_link(verbs, _link)


def _link(options: argparse.Namespace) -> int:
    from netem.command import call
    from netem.described import UsageError
    from netem.link import LinkError as NetemLinkError

    try:
        return call(options)
    except UsageError as error:
        raise ScenarioError(str(error)) from error
    except NetemLinkError as error:
        raise LinkError(str(error)) from error

"""The link that a command line describes: its document, its interface, how it changes, how long.

Everything is checked before anything is made; what is wrong is a ``UsageError``.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netem.arguments import VALUES
from netem.datafile import read_toml
from netem.kept import schedule_from
from netem.link import LinkError
from netem.link_file import LinkProfile, read_link, read_profile
from netem.nic_plan import NicPlan
from netem.units import parse_duration_s

_PROFILES = Path(__file__).parent / "profiles"


class UsageError(LinkError):
    """What the user asked for cannot be meant; the message says what would be right."""


def describes(options: argparse.Namespace) -> bool:
    """Whether the options say anything of what the link is."""
    given = (options.profile, options.file, *(getattr(options, key) for key in VALUES))
    return any(value is not None for value in given)


def described(options: argparse.Namespace) -> tuple[Mapping[str, Any], LinkProfile]:
    """The link that the options describe, as a document and as a checked record."""
    document: dict[str, Any] = {}
    name, where = "link", "the options"
    try:
        if options.profile is not None:
            name, where = options.profile, f"the profile {options.profile}"
            read_profile(name)
            document = read_toml(_PROFILES / f"{name}.toml", "link profile")
        elif options.file is not None:
            name, where = options.file.stem, f"the link file {options.file}"
            document = read_toml(options.file, "link file")
        elif not describes(options):
            raise UsageError("describe the link: --profile, --file, or --rate and --rtt")
        given = {key: getattr(options, key) for key in VALUES if getattr(options, key) is not None}
        if "rtt" in given:
            document.pop("delay", None)
        document |= given
        return document, read_link(document, name, where)
    except LinkError as error:
        raise UsageError(str(error)) from error


def interface(options: argparse.Namespace) -> dict[str, Any] | None:
    """The fields of a NicPlan for the keeper, checked; None for a link between sites."""
    if options.nic is None:
        if options.peers:
            raise UsageError("--peer is for a link of an interface: name it by --nic")
        return None
    fields = {
        "interface": options.nic,
        "peers": options.peers,
        "site": options.site,
        "shape": options.shape,
        "sharing": options.share,
        "nodes": options.nodes,
        "replace": options.replace,
    }
    try:
        NicPlan.load(fields)
    except LinkError as error:
        raise UsageError(str(error)) from error
    return fields


def variation(
    options: argparse.Namespace, profile: LinkProfile, duration_s: float | None
) -> dict[str, Any] | None:
    """How the link changes: the [variation] of a file and where its paths begin; checked."""
    if options.schedule is not None:
        variation: dict[str, Any] = {"file": str(options.schedule.absolute())}
    elif options.vary and profile.variation:
        folder = options.file.absolute().parent if options.file is not None else _PROFILES
        variation = {"table": dict(profile.variation), "folder": str(folder)}
    elif options.vary:
        raise UsageError(f"the link {profile.spec.name!r} has no [variation] to follow")
    else:
        return None
    try:
        schedule_from(variation, duration_s).steps(profile.spec)
    except LinkError as error:
        raise UsageError(str(error)) from error
    return variation


def duration(options: argparse.Namespace) -> float | None:
    """How long the link is to stay up; None: until it is taken down."""
    if options.duration is None:
        return None
    try:
        duration_s = parse_duration_s(options.duration)
    except ValueError as error:
        raise UsageError(f"--for: {error}") from error
    if not duration_s:
        raise UsageError("--for: a link that is up for no time is no link")
    return duration_s

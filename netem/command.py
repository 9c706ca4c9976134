"""What ``link up | show | verify | run -- CMD | down | profiles`` do.

Every verb is a function of its options (``netem.arguments``) that returns the exit status: 0, 1
when a link is not what it should be, or for ``run`` the command's own. LinkError is for whoever
calls to print; ``UsageError`` is the one that is the user's.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from types import FrameType
from typing import Any

from netem.described import UsageError, described, describes, duration, interface, variation
from netem.kept import KeeperOrder, ask, start_keeper
from netem.link import LinkError
from netem.link_file import LinkProfile, profile_names, read_link, read_profile
from netem.namespace import capabilities_lacking, enter_user_namespace, join
from netem.nic_plan import NicPlan
from netem.reaping import reap_stale, take_down
from netem.remote import measured, remote_path
from netem.site import counters_from_answer
from netem.state import (
    Entry,
    FolderError,
    check_name,
    entries,
    forget_name,
    locked,
    unreadable,
)
from netem.testlink import open_link
from netem.units import format_size_bytes

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def call(options: argparse.Namespace) -> int:
    """Do what ``netem.arguments.add_link`` put into ``options``."""
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {
        "up": _up,
        "show": _show,
        "verify": _verify,
        "run": _run,
        "down": _down,
        "profiles": _profiles,
    }
    return verbs[options.link_verb](options)


def _up(options: argparse.Namespace) -> int:
    document, profile = described(options)
    name = profile.spec.name if options.name is None else options.name
    try:
        check_name(name)
    except LinkError as error:
        raise UsageError(str(error)) from error
    nic = interface(options)
    _remove_stale()
    duration_s = duration(options)
    order = KeeperOrder(
        name, document, options.backend, nic, duration_s, variation(options, profile, duration_s)
    )
    entry = start_keeper(order)
    if options.json:
        print(json.dumps(_document(entry, {}), indent=2))
        return 0
    print(_headline(entry))
    for note in entry.details["notes"]:
        print(f"  {note}")
    if nic is None:
        print(f"run in it: link run --name {name} -- COMMAND; remove it: link down {name}")
    else:
        print(f"remove it: link down {name}")
    return 0


def _show(options: argparse.Namespace) -> int:
    found = [entry for entry in entries() if options.name in (None, entry.name)]
    _tell_unreadable()
    if options.name is not None and not found:
        raise UsageError(_unknown(options.name))
    shown = [(entry, _counters(entry)) for entry in found]
    if options.json:
        print(json.dumps([_document(entry, counters) for entry, counters in shown], indent=2))
        return 0
    if not shown:
        print("no link is up")
    for entry, counters in shown:
        print(_headline(entry))
        if "error" in counters:
            print(f"  {counters['error']}")
        for change in counters.get("schedule", ()):
            print(f"  at {change['applied_s']:.3f} s: {change['change']}")
        for direction in ("near_to_far", "far_to_near"):
            if direction in counters:
                print(f"  {direction.replace('_', ' ')}: {_passed(counters[direction])}")
        for note in entry.details.get("notes", ()):
            print(f"  {note}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    entry = _chosen(options.name)
    if "nic" in entry.details:
        answer = _verify_interface(entry, options)
    else:
        answer, _ = ask(entry, {"op": "verify", "flows": options.flows})
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        for key, value in answer["check"].items():
            print(f"{key}: {value:.6g}" if isinstance(value, float) else f"{key}: {value}")
        for warning in answer["warnings"]:
            print(f"warning: {warning}")
        print("\n".join(answer["failures"]) or "the link is what it should be")
    return 1 if answer["failures"] else 0


def _verify_interface(entry: Entry, options: argparse.Namespace) -> dict[str, Any]:
    """Measured from here, where a remote shell's questions can be answered."""
    if options.peer_shell is None or options.peer_address is None:
        raise UsageError(
            f"the link {entry.name!r} goes to another machine: name a way to run a command there "
            'and its address: --peer-shell "ssh gpu-far-1" --peer-address 10.2.0.5'
        )
    plan = NicPlan.load(entry.details["plan"])
    spec = read_link(entry.details["document"], entry.name, "the record of the link").spec
    path = remote_path(
        plan.applied(spec),
        plan.site,
        options.peer_shell,
        options.peer_address,
        options.peer_python,
        lambda: counters_from_answer(ask(entry, {"op": "counters"})[0]),
    )
    return measured(path, options.flows)


def _run(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("link run needs a command: link run -- COMMAND ARGUMENT...")
    _remove_stale()
    if describes(options):
        if options.name is not None:
            raise UsageError("--name is for a link that is up: give it, or describe another link")
        return _run_alone(options, command)
    answer, descriptors = ask(_chosen(options.name), {"op": "enter", "site": options.site})
    if descriptors:
        network_namespace, *user = descriptors
        join(user[0] if user else None, network_namespace)
    os.environ.update(answer["environment"])
    return _become(command)


def _become(command: Sequence[str]) -> int:
    """Go on as the command, with its own status, signals and terminal; returns if that fails."""
    if sys.stdout is not None:  # it is where there is none
        sys.stdout.flush()
    # What this program ignores or handles is not the command's.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        return _not_run(command, error)


def _not_run(command: Sequence[str], error: OSError) -> int:
    """As a shell says and returns it."""
    print(f"{command[0]}: {error.strerror}", file=sys.stderr)
    return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


def _run_alone(options: argparse.Namespace, command: Sequence[str]) -> int:
    """A link that is up while the command runs. Signals that end this process go to it first."""
    _, profile = described(options)
    if options.backend != "relay" and capabilities_lacking():
        try:
            enter_user_namespace()
        except LinkError as error:
            print(f"rootless is not possible: {error}", file=sys.stderr)
    with ExitStack() as stack:
        link = stack.enter_context(open_link(profile.spec, options.backend))
        for note in link.notes:
            print(note, file=sys.stderr)
        site, other = (link.near, link.far) if options.site == "near" else (link.far, link.near)
        addresses = {
            "PRFAAS_LINK_ADDRESS": site.address,
            "PRFAAS_LINK_PEER_ADDRESS": other.address,
        }
        try:
            process = site.popen(list(command), env=os.environ | addresses)
        except OSError as error:
            return _not_run(command, error)
        status = _wait(process, stack)
    return status if status >= 0 else 128 - status


def _wait(process: "subprocess.Popen[Any]", stack: ExitStack) -> int:
    def pass_on(signum: int, _frame: FrameType | None) -> None:
        process.send_signal(signum)

    # Ctrl-C reaches the command from the terminal itself.
    stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.SIG_IGN))
    for signum in (signal.SIGTERM, signal.SIGHUP):
        stack.callback(signal.signal, signum, signal.signal(signum, pass_on))
    return process.wait()


def _down(options: argparse.Namespace) -> int:
    if options.name in unreadable():
        return _forget_unreadable(options)
    _tell_unreadable()
    if options.all:
        chosen = [e for e in entries() if e.details.get("keeper") or not e.owner.is_alive()]
    elif options.name is None and not entries():
        chosen = []
    else:
        chosen = [_chosen(options.name, alive=False)]
    removed = [take_down(entry, forgetting=options.forget) for entry in chosen]
    removed += reap_stale()
    if options.json:
        print(json.dumps([asdict(one) for one in removed], indent=2))
    else:
        print("\n".join(map(str, removed)) or "no link is up")
        if any(one.problems for one in removed) and not options.forget:
            print("put it in order and say it again, or --forget the record")
    return 1 if any(one.problems for one in removed) else 0


def _forget_unreadable(options: argparse.Namespace) -> int:
    if not options.forget:
        raise LinkError(unreadable()[options.name])
    with locked():
        forget_name(options.name)
    print("[]" if options.json else f"removed the record {options.name}")
    return 0


def _profiles(options: argparse.Namespace) -> int:
    names = profile_names() if options.name is None else (options.name,)
    try:
        found = {name: read_profile(name) for name in names}
    except LinkError as error:
        raise UsageError(str(error)) from error
    if options.json:
        print(json.dumps({name: _profile(one) for name, one in found.items()}, indent=2))
        return 0
    for name, one in found.items():
        print(f"{name}: {one.summary}\n  {str(one.spec).partition(': ')[2]}")
        for key, value in one.provenance.items() if options.name is not None else ():
            print(f"  {key} = {value.value} ({value.basis}: {value.source})")
    return 0


def _profile(profile: LinkProfile) -> dict[str, Any]:
    return {
        "summary": profile.summary,
        "values": {key: asdict(value) for key, value in profile.provenance.items()},
    }


def _chosen(name: str | None, *, alive: bool = True) -> Entry:
    """The entry of a name; of the only link without one."""
    found = [entry for entry in entries() if not alive or entry.owner.is_alive()]
    if name is None:
        if len(found) == 1:
            return found[0]
        names = ", ".join(entry.name for entry in found)
        raise UsageError(
            f"name one of the links that are up: {names}" if found else "no link is up"
        )
    for entry in found:
        if entry.name == name:
            return entry
    raise UsageError(_unknown(name))


def _unknown(name: str) -> str:
    names = ", ".join(entry.name for entry in entries()) or "none"
    return f"no link named {name!r} is up; up: {names}"


def _counters(entry: Entry) -> dict[str, Any]:
    """What the keeper of a link tells, or in "error" why nobody does; one does not hide others."""
    if not entry.owner.is_alive() or not entry.details.get("keeper"):
        return {}
    try:
        return ask(entry, {"op": "counters"})[0]
    except LinkError as error:
        return {"error": str(error)}


def _headline(entry: Entry) -> str:
    details = entry.details
    text = details.get("description", f"{entry.name}: being set up")
    text = f"{entry.name}: {text.partition(': ')[2] or text}"
    held = f"process {entry.owner.pid}"
    if not entry.owner.is_alive():
        return f"{text}; its {held} has died: `link down {entry.name}` removes what is left"
    age_s = time.time() - entry.since_unix_s
    return f"{text}; {details.get('backend', 'no backend yet')}, {held}, up {age_s:.0f} s"


def _passed(counters: Mapping[str, int]) -> str:
    return (
        f"{format_size_bytes(counters['bytes'])} in {counters['packets']} packets, "
        f"{counters['dropped']} dropped, {format_size_bytes(counters['queued_bytes'])} held"
    )


def _document(entry: Entry, counters: Mapping[str, Any]) -> dict[str, Any]:
    hidden = {"nic", "plan", "document"}
    return {
        "name": entry.name,
        "pid": entry.owner.pid,
        "alive": entry.owner.is_alive(),
        "since_unix_s": entry.since_unix_s,
        **{key: value for key, value in entry.details.items() if key not in hidden},
        "counters": dict(counters) or None,
    }


def _remove_stale() -> None:
    for removed in reap_stale():
        print(removed, file=sys.stderr)
    with suppress(FolderError):  # a link for one command needs no record
        _tell_unreadable()


def _tell_unreadable() -> None:
    for fault in unreadable().values():
        print(fault, file=sys.stderr)

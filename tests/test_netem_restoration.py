"""Giving an interface back: by the dead-man, by the next command, with what it had before.

Whatever is killed, and whenever. The nodes are namespaces of the test's own.
"""

import json
import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from netem_nodes import (
    PATIENCE_S,
    THERE,
    Node,
    add_tbf,
    down,
    down_all,
    refused,
    shaped,
    two_nodes,
    until,
    up,
)
from pyroute2 import IPRoute

from netem.link import LinkError
from netem.reaping import reap_stale
from netem.rtnetlink import Rtnetlink, tc_message
from netem.saved_qdiscs import interface_index, rehearse, save, take_off
from netem.state import LeftBehindError, entries, write

pytestmark = pytest.mark.netadmin
ALONE = ("--rate", "1gbit", "--rtt", "1ms", "--backend", "relay")


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Node, Node]]:
    with two_nodes(tmp_path) as both:
        monkeypatch.setenv("PRFAAS_RUNTIME_DIR", str(both[0].folder))
        yield both
        both[0].run(down_all)


def dead_man(keeper: psutil.Process) -> psutil.Process:
    (found,) = keeper.children()
    assert "netem.deadman" in found.cmdline()
    return found


def test_kill_minus_9_of_the_keeper_gives_the_interface_back(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes
    before = here.snapshot()
    os.kill(up(here).owner.pid, signal.SIGKILL)
    until(lambda: here.snapshot() == before)
    shown = here.link("show").stdout
    assert "has died" in shown
    assert here.link("down").returncode == 0
    assert here.link("show").stdout == "no link is up\n"


def test_a_keeper_that_hangs_loses_the_interface(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes
    before = here.snapshot()
    plan = {"interface": "v0", "peers": [THERE], "silence_s": 1.5}
    keeper = start(here, "stuck", plan)
    assert keeper.stdout is not None
    assert "entry" in json.loads(keeper.stdout.readline())
    keeper.send_signal(signal.SIGSTOP)
    until(lambda: here.snapshot() == before)
    keeper.send_signal(signal.SIGCONT)
    assert keeper.wait(PATIENCE_S) == 0  # It sees that the link is down and leaves.
    keeper.stdout.close()


def start(node: Node, name: str, plan: dict[str, Any]) -> "subprocess.Popen[str]":
    """A keeper, as ``link up`` starts one."""
    order = {"name": name, "document": {"rate": "100mbit", "rtt": "0"}, "nic": plan}
    keeper = node.popen("-m", "netem.keeper", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert keeper.stdin is not None
    keeper.stdin.write(json.dumps(order) + "\n")
    keeper.stdin.close()
    return keeper


def test_kill_minus_9_of_keeper_and_dead_man_is_repaired_by_the_next_command(
    nodes: tuple[Node, Node],
) -> None:
    here, _ = nodes
    before = here.snapshot()
    for command in (("down", "wan"), ("run", *ALONE, "--", "true")):
        keeper = psutil.Process(up(here).owner.pid)
        for process in (dead_man(keeper), keeper):
            process.kill()
        assert here.snapshot() != before
        assert here.link(*command).returncode == 0
        assert here.snapshot() == before


def test_a_dead_man_that_is_killed_ends_the_link(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes
    before = here.snapshot()
    dead_man(psutil.Process(up(here).owner.pid)).kill()
    until(lambda: here.snapshot() == before)


#: Opens a link, and kills itself (and its dead-man) in place of the N-th change to the kernel.
DOOMED = """
    import json, os, signal, sys
    import psutil
    from netem.link import symmetric
    from netem.nic import open_nic
    from netem.nic_plan import NicPlan
    from netem.rtnetlink import Rtnetlink
    from netem.state import held

    fatal, with_dead_man, plan = int(sys.argv[1]), sys.argv[2] == "both", json.loads(sys.argv[3])
    request, made = Rtnetlink.request, 0

    def counted(*arguments):
        global made
        made += 1
        if made == fatal:
            for child in psutil.Process().children() if with_dead_man else ():
                child.kill()
            os.kill(os.getpid(), signal.SIGKILL)
        request(*arguments)

    Rtnetlink.request = counted
    spec = symmetric("doomed", 12.5e6, 0.0)
    with held("doomed") as entry, open_nic(spec, NicPlan.load(plan), entry):
        print("up", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("dies", ["alone", "both"])
def test_kill_minus_9_at_any_change_is_undone(nodes: tuple[Node, Node], dies: str) -> None:
    """By the dead-man, or where that is dead too by the next command; also what was replaced."""
    here, _ = nodes
    here.run(add_tbf)
    before = here.snapshot()
    plan = json.dumps({"interface": "v0", "peers": [THERE], "shape": "egress", "replace": True})
    came_up, fatal = False, 0
    while not came_up:
        fatal += 1 if dies == "both" else 3
        with here.popen(
            *("-c", textwrap.dedent(DOOMED), str(fatal), dies, plan),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as doomed:
            assert doomed.stdout is not None
            came_up = doomed.stdout.readline() == "up\n"
            if came_up:
                doomed.kill()
        if dies == "alone":
            until(lambda: of_v0(here.snapshot()) == of_v0(before))
        assert [one.problems for one in here.run(reap_stale)] == [()]
        assert here.snapshot() == before
    # Two of the rehearsal, one to take off, four for the ifb, the hooks, the filter.
    assert fatal > 9


def test_a_record_of_what_is_left_stays_until_it_is_in_order(nodes: tuple[Node, Node]) -> None:
    """Somebody puts a qdisc on the interface while what it had is taken off."""
    here, _ = nodes
    here.run(add_tbf)
    before = here.snapshot()

    def disturbed() -> None:
        left = pytest.raises(LeftBehindError, match="from someone else meanwhile")
        with left, shaped(replace=True):
            add_tbf(0x50000)

    here.run(disturbed)
    assert [entry.name for entry in entries()] == ["held"]
    result = here.link("down")
    assert result.returncode == 3  # This process, which holds the record, is alive.
    assert "alive" in result.stderr
    (entry,) = entries()
    stale = replace(entry, owner=replace(entry.owner, start_ticks=1))
    write(stale)
    result = here.link("down")
    assert (result.returncode, "--forget" in result.stdout) == (1, True)

    def mend() -> None:
        with Rtnetlink() as route:
            index = interface_index(route, "v0")
            assert index is not None
            take_off(route, index)

    here.run(mend)
    assert here.link("down").returncode == 0
    assert here.snapshot() == before
    write(stale)
    here.run(mend)
    here.run(lambda: add_tbf(0x50000))
    assert here.link("down", "--forget").returncode == 1
    assert entries() == ()


def of_v0(snapshot: dict[str, list[Any]]) -> list[Any]:
    """What carries traffic; an interface of a rehearsal that was cut short does not."""
    (index,) = (index for index, name in snapshot["links"] if name == "v0")
    return [each for kind in ("qdiscs", "filters") for each in snapshot[kind] if each[0] == index]


def test_another_root_qdisc_is_refused_or_replaced_and_put_back(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes

    def tree() -> None:
        with IPRoute() as route:
            index = route.link_lookup(ifname="v0")[0]
            route.tc("add", "htb", index, 0x10000, default=0x20)
            route.tc("add-class", "htb", index, 0x10001, parent=0x10000, rate="1gbit")
            route.tc("add-class", "htb", index, 0x10020, parent=0x10001, rate="1mbit")
            route.tc(
                "add", "tbf", index, 0x200000, parent=0x10020, rate="1mbit", burst=3000, limit=9000
            )
            route.tc(
                "add-filter", "u32", index, parent=0x10000, prio=3, protocol=0x0800,
                target=0x10020, keys=["0x0a000000/0xff000000+16"],
            )  # fmt: skip

    here.run(tree)
    before = here.snapshot()
    said = refused(here)
    assert "htb 1:, tbf 20:" in said
    assert "--replace" in said
    replaced = up(here, replace=True)
    assert any("taken off" in note for note in replaced.details["notes"])
    assert "tbf" not in [kind for *_, kind in here.snapshot()["qdiscs"]]
    os.kill(replaced.owner.pid, signal.SIGKILL)
    until(lambda: here.snapshot() == before)
    down(here, replaced)
    assert here.snapshot() == before


def test_what_cannot_be_put_back_is_not_taken_off(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes

    def rehearsed() -> None:
        add_tbf()
        with Rtnetlink() as route:
            index = interface_index(route, "v0")
            assert index is not None
            saved = save(route, index)
            rehearse(route, saved, 4, "scratch")
            # A child whose parent was not saved.
            orphan = tc_message(index, 0x200000, 0x90001) + saved[0].body[20:]
            with pytest.raises(LinkError, match="could not be put back"):
                rehearse(route, (type(saved[0])(saved[0].kind, orphan),), 4, "scratch")

    before = here.snapshot()["links"]
    here.run(rehearsed)
    assert here.snapshot()["links"] == before  # No scratch interface is left.

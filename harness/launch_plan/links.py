"""``prfaas link`` on every node whose interface is to be shaped: each end shapes what it sends.

A cluster's senders share its direction of the link, each with an even part. Peers are the KV
addresses of the other cluster's nodes, so that nothing else on the interface is touched.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.launch_plan.placement import Placement
from harness.nodes import Node
from harness.scenario import Scenario
from netem.link import LinkSpec, symmetric
from netem.link_file import profile_names
from netem.loss import IndependentLoss
from netem.units import format_duration_s, format_fraction, format_rate


@dataclass(frozen=True, slots=True)
class NodeLink:
    """Up before the load, measured, down after it; all on ``node``, as root."""

    node: str
    address: str
    interface: str
    up: str
    verify: str
    down: str


def node_links(
    scenario: Scenario, placements: Sequence[Placement], hours: int
) -> tuple[NodeLink, ...]:
    """Of every node in use that names its interface; none where no KV crosses."""
    by_cluster: dict[str, dict[str, Node]] = {"prfaas": {}, "pd": {}}
    for placement in placements:
        for rank in placement.ranks:
            by_cluster[rank.node.cluster][rank.node.name] = rank.node
    far, near = list(by_cluster["prfaas"].values()), list(by_cluster["pd"].values())
    if not far:
        return ()
    return tuple(
        _link(scenario, node, own, others, site, hours)
        for own, others, site in ((far, near, "far"), (near, far, "near"))
        for node in own
        if node.kv_interface is not None
    )


def _link(
    scenario: Scenario, node: Node, own: list[Node], others: list[Node], site: str, hours: int
) -> NodeLink:
    assert node.kv_interface is not None, "it has an interface to shape"
    name = "prfaas-wan"
    words = ["prfaas", "link", "up", name, "--nic", node.kv_interface]
    for other in others:
        words += ["--peer", other.kv_address]
    words += [*described(scenario.link), "--site", site, "--shape", "egress"]
    words += ["--share", "per_node_share", "--nodes", str(len(own)), "--for", f"{hours}h"]
    peer = others[0]
    verify = ["prfaas", "link", "verify", name, "--peer-shell", f"ssh {peer.address}"]
    verify += ["--peer-address", peer.kv_address]
    return NodeLink(
        node.name,
        node.address,
        node.kv_interface,
        shlex.join(words),
        shlex.join(verify),
        f"prfaas link down {name}",
    )


def unshaped(placements: Sequence[Placement]) -> tuple[str, ...]:
    """Nodes that KV crosses to or from and that name no interface."""
    nodes = {rank.node.name: rank.node for one in placements for rank in one.ranks}
    crosses = any(node.cluster == "prfaas" for node in nodes.values())
    return tuple(n for n, node in nodes.items() if crosses and node.kv_interface is None)


def described(link: LinkSpec) -> Iterator[str]:
    """Options of ``prfaas link up`` that give this link, a profile's or its own values."""
    if link.name in profile_names():
        yield from ("--profile", link.name)
        return
    one = link.far_to_near
    yield from ("--rate", format_rate(one.rate_bytes_per_s), "--rtt", format_duration_s(link.rtt_s))
    if one.jitter_s:
        yield from ("--jitter", format_duration_s(one.jitter_s))
    if isinstance(one.loss, IndependentLoss):
        yield from ("--loss", format_fraction(one.loss.probability))


def described_in_part(link: LinkSpec) -> bool:
    """Whether the options leave something out, so that a link file has to be named by hand."""
    if link.name in profile_names():
        return False
    one = link.far_to_near
    loss = one.loss if isinstance(one.loss, IndependentLoss) and not one.loss.correlation else None
    plain = symmetric(link.name, one.rate_bytes_per_s, link.rtt_s).both(
        jitter_s=one.jitter_s, loss=loss
    )
    return plain != link

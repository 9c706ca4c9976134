"""GPU nodes that a scenario is to run on: where they are, what they have, what is launched there.

Nothing is opened or contacted to read them: ``prfaas bench --dry-run`` and ``prfaas doctor`` say
what they add up to.
"""

from typing import Annotated, Literal

from pydantic import Field

from harness.scenario_tables.table import Table
from harness.scenario_values import ByteSize, Name

Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.:-]{0,251}[A-Za-z0-9])?$")]
#: A path on the node, whatever its own machine's folders are.
NodePath = Annotated[str, Field(pattern=r"^/[^\x00-\x1f]*$", max_length=4096)]


class NodeTable(Table):
    address: Address
    """Management address: how the gateway and whoever operates it reach the node."""
    cluster: Literal["prfaas", "pd"]
    hardware: Name
    """The [hardware.NAME] that instances on it are of."""
    gpus: Annotated[int, Field(ge=1, le=64)]
    gpu_memory: ByteSize | None = None
    """Memory of one GPU, "96GB"; whether the model fits is not checked without it."""
    kv_address: Address | None = None
    """Address of the interface that KV goes by; the management address unless given."""
    kv_interface: Annotated[str, Field(pattern=r"^[^\s/]{1,15}$")] | None = None
    """Name of that interface, which prfaas link shapes; the link is not shaped without it."""
    ib_device: Name | None = None
    """RDMA device on this node in place of [engine]'s, as mlx5_0."""
    python: NodePath = "/usr/bin/python3"
    """Interpreter on the node that has sglang."""
    model_path: NodePath | None = None
    """Folder of the model on the node; [engine].model_path as it is written unless given."""
    workdir: NodePath = "/var/tmp/prfaas"
    """Folder for logs and sockets of the servers."""

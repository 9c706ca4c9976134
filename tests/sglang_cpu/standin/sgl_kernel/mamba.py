"""The kernels of linear-attention layers that SGLang imports by name without a GPU."""

import torch
from prfaas_sglang_cpu.delta_rule import conv1d_decode, conv1d_prefill

from sgl_kernel import missing

causal_conv1d_fn_cpu = conv1d_prefill
causal_conv1d_update_cpu = conv1d_decode
chunk_gated_delta_rule_cpu = missing("chunk_gated_delta_rule_cpu")

#: Looked up when modules are imported, and called by models that are not served here.
for _name in ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"):
    setattr(torch.ops.sgl_kernel, _name, missing(_name))

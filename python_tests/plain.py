"""The operators as one would write them in torch, in the weights' type throughout.

Not an oracle: the measure of rounding. A backend may be at most twice as far from the reference
as this is (`backends.assert_close_as_torch`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def project_hidden(hidden: Tensor, hidden_proj: Tensor) -> Tensor:
    h = hidden.to(hidden_proj.dtype)
    a_h, a_g = hidden_proj
    return h @ a_h.T + h.mean(dim=1, keepdim=True) @ a_g.T


def causal_mix(x: Tensor, mixer: Tensor) -> Tensor:
    lower = mixer.to(x.dtype).movedim(-1, 0).tril()  # [r,B,B]
    return torch.einsum("ckj,njc->nkc", lower, x)


def fuse_mix(context: Tensor, prev: Tensor, token_table: Tensor, mixer: Tensor) -> Tensor:
    return context.to(token_table.dtype) + causal_mix(token_table[prev], mixer)


def refiner_mlp(c: Tensor, mlp_gate_up: Tensor, mlp_down: Tensor) -> Tensor:
    c = c.to(mlp_down.dtype)
    gate, up = (c @ mlp_gate_up.T).chunk(2, dim=-1)
    return c + (silu(gate) * up) @ mlp_down.T


def refined_logits(z: Tensor, base_logits: Tensor, readout: Tensor) -> Tensor:
    return base_logits.to(readout.dtype) + z @ readout.T

"""The custom ops of recurrent layers: `dspark::causal_conv` and `dspark::gated_delta`.

Their meaning is written in plugins/README.md. What a layer remembers of the past has one size, whatever its length, and
cannot be truncated: both ops give it as it was after each of the last rows, so that a commit can choose.
"""

import torch
from torch import Tensor

from dspark.export.modules.ops import NAMESPACE


def _kept(rows: int, slots: int) -> int:
    """S: how many states a call over `rows` rows of all requests gives for each of them."""
    return torch.sym_min(rows, slots)


@torch.library.custom_op(f"{NAMESPACE}::causal_conv", mutates_args=())
def causal_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    row_start: Tensor,
    length: Tensor,
    bias: Tensor | None = None,
    *,
    slots: int,
) -> tuple[Tensor, Tensor]:
    """Each channel's sum over a row and the K - 1 rows before it (plugins/README.md).

    x [T, C], weight [C, K], state [R, K - 1, C], row_start int32 [R + 1], length int32 [R], bias [C] -> rows like x and
    states [R, S, K - 1, C].
    """
    out, kept = torch.zeros_like(x), _kept(len(x), slots)
    states = state.new_zeros(len(state), kept, *state.shape[1:])
    starts, past = row_start.tolist(), state.shape[1]
    for request, committed in enumerate(length.tolist()):
        first, end = starts[request : request + 2]
        before = state[request] if committed else torch.zeros_like(state[request])
        rows = torch.cat((before.float(), x[first:end].float()))
        for row in range(end - first):
            total = (rows[row : row + past + 1] * weight.T).sum(0)
            out[first + row] = total if bias is None else total + bias
        for slot in range(kept):
            seen = max(end - first - kept + 1 + slot, 0)
            states[request, slot] = rows[seen : seen + past]
    return out, states


@causal_conv.register_fake
def _(x, weight, state, row_start, length, bias=None, *, slots):
    return torch.empty_like(x), state.new_empty(state.shape[0], _kept(x.shape[0], slots), *state.shape[1:])


@torch.library.custom_op(f"{NAMESPACE}::gated_delta", mutates_args=())
def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    row_start: Tensor,
    length: Tensor,
    *,
    slots: int,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, row by row (plugins/README.md).

    q and k [T, Hk, Dk], v [T, Hv, Dv], g and beta [T, Hv], state fp32 [R, Hv, Dk, Dv], row_start int32 [R + 1], length
    int32 [R] -> rows like v and states fp32 [R, S, Hv, Dk, Dv].
    """
    out, kept = torch.zeros_like(v), _kept(len(v), slots)
    states = state.new_zeros(len(state), kept, *state.shape[1:])
    group, starts = v.shape[1] // k.shape[1], row_start.tolist()
    queries, keys = (x.float().repeat_interleave(group, 1).unsqueeze(-2) for x in (q, k))  # [T, Hv, 1, Dk]
    decay, rate = g.float().exp()[..., None, None], beta.float()[..., None, None]
    for request, committed in enumerate(length.tolist()):
        first, end = starts[request : request + 2]
        memory = state[request] if committed else torch.zeros_like(state[request])
        for slot in range(kept - (end - first)):  # before its first row
            states[request, slot] = memory
        for row in range(first, end):
            memory = memory * decay[row]
            error = v[row].float().unsqueeze(-2) - keys[row] @ memory
            memory = memory + keys[row].mT @ (rate[row] * error)
            out[row] = (queries[row] @ memory).squeeze(-2)
            if row >= end - kept:
                states[request, row - end + kept] = memory
    return out, states


@gated_delta.register_fake
def _(q, k, v, g, beta, state, row_start, length, *, slots):
    return torch.empty_like(v), state.new_empty(state.shape[0], _kept(v.shape[0], slots), *state.shape[1:])

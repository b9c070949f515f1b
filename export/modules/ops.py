"""The two custom ops: `dspark::block_attention` and `dspark::markov_argmax`.

Their meaning is written in plugins/README.md. Here they are plain torch, correct before fast, so that the eager modules
run them and torch.export sees one node each (the fake kernels give it the shapes). `export/functions/` says the same in
ONNX, `export/lowering/` in a backend's own ops, and tests/reference.py in float64; one table of cases holds all to it.
"""

import torch
from torch import Tensor
from torch.nn import functional

NAMESPACE = "dspark"
VERSION = 1


def _cache_rows(cache: Tensor, pages: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Page and row in the page of one request's cache rows first..last-1; cache [P, Hkv, C, D], pages int32 [N]."""
    rows = torch.arange(first, last, device=cache.device)
    return pages[rows // cache.shape[2]].long(), rows % cache.shape[2]


@torch.library.custom_op("dspark::block_attention", mutates_args=())
def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    row_start: Tensor,
    length: Tensor,
    pages: Tensor,
    context_k: Tensor | None = None,
    context_v: Tensor | None = None,
    context_start: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    causal: bool,
    window: int = 0,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of every request's block rows over its cached rows and its own block (plugins/README.md).

    q [T, Hq, D], k and v [T, Hkv, D], caches [P, Hkv, C, D], row_start int32 [R+1], length int32 [R], pages int32
    [R, N], context_k and context_v [Tc, Hkv, D], context_start int32 [R+1], sinks fp32 [Hq] -> rows like q and the two
    updated caches.
    """
    out, key_cache, value_cache = torch.zeros_like(q), key_cache.clone(), value_cache.clone()
    starts = row_start.tolist()
    context_starts = [0] * len(starts) if context_start is None else context_start.tolist()

    def append(request: int, at: int, new_k: Tensor, new_v: Tensor) -> None:
        page, row = _cache_rows(key_cache, pages[request], at, at + len(new_k))
        key_cache[page, :, row], value_cache[page, :, row] = new_k, new_v

    for request, committed in enumerate(length.tolist()):
        context = slice(context_starts[request], context_starts[request + 1])
        block = slice(starts[request], starts[request + 1])
        if context_k is not None and context_v is not None:
            append(request, committed, context_k[context], context_v[context])
        committed += context.stop - context.start
        if causal:
            append(request, committed, k[block], v[block])
        # Rows in front of every window are not gathered: in a ring newer ones lie in their places.
        first = max(0, committed - window + (1 if causal else 0)) if window else 0
        page, row = _cache_rows(key_cache, pages[request], first, committed)
        keys = torch.cat((key_cache[page, :, row], k[block])).float()
        values = torch.cat((value_cache[page, :, row], v[block])).float()

        key_at = first + torch.arange(len(keys), device=q.device)
        query_at = committed + torch.arange(block.stop - block.start, device=q.device)[:, None]
        if causal:
            seen = (key_at <= query_at) & ((key_at > query_at - window) if window else True)
        else:
            seen = ((key_at >= committed - window) if window else (key_at >= 0)).expand(len(query_at), -1)
        group = q.shape[1] // k.shape[1]
        queries = q[block].float().unflatten(1, (-1, group))
        scores = torch.einsum("thgd,shd->hgts", queries, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:  # one more key, whose value is nothing
            column = sinks.view(k.shape[1], group, 1, 1).expand(-1, -1, len(query_at), -1)
            probabilities = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
        else:
            probabilities = scores.softmax(-1)
        out[block] = torch.einsum("hgts,shd->thgd", probabilities, values).flatten(1, 2).to(q.dtype)
    return out, key_cache, value_cache


@block_attention.register_fake
def _(q, k, v, key_cache, value_cache, *_args, **_attributes):
    return torch.empty_like(q), torch.empty_like(key_cache), torch.empty_like(value_cache)


@torch.library.custom_op("dspark::markov_argmax", mutates_args=())
def markov_argmax(
    base_logits: Tensor,
    anchors: Tensor,
    hidden: Tensor,
    w1: Tensor | None = None,
    w2: Tensor | None = None,
    head_weight: Tensor | None = None,
    head_bias: Tensor | None = None,
    confidence_weight: Tensor | None = None,
    confidence_bias: Tensor | None = None,
    d2t: Tensor | None = None,
    noise: Tensor | None = None,
    temperature: Tensor | None = None,
    *,
    head: str,
    confidence_with_markov: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The Markov chain of argmaxes from each anchor on (plugins/README.md).

    base_logits [R, G, Vd], anchors int64 [R], hidden [R, G, H], noise fp32 [R, G, Vd], temperature fp32 [R] -> tokens
    int64 [R, G], confidence fp32 [R, G] (ones without a confidence head) and corrected logits fp32 [R, G, Vd].
    """
    if (noise is None) != (temperature is None):
        raise ValueError("noise and temperature: give both, or neither")
    requests, gamma, _ = base_logits.shape
    previous, state = anchors, None if w1 is None else hidden.new_zeros(requests, w1.shape[1])
    tokens, confidences, logits = [], [], []
    for k in range(gamma):
        at, corrected = hidden[:, k], base_logits[:, k].float()
        embedding = None if w1 is None else w1[previous]
        if head != "none":
            assert embedding is not None and state is not None and w2 is not None
            state, e = _head_step(head, state, embedding, at, head_weight, head_bias)
            corrected = corrected + functional.linear(e, w2).float()
        if confidence_weight is None:
            confidences.append(corrected.new_ones(requests))
        else:
            x = torch.cat((at, embedding), -1) if confidence_with_markov and embedding is not None else at
            logit = x.float() @ confidence_weight.float()
            confidences.append(torch.sigmoid(logit if confidence_bias is None else logit + confidence_bias.float()))
        previous = _score(corrected, None if noise is None else noise[:, k], temperature).argmax(-1)
        if d2t is not None:
            previous = previous + d2t[previous]
        tokens.append(previous)
        logits.append(corrected)
    return torch.stack(tokens, 1), torch.stack(confidences, 1), torch.stack(logits, 1)


def _score(logits: Tensor, noise: Tensor | None, temperature: Tensor | None) -> Tensor:
    """What each token is the argmax of, from corrected logits and noise [R, Vd] and temperature [R]."""
    if noise is None or temperature is None:
        return logits
    drawn = temperature[:, None] > 0
    return torch.where(drawn, logits / torch.where(drawn, temperature[:, None], 1.0) + noise, logits)


def _head_step(
    head: str, state: Tensor, embedding: Tensor, hidden: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(state [R, r], W1[prev] [R, r], h_k [R, H]) -> (next state, e_k [R, r]); see modules/markov.py."""
    if head == "vanilla":
        return state, embedding
    assert weight is not None
    if head == "gated":
        return state, torch.sigmoid(functional.linear(torch.cat((hidden, embedding), -1), weight, bias)) * embedding
    joint = functional.linear(torch.cat((state, embedding, hidden), -1), weight, bias)
    gate, candidate, output = joint.chunk(3, dim=-1)
    gate = torch.sigmoid(gate)
    return gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)


@markov_argmax.register_fake
def _(base_logits, anchors, hidden, *_args, **_attributes):
    requests, gamma, _ = base_logits.shape
    return (
        anchors.new_empty(requests, gamma),
        base_logits.new_empty(requests, gamma, dtype=torch.float32),
        base_logits.new_empty(base_logits.shape, dtype=torch.float32),
    )

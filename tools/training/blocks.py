"""The drafter over batches of stored texts: block attention with dense masks, losses, and simulated decoding."""

import torch
from torch import Tensor

from dspark.export.modules import Drafter
from dspark.export.modules.backbone import Attend

from .batches import Batch, Sampler
from .features import Text
from .loss import DistributionLoss, confidence_loss


def dense_attend(anchors: Tensor, gamma: int, windows: tuple[int, ...]) -> Attend:
    """Block attention for training: block a of a text sees context rows before its anchor, and its own rows.

    anchors [B, A]; q, k, v [B, A*gamma, heads, D]; context [B, S, heads, D].
    """
    batch, count = anchors.shape

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        heads, dim, groups = q.shape[-2], q.shape[-1], q.shape[-2] // k.shape[-2]
        context = context_k.shape[1]
        column = torch.arange(context, device=q.device)
        seen = column < anchors[..., None]
        if windows and windows[layer]:
            seen &= column >= anchors[..., None] - windows[layer]

        def grouped(x: Tensor) -> Tensor:  # [B, T, Hkv, D] -> [B, Hkv, T, D]
            return x.transpose(1, 2)

        kv = k.shape[-2]
        queries = q.unflatten(-2, (kv, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G*T, D]
        scale = dim**-0.5
        outer = (queries @ grouped(context_k).transpose(-1, -2)) * scale
        outer = outer.view(batch, kv, groups, count, gamma, context)
        outer = outer.masked_fill(~seen[:, None, None, :, None, :], -torch.inf)
        blocks = queries.view(batch, kv, groups, count, gamma, dim)
        own_k, own_v = (grouped(x).view(batch, kv, 1, count, gamma, dim) for x in (k, v))
        inner = (blocks @ own_k.transpose(-1, -2)) * scale
        p = torch.cat((outer, inner), dim=-1).float().softmax(-1).to(q.dtype)
        mixed = p[..., :context].reshape(batch, kv, -1, context) @ grouped(context_v)
        mixed = mixed.view(batch, kv, groups, count, gamma, dim) + p[..., context:] @ own_v
        return mixed.permute(0, 3, 4, 1, 2, 5).reshape(batch, count * gamma, heads, dim)

    return attend


def block_states(drafter: Drafter, batch: Batch) -> Tensor:
    """Hidden states [B*A, gamma, H] of every block of a batch."""
    b, a, gamma = batch.tokens.shape
    device = batch.tokens.device
    positions = (batch.anchors[..., None] + torch.arange(gamma, device=device)).flatten(1)
    context_positions = torch.arange(batch.taps.shape[1], device=device).expand(b, -1)
    attend = dense_attend(batch.anchors, gamma, drafter.config.windows)
    hidden = drafter.hidden(batch.tokens.flatten(1), batch.taps, positions, context_positions, attend)
    return hidden.view(b * a, gamma, -1)


def losses(drafter: Drafter, batch: Batch, lm_head: Tensor, objective: str) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, L1 distance [N], confidence logits [N] or empty) of a batch on the drafter's device.

    lm_head [Vd, H] is the frozen head in the dtype that the logits are computed in (bf16). The confidence loss trains
    the confidence head alone: a small backbone has nothing to spare for it.
    """
    gamma = batch.tokens.shape[-1]
    with torch.autocast(lm_head.device.type, dtype=torch.bfloat16):
        hidden = block_states(drafter, batch)
        previous = batch.previous.view(-1, gamma)
        x, w2, markov = hidden.flatten(0, 1), None, drafter.markov_head
        if markov is not None:
            e = markov.teacher_forced(previous, hidden)
            x = torch.cat((x, e.flatten(0, 1).to(x.dtype)), dim=-1)
            w2 = markov.markov_w2.weight
        loss, distance = DistributionLoss.apply(x.to(lm_head.dtype), lm_head, w2, batch.targets, objective)
    logits = torch.empty(0)
    if drafter.confidence_head is not None:
        embedding = None if markov is None else markov.markov_w1(previous).detach()
        logits = drafter.confidence_head.logit(hidden.detach().float(), embedding).flatten()
        loss = loss + confidence_loss(logits, distance, batch.targets.weight)
    return loss, distance, logits


@torch.no_grad()
def simulate(drafter: Drafter, sampler: Sampler, texts: list[Text], lm_head: Tensor) -> dict:
    """Greedy decoding of stored greedy texts: accepted drafts per round, walking from anchor to anchor.

    Returns {"rounds", "accepted", "acceptance_length", "per_position": acceptance given that all before were accepted}.
    """
    gamma = drafter.config.block_size
    reached, kept = torch.zeros(gamma), torch.zeros(gamma)
    rounds = accepted = emitted = 0
    for text in texts:
        anchors = torch.arange(text.prompt, text.length - 1)
        drafts = greedy_drafts(drafter, sampler.collate([text], anchors[None]).to(lm_head.device), lm_head).cpu()
        tokens = sampler.features.tokens[text.start : text.start + text.length].long()
        at = anchors[:, None] + 1 + torch.arange(gamma)  # where each draft would stand
        right = (drafts == tokens[at.clamp(max=text.length - 1)]) & (at < text.length)
        prefix = right.int().cumprod(1).sum(1).tolist()
        i = 0
        while i < len(anchors):
            n, left = prefix[i], len(anchors) - i
            reached[: min(n + 1, gamma, left)] += 1
            kept[:n] += 1
            rounds, accepted, emitted = rounds + 1, accepted + n, emitted + min(n + 1, left)
            i += n + 1
    rates = [round(float(k / r), 4) if r else 0.0 for k, r in zip(kept, reached, strict=True)]
    return {
        "rounds": rounds,
        "accepted": accepted,
        "acceptance_length": emitted / max(1, rounds),
        "per_position": rates,
    }


def greedy_drafts(drafter: Drafter, batch: Batch, lm_head: Tensor) -> Tensor:
    """Draft tokens int64 [B*A, gamma] of every block, each position fed the draft before it."""
    with torch.autocast(lm_head.device.type, dtype=torch.bfloat16):
        hidden = block_states(drafter, batch)
        base = (hidden.to(lm_head.dtype) @ lm_head.T).float()
    markov = drafter.markov_head
    previous = batch.tokens[..., 0].flatten()
    state = markov.start(hidden) if markov is not None else hidden.new_empty(0)
    drafts = []
    for k in range(base.shape[1]):
        logits = base[:, k]
        if markov is not None:
            state, e = markov.step(state, markov.markov_w1(previous), hidden[:, k].float())
            logits = logits + markov.markov_w2(e.float())
        index = logits.argmax(-1)
        previous = index if drafter.d2t is None else index + drafter.d2t[index]
        drafts.append(previous)
    return torch.stack(drafts, dim=1)

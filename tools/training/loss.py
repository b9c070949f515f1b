"""The training objective over a block's positions (DSpark, section 3.3).

    0.1 * cross-entropy + 0.9 * ||p_draft - p_target||_1 + 1.0 * BCE(confidence, 1 - 0.5 * ||p_draft - p_target||_1)

or, as DeepSpec trains DFlash, cross-entropy alone. Weighted per position by exp(-(k - 1) / decay). Logits over the
vocabulary are the largest tensors of the training by far, so the distribution part computes its own gradient chunk by
chunk and never holds them all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

OBJECTIVES = {"dspark": (0.1, 0.9), "dflash": (1.0, 0.0)}  # the weights of cross-entropy and of the L1 distance
CHUNK = 128  # rows; keeps a chunk's logits in the last-level cache


@dataclass(frozen=True)
class Targets:
    """For N predicted positions: the target's sparse distribution and the token that followed.

    ids int64 [N, K]: draft-vocabulary index, or draft_vocab_size where the token is outside of it; probs fp32 [N, K];
    label int64 [N], likewise; weight fp32 [N], 0 for positions past the end of the text.
    """

    ids: Tensor
    probs: Tensor
    label: Tensor
    weight: Tensor

    def to(self, device: torch.device) -> "Targets":
        return Targets(*(part.to(device) for part in (self.ids, self.probs, self.label, self.weight)))


class DistributionLoss(torch.autograd.Function):
    """(x [N, F], lm_head [Vd, H], w2 [Vd, r] or None, targets, objective) -> (weighted loss, L1 distance [N]).

    The distance has no gradient of its own. `objective` is a key of OBJECTIVES.

    x is the hidden state, or [h ; e] with the Markov head's e, F = H (+ r); logits = x [lm_head | w2]^T. lm_head is the
    target's and frozen: it gets no gradient.
    """

    @staticmethod
    def forward(ctx, x: Tensor, lm_head: Tensor, w2: Tensor | None, targets: Targets, objective: str):
        ce, tv = OBJECTIVES[objective]
        head = lm_head if w2 is None else torch.cat((lm_head, w2.to(lm_head.dtype)), dim=1)
        rows, vocab = x.shape[0], head.shape[0]
        grad_x = torch.empty_like(x)
        grad_w2 = None if w2 is None else torch.zeros_like(w2)
        distance = torch.empty(rows, device=x.device)
        loss = torch.zeros((), dtype=torch.float64, device=x.device)
        for start in range(0, rows, CHUNK):
            part = slice(start, start + CHUNK)
            p = (x[part] @ head.T).float().softmax(-1)
            n = p.shape[0]
            t = torch.zeros(n, vocab + 1, device=x.device).scatter_(1, targets.ids[part], targets.probs[part])[
                :, :vocab
            ]
            label, weight = targets.label[part].clamp(max=vocab - 1), targets.weight[part]
            known = (targets.label[part] < vocab).float()
            cross_entropy = -known * p.gather(1, label[:, None]).squeeze(1).clamp_min(1e-30).log()
            difference = p - t
            sign = difference.sign()
            distance[part] = difference.abs_().sum(-1) + (1 - t.sum(-1)).clamp_(min=0)
            loss += (weight * (ce * cross_entropy + tv * distance[part])).sum()
            # With s = sign(p - t): d L1 / dz = p * (s - <p, s>); d CE / dz = p - onehot(label).
            grad = sign.sub_((p * sign).sum(-1, keepdim=True)).mul_(tv)
            grad = grad.add_(ce * known[:, None]).mul_(p)
            grad[torch.arange(n, device=x.device), label] -= ce * known
            grad = grad.mul_(weight[:, None]).to(x.dtype)
            grad_x[part] = grad @ head
            if grad_w2 is not None:
                grad_w2 += grad.T @ x[part, lm_head.shape[1] :]
        ctx.save_for_backward(grad_x, grad_w2)
        ctx.mark_non_differentiable(distance)
        return loss.float(), distance

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _):
        grad_x, grad_w2 = ctx.saved_tensors
        return grad_x * grad_loss, None, None if grad_w2 is None else grad_w2 * grad_loss, None, None


def confidence_loss(logits: Tensor, distance: Tensor, weight: Tensor) -> Tensor:
    """Weighted BCE of the confidence logits [N] against the acceptance chance 1 - L1/2 of the same positions."""
    label = (1 - 0.5 * distance).clamp(0, 1)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, label, reduction="none")
    return (weight * losses).sum()

"""What the exported graphs have to reproduce: the torch models run eagerly on a small scripted decoding session.

The reference knows nothing of caches, pages or custom ops. The target is transformers' own model with its own eager
attention, run over a request's whole history at every step; the drafter is our torch module with dense attention over
its whole context. Every cached row of a graph is therefore checked through the later rows that read it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.export.config import DrafterConfig
from dspark.export.modules import Drafter
from dspark.export.parity_script import Step, Turn
from dspark.export.target import ATTENTION, Target


def record_target(target: Target, target_layer_ids: Sequence[int], steps: list[Step]) -> None:
    """Fill in logits and taps of every turn from transformers' own model with its own attention."""
    history: dict[int, list[int]] = {}
    target.model.set_attn_implementation("eager")
    try:
        for turn in (turn for step in steps for turn in step):
            past = history.setdefault(turn.request, [])
            tokens, n = torch.tensor([past + turn.tokens.tolist()]), len(turn.tokens)
            with torch.inference_mode():
                out = target.model(tokens, use_cache=False, output_hidden_states=True, logits_to_keep=n)
            turn.logits = out.logits[0].float().numpy()
            tapped = [out.hidden_states[layer + 1][0, -n:].float() for layer in target_layer_ids]
            turn.taps = torch.cat(tapped, dim=-1).numpy()
            past += turn.tokens[: turn.commit].tolist()
    finally:
        target.model.set_attn_implementation(ATTENTION)


def record_drafter(drafter: Drafter, steps: list[Step]) -> None:
    """Fill in block, hidden states and base logits of every turn; the target's part must be recorded already."""
    context: dict[int, list[np.ndarray]] = {}
    for turn in (turn for step in steps for turn in step):
        seen = context.setdefault(turn.request, [])
        seen.append(turn.context_taps)
        turn.block = np.full(turn.block_rows, drafter.config.mask_token_id, dtype=np.int64)
        turn.block[0] = turn.logits[turn.commit - 1].argmax()
        positions = torch.arange(turn.committed + turn.block_rows)
        with torch.inference_mode():
            turn.hidden = drafter.hidden(
                torch.from_numpy(turn.block),
                torch.from_numpy(np.concatenate(seen)),
                positions[turn.committed :],
                positions[: turn.committed],
                DenseAttention(drafter.config),
            )
            turn.base_logits = drafter.lm_head(turn.hidden).float()


class DenseAttention:
    """A block's attention over the last `window` context rows and the whole block, spelled out."""

    def __init__(self, config: DrafterConfig):
        self.config = config

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        """q [G, Hq, D]; k, v [G, Hkv, D]; context [Tc, Hkv, D] -> [G, Hq, D]."""
        first = -self.config.window(layer)  # -0 keeps every row
        keys, values = torch.cat((context_k[first:], k)), torch.cat((context_v[first:], v))
        group = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        scores = torch.einsum("ghd,nhd->hgn", q, keys) * self.config.head_dim**-0.5
        return torch.einsum("hgn,nhd->ghd", scores.softmax(dim=-1), values)


class Heads:
    """The drafter's Markov and confidence heads alone, so that the backbone can be freed before the graphs run."""

    def __init__(self, drafter: Drafter):
        self.markov, self.confidence, self.d2t = drafter.markov_head, drafter.confidence_head, drafter.d2t
        self.vocab_size = drafter.config.vocab_size

    def token(self, index: np.ndarray) -> np.ndarray:
        """The tokens that draft indices stand for."""
        return index if self.d2t is None else index + self.d2t.numpy()[index]

    def follow(self, turn: Turn, drafted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Corrected logits [G, Vd], best tokens [G] and confidences [G] (None without a head), each position given
        the tokens that the graph itself `drafted` [G] before it, so that a near-tie does not spoil what follows."""
        # A token outside the vocabulary fails the comparison later; here it must only not break the look-up.
        before = np.concatenate((turn.block[:1], drafted[:-1])).clip(0, self.vocab_size - 1)
        previous = torch.from_numpy(before)[None]
        hidden, logits, embedding = turn.hidden[None], turn.base_logits[None], None
        with torch.inference_mode():
            if self.markov is not None:
                embedding = self.markov.markov_w1(previous)
                logits = logits + self.markov.markov_w2(self.markov.teacher_forced(previous, hidden)).float()
            confidence = None
            if self.confidence is not None:
                confidence = self.confidence.logit(hidden, embedding).sigmoid()[0].numpy()
        corrected = logits[0].numpy()
        return corrected, self.token(turn.scores(corrected).argmax(-1)), confidence

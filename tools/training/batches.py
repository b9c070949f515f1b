"""Batches of the training: random anchors in random texts, a pure function of (seed, step)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import UsageError
from dspark.export.config import DrafterConfig

from .features import Features, Text
from .loss import Targets


@dataclass(frozen=True)
class Recipe:
    """Sizes are per step: `texts` texts with `anchors` random anchors each, every anchor a block of gamma positions."""

    steps: int = 5000
    texts: int = 8
    anchors: int = 32
    learning_rate: float = 1e-3
    objective: str = "dspark"  # see loss.OBJECTIVES
    warmup: int = 100
    cooldown: float = 0.3  # the last share of the steps, over which the rate falls to 0
    decay: float = 4.0  # of the position weights exp(-(k - 1) / decay)
    seed: int = 0
    max_context: int = 512  # tokens of a text that anchors are drawn from

    def rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, constant, linear cool-down."""
        cooldown = max(1, int(self.steps * self.cooldown))
        return self.learning_rate * min((step + 1) / self.warmup, max(0, self.steps - step) / cooldown, 1.0)


@dataclass(frozen=True)
class Batch:
    """B texts, A anchors each, S context rows, gamma = block positions; N = B * A * gamma."""

    taps: Tensor  # bf16 [B, S, m*H]
    anchors: Tensor  # int64 [B, A]
    tokens: Tensor  # int64 [B, A, gamma]: the block's inputs, anchor first
    previous: Tensor  # int64 [B, A, gamma]: the text's own tokens at the block's positions
    targets: Targets

    def to(self, device: torch.device) -> "Batch":
        taps, anchors, tokens, previous = (
            part.to(device) for part in (self.taps, self.anchors, self.tokens, self.previous)
        )
        return Batch(taps, anchors, tokens, previous, self.targets.to(device))


class Sampler:
    """Draws batches from stored features, on the CPU; the draw of a step depends only on (seed, step)."""

    def __init__(self, features: Features, config: DrafterConfig, recipe: Recipe):
        self.features, self.config, self.recipe = features, config, recipe
        self.texts = [t for t in features.texts if t.length - t.prompt >= 2]
        if not self.texts:
            raise UsageError(f"{features.folder}: no response has the two tokens that a block needs")
        self.to_draft = torch.full((config.vocab_size,), config.draft_vocab_size, dtype=torch.int64)
        self.weights = torch.exp(-torch.arange(config.block_size) / recipe.decay)

    def set_vocabulary(self, d2t: Tensor | None) -> None:
        """Tell which tokens the drafter can propose: d2t int64 [Vd] of offsets, None for all."""
        index = torch.arange(self.config.draft_vocab_size)
        self.to_draft[index if d2t is None else index + d2t] = index

    def anchors_of(self, text: Text, generator: torch.Generator) -> Tensor:
        first, last = text.prompt, min(text.length, self.recipe.max_context) - 2
        return torch.randint(first, max(first, last) + 1, (self.recipe.anchors,), generator=generator)

    def batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + step)
        picks = torch.randint(len(self.texts), (self.recipe.texts,), generator=generator)
        texts = [self.texts[i] for i in picks]
        return self.collate(texts, torch.stack([self.anchors_of(t, generator) for t in texts]))

    def collate(self, texts: list[Text], anchors: Tensor) -> Batch:
        """The blocks at `anchors` [B, A] (indices into their texts); positions past a text's end get weight 0."""
        gamma, f = self.config.block_size, self.features
        context = int(anchors.max())
        rows = torch.arange(context)
        starts = torch.tensor([t.start for t in texts])
        ends = torch.tensor([t.start + t.length for t in texts])
        taps = f.taps[torch.minimum(starts[:, None] + rows, ends[:, None] - 1)]
        at = starts[:, None, None] + anchors[:, :, None] + torch.arange(gamma)  # row of each block position
        valid = at + 1 < ends[:, None, None]
        at = torch.minimum(at, ends[:, None, None] - 1)
        previous = f.tokens[at].long()
        tokens = torch.full_like(previous, self.config.mask_token_id)
        tokens[..., 0] = previous[..., 0]
        following = f.tokens[torch.minimum(at + 1, ends[:, None, None] - 1)].long()
        weight = (self.weights * valid).flatten()
        targets = Targets(
            ids=self.to_draft[f.top_ids[at].long()].flatten(0, 2),
            probs=f.top_probs[at].float().flatten(0, 2),
            label=self.to_draft[following].flatten(),
            weight=weight / weight.sum(),
        )
        return Batch(taps, anchors, tokens, previous, targets)

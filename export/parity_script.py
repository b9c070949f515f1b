"""The decoding session that graphs are compared on. No torch: `dspark verify` runs it where a bundle is used."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

TEMPERATURE = 1.25  # of what is drawn; above 1, so that errors of scores are no larger than those of logits


@dataclass
class Turn:
    """What one request does in one step: verify `tokens` after `length` committed ones, keep `commit` of them, draft.

    tokens int64 [n]; the target's reference logits fp32 [n, V] and taps fp32 [n, m*H]; the draft's block int64 [G]
    (anchor, then masks) and the drafter's reference hidden states fp32 [G, H] and base logits fp32 [G, Vd], in torch.
    A block is greedy, or drawn at a temperature with noise fp32 [G, Vd]; a greedy one's is NaN, since nothing reads it.
    """

    request: int
    tokens: np.ndarray
    length: int
    commit: int
    prompt: bool  # rows of a prompt, not of a verified block
    block_rows: int
    temperature: float
    noise: np.ndarray
    logits: np.ndarray = field(default_factory=lambda: np.empty(0))
    taps: np.ndarray = field(default_factory=lambda: np.empty(0))
    block: np.ndarray = field(default_factory=lambda: np.empty(0))
    hidden: Any = None
    base_logits: Any = None

    @property
    def committed(self) -> int:
        """Tokens committed after this turn: the anchor's position."""
        return self.length + self.commit

    def scores(self, logits: np.ndarray) -> np.ndarray:
        """What the drafts are the argmaxes of, for corrected logits [n, Vd] of the block's first n positions."""
        return logits / self.temperature + self.noise[: len(logits)] if self.temperature else logits

    @property
    def context_taps(self) -> np.ndarray:
        return self.taps[: self.commit]


Step = list[Turn]


def script(vocab_size: int, block_size: int, draft_vocab_size: int, seed: int = 0) -> list[Step]:
    """Two requests, each prefilled in two chunks, then verifying blocks of which all, some or one token is kept.

    The first one's drafts are greedy, the second one's drawn.

    The sizes cover what a graph may have specialised on: ragged requests, one row, one request, one context row, blocks
    of 1, block_size - 1 and block_size, and rows that a later step has to overwrite.
    """
    full = block_size + 1
    rows = (  # per step and request: (new rows, of which committed)
        ((17, 17), (4, 4)),
        ((7, 7), (20, 20)),
        ((full, 2), (1, 1)),
        ((full, full), (3, 1)),
        ((1, 1), (full, full)),
        ((full, 1),),
    )
    blocks = (block_size, block_size, 1, max(1, block_size - 1), block_size, 1)
    draw = np.random.default_rng(seed)
    lengths = [0, 0]
    steps = []
    for i, (sizes, block_rows) in enumerate(zip(rows, blocks, strict=True)):
        step = []
        for request, (new, commit) in enumerate(sizes):
            tokens = draw.integers(0, vocab_size, new)
            drawn, shape = request == 1, (block_rows, draft_vocab_size)
            noise = draw.gumbel(size=shape) if drawn else np.full(shape, np.nan)
            step.append(
                Turn(
                    request, tokens, lengths[request], commit, prompt=i < 2, block_rows=block_rows,
                    temperature=TEMPERATURE if drawn else 0.0, noise=noise.astype(np.float32),
                )
            )  # fmt: skip
            lengths[request] += commit
        steps.append(step)
    return steps

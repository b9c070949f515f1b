"""The decoding session that graphs are compared on. No torch: `dspark verify` runs it where a bundle is used."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Turn:
    """What one request does in one step: verify `tokens` after `length` committed ones, keep `commit` of them, draft.

    tokens int64 [n]; the target's reference logits fp32 [n, V] and taps fp32 [n, m*H]; the draft's block int64 [G]
    (anchor, then masks) and the drafter's reference hidden states fp32 [G, H] and base logits fp32 [G, Vd], in torch.
    """

    request: int
    tokens: np.ndarray
    length: int
    commit: int
    prompt: bool  # rows of a prompt, not of a verified block
    block_rows: int
    logits: np.ndarray = field(default_factory=lambda: np.empty(0))
    taps: np.ndarray = field(default_factory=lambda: np.empty(0))
    block: np.ndarray = field(default_factory=lambda: np.empty(0))
    hidden: Any = None
    base_logits: Any = None

    @property
    def committed(self) -> int:
        """Tokens committed after this turn: the anchor's position."""
        return self.length + self.commit

    @property
    def context_taps(self) -> np.ndarray:
        return self.taps[: self.commit]


Step = list[Turn]


def script(vocab_size: int, block_size: int, seed: int = 0) -> list[Step]:
    """Two requests, each prefilled in two chunks, then verifying blocks of which all, some or one token is kept.

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
            step.append(Turn(request, tokens, lengths[request], commit, prompt=i < 2, block_rows=block_rows))
            lengths[request] += commit
        steps.append(step)
    return steps

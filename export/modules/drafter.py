"""The whole drafter: backbone, shared embedding and head, Markov head, confidence head."""

import torch
from torch import Tensor, nn

from dspark.export.config import DrafterConfig

from .backbone import Attend, Backbone
from .confidence import ConfidenceHead
from .markov import HEADS


class Drafter(Backbone):
    """Parameters are named as in DeepSpec's checkpoints; `embed_tokens` and `lm_head` may be the target's tensors."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.markov_head = None if config.markov_head_type == "none" else HEADS[config.markov_head_type](config)
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        if config.reduced_vocab:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        else:
            self.d2t = None

    def hidden(
        self, tokens: Tensor, taps: Tensor, positions: Tensor, context_positions: Tensor, attend: Attend
    ) -> Tensor:
        """Hidden states [..., T, H] of block tokens [..., T] after taps [..., Tc, m*H]."""
        return self(self.embed_tokens(tokens), self.context(taps), positions, context_positions, attend)

"""The confidence head (DSpark, equation 7): the chance that x_k is accepted, given that all before it were."""

import torch
from torch import Tensor, nn

from dspark.export.config import DrafterConfig


class ConfidenceHead(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def logit(self, hidden: Tensor, embedding: Tensor | None) -> Tensor:
        """Logits [..., ] in fp32 for h_k [..., H] and W1[prev_k] [..., r] (None where the head has no Markov part)."""
        if self.with_markov:
            assert embedding is not None
            hidden = torch.cat((hidden, embedding), dim=-1)
        bias = None if self.proj.bias is None else self.proj.bias.float()
        return nn.functional.linear(hidden.float(), self.proj.weight.float(), bias).squeeze(-1)

"""The Markov heads: what the token before adds to a position's base logits (DSpark, equations 4 to 6).

Every head maps (state, W1[prev], h_k) to (state, e_k) with e_k of rank r; the corrected logits are U_k + W2 e_k.
"""

import torch
from torch import Tensor, nn

from dspark.export.config import DrafterConfig


class MarkovHead(nn.Module):
    """vanilla: e = W1[prev]."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def start(self, hidden: Tensor) -> Tensor:
        """The state before the first position, [R, r], for hidden [R, gamma, H]."""
        return hidden.new_zeros(hidden.shape[0], self.markov_w1.embedding_dim)

    def step(self, state: Tensor, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(state [R, r], W1[prev] [R, r], h_k [R, H]) -> (next state, e_k [R, r])."""
        return state, embedding

    def teacher_forced(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """e [R, gamma, r] for known previous tokens [R, gamma] and hidden states [R, gamma, H]."""
        state, rows = self.start(hidden), []
        embedding = self.markov_w1(previous)
        for k in range(previous.shape[1]):
            state, e = self.step(state, embedding[:, k], hidden[:, k])
            rows.append(e)
        return torch.stack(rows, dim=1)


class GatedMarkovHead(MarkovHead):
    """gated: e = sigmoid(G [h_k ; W1[prev]] + b) * W1[prev]."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(self, state: Tensor, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedding), dim=-1)))
        return state, gate * embedding


class RnnMarkovHead(MarkovHead):
    """rnn: gate, candidate and output from one linear map of [s ; W1[prev] ; h_k]; e = tanh(output)."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        rank = config.markov_rank
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def step(self, state: Tensor, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        joint = self.joint_proj(torch.cat((state, embedding, hidden), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)


HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RnnMarkovHead}

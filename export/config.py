"""What a drafter is, whatever dialect its checkpoint speaks."""

from dataclasses import dataclass, field

MARKOV_HEADS = ("vanilla", "gated", "rnn", "none")


@dataclass(frozen=True)
class DrafterConfig:
    """The canonical description of a DSpark drafter; every dialect loader returns one.

    Sizes are element counts, windows are tokens (0 = unlimited). `target_layer_ids` are tap ids: id i is the output
    of target layer i, -1 the embedding output. `draft_vocab_size` < `vocab_size` means that the head proposes a subset
    of the target's tokens: draft index i stands for token i + d2t[i].
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope: dict  # as transformers spells it: {"rope_type": "default", "rope_theta": 1e6, ...}
    max_position_embeddings: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    markov_head_type: str = "none"
    markov_rank: int = 0
    confidence: bool = False
    confidence_with_markov: bool = False
    layout: str = "anchor-first"
    windows: tuple[int, ...] = field(default=())  # per layer; empty = all unlimited

    @property
    def num_taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

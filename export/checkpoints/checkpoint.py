"""What every dialect loader returns."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.export.config import DrafterConfig

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A drafter as its checkpoint describes it, in canonical form.

    `tensors` are named as the parameters of `dspark.export.modules.Drafter`, memory-mapped in the checkpoint's dtype;
    EMBEDDING and HEAD are absent where the drafter uses the target's. `ignored` tensors carry no information.
    """

    dialect: str
    folder: Path
    config: DrafterConfig
    tensors: dict[str, "Tensor"]
    ignored: tuple[str, ...]
    files: tuple[Path, ...]  # everything that was read


def canonical_shapes(config: DrafterConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that a drafter of this config is made of, EMBEDDING and HEAD included, with its shape.

    One after another, and without making the modules: nobody has compared the config's sizes with the file's yet, and
    what a wrong one describes may be larger than any memory.
    """
    hidden, inner, rank = config.hidden_size, config.intermediate_size, config.markov_rank
    heads, kv_heads = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    vocab, draft_vocab = config.vocab_size, config.draft_vocab_size
    yield "fc.weight", (hidden, config.num_taps * hidden)
    yield "hidden_norm.weight", (hidden,)
    yield "norm.weight", (hidden,)
    yield EMBEDDING, (vocab, hidden)
    yield HEAD, (draft_vocab, hidden)
    if config.reduced_vocab:
        yield "d2t", (draft_vocab,)
    if rank:
        yield "markov_head.markov_w1.weight", (vocab, rank)
        yield "markov_head.markov_w2.weight", (draft_vocab, rank)
    if config.markov_head_type == "gated":
        yield "markov_head.gate_proj.weight", (rank, hidden + rank)
        yield "markov_head.gate_proj.bias", (rank,)
    if config.markov_head_type == "rnn":
        yield "markov_head.joint_proj.weight", (3 * rank, 2 * rank + hidden)
        yield "markov_head.joint_proj.bias", (3 * rank,)
    if config.confidence:
        yield "confidence_head.proj.weight", (1, hidden + (rank if config.confidence_with_markov else 0))
        yield "confidence_head.proj.bias", (1,)
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (config.head_dim,),
        "self_attn.k_norm": (config.head_dim,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for i in range(config.num_hidden_layers):
        for name, shape in layer.items():
            yield f"layers.{i}.{name}.weight", shape

"""The parallel backbone: one forward pass turns [anchor, mask x (gamma-1)] into gamma hidden states.

Keys and values come from two places through the same projections: from the context (the target's tapped hidden states,
fused by `fc`) and from the block itself. Queries come from the block only, and inside the block attention is not
causal (DSpark, section 3.1; dialect DeepSpec). The attention itself is handed in, so that training (dense masks) and
export (the `dspark::block_attention` op with its caches) share every weight and every line around it.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.export.config import DrafterConfig

# attend(layer, q, k, v, context_k, context_v) -> rows like q. q: [..., T, Hq, D]; k, v: [..., T, Hkv, D];
# context_k, context_v: [..., Tc, Hkv, D], RoPE applied to all but v.
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Rope = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32 whatever the dtype of x."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return y.to(x.dtype)


class RotaryTable(nn.Module):
    """cos and sin [..., T, D/2] in fp32 for integer positions [..., T]."""

    inv_freq: Tensor

    def __init__(self, config: DrafterConfig):
        super().__init__()
        # Computed, never loaded: a real table even in a module whose weights are placeholders on the meta device.
        with torch.device("cpu"):
            self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)
            self.scale = rope_attention_scale(config)

    def forward(self, positions: Tensor) -> Rope:
        angles = positions[..., None].float() * self.inv_freq
        return angles.cos() * self.scale, angles.sin() * self.scale


def _rope_init(config: DrafterConfig) -> tuple[Tensor, float]:
    from transformers import PretrainedConfig

    carrier = PretrainedConfig()
    carrier.rope_parameters = dict(config.rope)
    carrier.head_dim = config.head_dim
    carrier.hidden_size = config.hidden_size
    carrier.num_attention_heads = config.num_attention_heads
    carrier.max_position_embeddings = config.max_position_embeddings
    kind = config.rope.get("rope_type", "default")
    if kind == "default":
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (config.rope["rope_theta"] ** exponent), 1.0
    return ROPE_INIT_FUNCTIONS[kind](carrier, torch.device("cpu"))


def inverse_frequencies(config: DrafterConfig) -> Tensor:
    """RoPE's inverse frequencies [D/2], fp32, by transformers' own rules for the rope type."""
    return _rope_init(config)[0]


def rope_attention_scale(config: DrafterConfig) -> float:
    return _rope_init(config)[1]


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """RoPE, half-split form: x [..., T, heads, D], rope [..., T, D/2] each."""
    cos, sin = (part[..., None, :].to(x.dtype) for part in rope)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        hidden, query = config.hidden_size, config.num_attention_heads * config.head_dim
        key = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, query, bias=False)
        self.k_proj = nn.Linear(hidden, key, bias=False)
        self.v_proj = nn.Linear(hidden, key, bias=False)
        self.o_proj = nn.Linear(query, hidden, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        return rotate(self.k_norm(self.heads(self.k_proj(x))), rope), self.heads(self.v_proj(x))

    def forward(self, x: Tensor, context: Tensor, rope: Rope, context_rope: Rope, attend: Attend) -> Tensor:
        q = rotate(self.q_norm(self.heads(self.q_proj(x))), rope)
        k, v = self.keys_values(x, rope)
        context_k, context_v = self.keys_values(context, context_rope)
        return self.o_proj(attend(self.layer, q, k, v, context_k, context_v).flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: Tensor, rope: Rope, context_rope: Rope, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rope, context_rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.fc = nn.Linear(config.num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryTable(config)

    def context(self, taps: Tensor) -> Tensor:
        """Fuse tapped hidden states [..., Tc, m*H] (fp32) into context rows [..., Tc, H].

        The projection runs in fp32: real checkpoints have taps beyond fp16's range.
        """
        return self.hidden_norm(self.fc(taps))

    def forward(
        self, x: Tensor, context: Tensor, positions: Tensor, context_positions: Tensor, attend: Attend
    ) -> Tensor:
        """Block embeddings x [..., T, H] and fused context [..., Tc, H] -> normed hidden states [..., T, H].

        `positions` [..., T] and `context_positions` [..., Tc] are the tokens' indices in their sequences.
        """
        rope, context_rope = self.rotary(positions), self.rotary(context_positions)
        for layer in self.layers:
            x = layer(x, context, rope, context_rope, attend)
        return self.norm(x)

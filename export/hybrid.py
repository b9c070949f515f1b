"""Recurrent layers of a target: what transformers' gated DeltaNet layers call, replaced by ops that keep their state.

These layers (Qwen3-Next, Qwen3.5, OLMo-Hybrid) have no interface as attention has one: their forward calls two
functions of their own Python module by name, one for the causal convolution and one for the delta rule. While our
module runs, those names stand for ours. All else of a layer (projections, gates, norms) stays transformers' code.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from dspark.errors import UsageError

CONV, DELTA = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"


@dataclass(frozen=True)
class LayerState:
    """What a recurrent layer remembers of a request: conv [K - 1, C], its last inputs; delta fp32 [Hv, Dk, Dv]."""

    layer: int
    conv: tuple[int, ...]
    delta: tuple[int, ...]


class Core(Protocol):
    """Stands for the functions of all recurrent layers; rows are those of the graph, flattened."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, C], weight [C, K], bias [C] -> [T, C]."""
        ...

    def remember(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """q and k [T, Hk, Dk], normalised and scaled, v [T, Hv, Dv], g (the decay's log), beta [T, Hv] -> like v."""
        ...


def recurrent_layers(layers: nn.ModuleList) -> dict[int, nn.Module]:
    """The gated DeltaNet modules among decoder layers, by layer."""
    return {i: part for i, layer in enumerate(layers) for part in layer.modules() if _is_gated_delta(part)}


def unknown_convolutions(layers: nn.ModuleList) -> set[int]:
    """The layers with a convolution outside of these modules: it would remember rows that nobody keeps."""
    known = {part for module in recurrent_layers(layers).values() for part in module.modules()}
    return {
        i
        for i, layer in enumerate(layers)
        if any(isinstance(part, nn.Conv1d) and part not in known for part in layer.modules())
    }


def _is_gated_delta(module: nn.Module) -> bool:
    family = sys.modules[type(module).__module__]
    return type(module).__name__.endswith("GatedDeltaNet") and hasattr(family, CONV) and hasattr(family, DELTA)


@contextmanager
def replacing(layers: Mapping[int, nn.Module], core: Core) -> Iterator[None]:
    """Let recurrent layers call `core` in place of their family's functions."""
    running: list[int] = []

    def entering(layer: int) -> Callable[..., None]:
        return lambda *_: running.append(layer)

    def convolve(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
    ):
        out = core.convolve(running[-1], hidden_states[0].transpose(0, 1), weight, bias)
        return (out if activation is None else ACT2FN[activation](out)).transpose(0, 1)[None]

    def remember(query, key, value, g, beta, use_qk_l2norm_in_kernel: bool = False, **_: Any):
        q, k = query[0].float(), key[0].float()
        if use_qk_l2norm_in_kernel:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q = (q * query.shape[-1] ** -0.5).to(query.dtype)
        return core.remember(running[-1], q, k.to(key.dtype), value[0], g[0], beta[0])[None], None

    hooks = [module.register_forward_pre_hook(entering(layer)) for layer, module in layers.items()]
    families = {type(module).__module__: sys.modules[type(module).__module__] for module in layers.values()}
    before = {name: (getattr(family, CONV), getattr(family, DELTA)) for name, family in families.items()}
    try:
        for family in families.values():
            setattr(family, CONV, convolve)
            setattr(family, DELTA, remember)
        yield
    finally:
        for name, family in families.items():
            for function, original in zip((CONV, DELTA), before[name], strict=True):
                setattr(family, function, original)
        for hook in hooks:
            hook.remove()


@dataclass
class StateProbe:
    """A Core that learns the states' shapes and computes nothing."""

    convs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    deltas: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if layer in self.convs:
            raise UsageError(f"target: layer {layer} has more than one convolution; not supported")
        self.convs[layer] = (weight.shape[1] - 1, weight.shape[0])
        return x

    def remember(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        self.deltas[layer] = (v.shape[1], k.shape[2], v.shape[2])
        return v

    def states(self) -> tuple[LayerState, ...]:
        return tuple(
            LayerState(i, self.convs[i], self.deltas[i]) for i in sorted(self.convs.keys() & self.deltas.keys())
        )

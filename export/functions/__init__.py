"""ONNX function bodies: what the custom ops mean to a backend that has no kernel for them."""

from .block_attention import block_attention_function
from .causal_conv import causal_conv_function
from .gated_delta import gated_delta_function
from .markov_argmax import markov_argmax_function

__all__ = ["block_attention_function", "causal_conv_function", "gated_delta_function", "markov_argmax_function"]

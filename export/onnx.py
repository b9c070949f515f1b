"""torch modules -> portable ONNX files: one `dspark::` node per custom op, function bodies for backends without one.

Weights are never copied in memory: tracing sees shapes only, the graph's initializers point at the modules' own
storage, and each is streamed to the .data file when the graph is written. What both graphs use is stored once.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxscript
import torch
from onnx_ir.passes import common as passes
from torch import Tensor, nn

from dspark.export.config import DrafterConfig
from dspark.export.functions import (
    block_attention_function,
    causal_conv_function,
    gated_delta_function,
    markov_argmax_function,
)
from dspark.export.hybrid import LayerState
from dspark.export.linear import linear_as_gemm
from dspark.export.modules import Drafter
from dspark.export.modules.ops import block_attention, markov_argmax
from dspark.export.plugin_nodes import name_inputs
from dspark.export.rewriting import input_names
from dspark.export.schemas import translations
from dspark.export.storage import WeightFile
from dspark.export.target import LayerCache, Target
from dspark.manifest import CachePair, Graph, State
from dspark.manifest import Tensor as TensorInfo

OPSET = 23
IR_VERSION = 11
CACHE = "_cache"  # in the names of caches, and of no other input or output
STATE, STATES = "_state", ("conv_state", "delta_state")  # likewise


class DrafterModule(nn.Module):
    """The drafter's graph: blocks of R requests and the taps of their newly committed tokens in, drafts out."""

    def __init__(self, drafter: Drafter):
        super().__init__()
        self.drafter = drafter
        self.scale = drafter.config.head_dim**-0.5

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        taps: Tensor,
        context_positions: Tensor,
        row_start: Tensor,
        context_start: Tensor,
        length: Tensor,
        pages: Tensor,
        noise: Tensor,
        temperature: Tensor,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """tokens, positions int64 [R, G]; taps fp32 [Tc, m*H]; context_positions int64 [Tc]; row_start, context_start
        int32 [R+1]; length int32 [R]; pages int32 [R, N]; noise fp32 [R, G, Vd]; temperature fp32 [R]; caches [P, Hkv,
        C, D] per layer -> draft_tokens int64 [R, G], confidence fp32 [R, G] where the head exists, draft_logits fp32
        [R, G, Vd], key caches, value caches.

        The noise is an input of every draft, so that one graph makes greedy and drawn ones, but where a request's
        temperature is 0 nothing reads it: memory of that size that nobody wrote will do, and costs nothing.
        """
        drafter, config = self.drafter, self.drafter.config
        updated: list[tuple[Tensor, Tensor]] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
            out, *caches = block_attention(
                q, k, v, key_caches[layer], value_caches[layer], row_start, length, pages,
                context_k, context_v, context_start,
                causal=False, window=config.window(layer), scale=self.scale, softcap=0.0,
            )  # fmt: skip
            updated.append((caches[0], caches[1]))
            return out

        hidden = drafter.hidden(tokens.flatten(), taps, positions.flatten(), context_positions, attend)
        base = drafter.lm_head(hidden).view(*tokens.shape, -1)
        hidden = hidden.view(*tokens.shape, -1)
        drafts, confidence, logits = markov_argmax(
            base, tokens[:, 0], hidden, **head_inputs(drafter), noise=noise, temperature=temperature
        )
        sure = (confidence,) if drafter.confidence_head is not None else ()
        return drafts, *sure, logits, [k for k, _ in updated], [v for _, v in updated]


def head_inputs(drafter: Drafter) -> dict[str, Any]:
    """The Markov and confidence heads as inputs and attributes of `markov_argmax`."""
    config, markov, confidence = drafter.config, drafter.markov_head, drafter.confidence_head
    given: dict[str, Any] = {"head": config.markov_head_type, "d2t": drafter.d2t}
    if markov is not None:
        given |= {"w1": markov.markov_w1.weight, "w2": markov.markov_w2.weight}
        projection = getattr(markov, "gate_proj", None) or getattr(markov, "joint_proj", None)
        if projection is not None:
            given |= {"head_weight": projection.weight, "head_bias": projection.bias}
    if confidence is not None:
        given |= {"confidence_weight": confidence.proj.weight[0], "confidence_bias": confidence.proj.bias}
        given |= {"confidence_with_markov": config.confidence_with_markov}
    return given


def export_target(target: Target, target_layer_ids: Sequence[int], folder: Path, slots: int = 1) -> Graph:
    """Write onnx/target.onnx and onnx/target.data into `folder`; `target.stored` then knows where each weight lies.

    slots: of how many of a step's last rows recurrent layers give their state.
    """
    i32 = torch.int32
    # Sizes of 2 or more, all of them different where they may differ: torch.export would bake in a 1.
    inputs = {
        "tokens": torch.zeros(5, dtype=torch.int64),
        "positions": torch.zeros(5, dtype=torch.int64),
        "row_start": torch.tensor([0, 2, 5], dtype=i32),
        "length": torch.zeros(2, dtype=i32),
        "pages": torch.zeros(2, 3, dtype=i32),
        "logit_rows": torch.zeros(4, dtype=torch.int64),
    } | _caches(target.caches, target.embed_tokens.dtype)
    inputs |= _states(target.states, target.embed_tokens.dtype)
    dims = {
        "tokens": {0: "T"}, "positions": {0: "T"}, "row_start": {0: "R + 1"}, "length": {0: "R"},
        "pages": {0: "R", 1: "N"}, "logit_rows": {0: "L"},
    }  # fmt: skip
    module = target.module(target_layer_ids, slots)
    model = _trace(module, inputs, dims, ["logits", "taps"], target.caches, len(target.states))
    if target.caches:
        model.functions[("dspark", "BlockAttention", "")] = _attention_function(model)
    for kind, function in (("CausalConv", causal_conv_function), ("GatedDelta", gated_delta_function)):
        nodes = [node for node in model.graph if node.op_type == kind]
        if nodes:  # all layers' have the same inputs
            model.functions[("dspark", kind, "")] = function(OPSET, input_names(nodes[0]))
    file = folder / "onnx" / "target.onnx"
    # By address, so only of tensors that live as long as the target: a later one could lie where a passing one lay.
    parameters = {p.data_ptr() for p in target.model.parameters()}
    target.stored = {address: t for address, t in _save(model, file, {}).items() if address in parameters}
    return describe(model, "target", "portable", "onnx/target.onnx", 0, [c.window for c in target.caches], slots)


def export_drafter(drafter: Drafter, target: Target, folder: Path) -> Graph:
    """Write onnx/drafter.onnx and onnx/drafter.data into `folder`, after `export_target` has written the target there.

    Parameters that are the target's own tensors are not stored again but read from onnx/target.data.
    """
    config, i32 = drafter.config, torch.int32
    # Rings would gain nothing: a drafter has few layers, and what a ring has lost its taps would have to bring again.
    caches = [LayerCache(config.num_key_value_heads, config.head_dim, window=0)] * config.num_hidden_layers
    inputs = {
        "tokens": torch.zeros(2, 3, dtype=torch.int64),
        "positions": torch.zeros(2, 3, dtype=torch.int64),
        "taps": torch.zeros(5, config.num_taps * config.hidden_size),
        "context_positions": torch.zeros(5, dtype=torch.int64),
        "row_start": torch.tensor([0, 3, 6], dtype=i32),
        "context_start": torch.tensor([0, 2, 5], dtype=i32),
        "length": torch.zeros(2, dtype=i32),
        "pages": torch.zeros(2, 3, dtype=i32),
        "noise": torch.zeros(2, 3, config.draft_vocab_size),
        "temperature": torch.zeros(2),
    } | _caches(caches, drafter.fc.weight.dtype)
    dims = {
        "tokens": {0: "R", 1: "G"}, "positions": {0: "R", 1: "G"}, "taps": {0: "Tc"}, "context_positions": {0: "Tc"},
        "row_start": {0: "R + 1"}, "context_start": {0: "R + 1"}, "length": {0: "R"}, "pages": {0: "R", 1: "N"},
        "noise": {0: "R", 1: "G"}, "temperature": {0: "R"},
    }  # fmt: skip
    outputs = ["draft_tokens", *(["confidence"] if config.confidence else []), "draft_logits"]
    model = _trace(DrafterModule(drafter).eval(), inputs, dims, outputs, caches)
    model.functions[("dspark", "BlockAttention", "")] = _attention_function(model)
    model.functions[("dspark", "MarkovArgmax", "")] = _markov_function(model, config)
    _save(model, folder / "onnx" / "drafter.onnx", target.stored)
    return describe(model, "drafter", "portable", "onnx/drafter.onnx", 0, [cache.window for cache in caches])


def _attention_function(model: ir.Model) -> ir.Function:
    node = next(node for node in model.graph if node.op_type == "BlockAttention")  # all layers' have the same inputs
    return block_attention_function(OPSET, input_names(node))


def _markov_function(model: ir.Model, config: DrafterConfig) -> ir.Function:
    node = next(node for node in model.graph if node.op_type == "MarkovArgmax")
    return markov_argmax_function(OPSET, config.markov_head_type, input_names(node), config.confidence_with_markov)


def _caches(caches: Sequence[LayerCache], dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Empty caches [P, Hkv, C, D] to trace with, with a window [P, Hkv, W, D]."""
    return {
        name: [torch.zeros(4, c.kv_heads, 11 if c.window else 7, c.head_dim, dtype=dtype) for c in caches]
        for name in ("key_caches", "value_caches")
    }


def _states(states: Sequence[LayerState], dtype: torch.dtype) -> dict[str, list[Tensor]]:
    """Empty states of two requests to trace with; the delta rule's is fp32."""
    if not states:
        return {}
    return {
        "conv_states": [torch.zeros(2, *state.conv, dtype=dtype) for state in states],
        "delta_states": [torch.zeros(2, *state.delta) for state in states],
    }


def _trace(
    module: nn.Module,
    inputs: dict[str, Any],
    dims: dict[str, Any],
    outputs: list[str],
    caches: Sequence[LayerCache],
    states: int = 0,
) -> ir.Model:
    """torch.export -> ONNX IR with the contract's names, cleaned so that equal inputs give equal bytes.

    states: how many recurrent layers there are.
    """
    rows = [{0: "P", 2: "W" if cache.window else "C"} for cache in caches]
    dims = dims | {name: rows for name in ("key_caches", "value_caches")}
    dims |= {name: [{0: "R"}] * states for name in ("conv_states", "delta_states") if states}
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            module,
            kwargs=inputs,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=dims,
            custom_translation_table=translations(),
            verbose=False,
            optimize=False,
        )
    assert program is not None
    model = program.model
    plain = [name for name in inputs if not name.endswith(("_caches", "_states"))]
    _name_interface(model.graph, plain, outputs, len(caches), states)
    # As program.optimize() does, but every weight stays the tensor that the checkpoint has: transposes are not folded.
    onnxscript.optimizer.optimize_ir(model, should_fold=lambda node: False if node.op_type == "Transpose" else None)
    onnxscript.rewriter.onnx_fusions.fuse(model)
    linear_as_gemm(model)
    name_inputs(model)
    passes.NameFixPass()(model)
    model.ir_version, model.producer_name, model.producer_version = IR_VERSION, "dspark", None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.name = type(module).__name__
    return model


def _name_interface(graph: ir.Graph, inputs: list[str], outputs: list[str], caches: int, states: int) -> None:
    """Give caches and states their contract names, key_cache.{i} and so on, and put each layer's pair side by side."""
    for values, names, suffix in ((graph.inputs, inputs, ""), (graph.outputs, outputs, "_out")):
        rest = list(values)[len(names) :]
        assert len(rest) == 2 * (caches + states), "the traced graph must keep every cache and state"
        for value, name in zip(values, names, strict=False):
            value.name = name
        ordered = list(values)[: len(names)]
        for first, count, kinds in ((0, caches, ("key_cache", "value_cache")), (2 * caches, states, STATES)):
            for i in range(count):
                pair = rest[first + i], rest[first + count + i]
                for value, kind in zip(pair, kinds, strict=True):
                    value.name = f"{kind}{suffix}.{i}"
                ordered += pair
        values.clear()
        values.extend(ordered)
    for value in graph.outputs:
        if STATE in str(value.name) and value.shape is not None:
            value.shape = ir.Shape(["R", "S", *value.shape[2:]])


def _save(model: ir.Model, file: Path, stored: dict[int, ir.ExternalTensor]) -> dict[int, ir.ExternalTensor]:
    """Write the graph and its weights; tensors in `stored` (by storage address) are referred to, not written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with WeightFile(file.with_suffix(".data"), stored) as weights:
        for value in model.graph.initializers.values():
            value.const_value = weights.keep(value)
    passes.ClearMetadataAndDocStringPass()(model)
    ir.save(model, file)
    return weights.stored


def describe(
    model: ir.Model, role: str, form: str, file: str, cache_slack: int, windows: Sequence[int], slots: int = 0
) -> Graph:
    """The manifest's entry of a graph that has its contract names. windows: of its caches, by layer."""

    def infos(values: Sequence[ir.Value]) -> tuple[TensorInfo, ...]:
        return tuple(
            TensorInfo(str(v.name), v.dtype.numpy().name, tuple(d if isinstance(d, int) else str(d) for d in v.shape))
            for v in values
            if CACHE not in str(v.name) and STATE not in str(v.name)
        )

    pairs, states = [], []
    for value in model.graph.inputs:
        name = str(value.name)
        if STATE in name:
            assert value.shape is not None
            out, shape = name.replace("_state.", "_state_out."), tuple(int(d) for d in value.shape[1:])
            states.append(State(name, out, value.dtype.numpy().name, shape, slots))
        if CACHE in name:
            _, heads, _, depth = value.shape
            out, window = name.replace("_cache.", "_cache_out."), windows[int(name.partition(".")[2])]
            pairs.append(CachePair(name, out, value.dtype.numpy().name, heads, depth, window))
    inputs, outputs = infos(model.graph.inputs), infos(model.graph.outputs)
    return Graph(role, form, file, inputs, outputs, tuple(pairs), cache_slack, tuple(states))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter reports on stdout, and warns about names it renames itself and ops that nobody uses."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)

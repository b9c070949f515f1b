"""Portable graph -> the typed graph that TensorRT builds an engine of.

TensorRT decides no number formats: they are written into the graph. Weights, activations and caches become bf16, fp16
or fp32. The projection of the taps, norms, softmax, rotary tables and the confidence head stay fp32, and so do all
inputs and outputs but the caches. The `dspark::` nodes stay, for their plugins.

MarkovArgmax can also be written in plain ops, for blocks of one length (`unroll_markov`). BlockAttention has no such
form here: its portable body has a Loop over requests, which TensorRT does not parse inside of a function, and plain ops
would copy the caches in every step. So every engine needs the plugin library.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from dspark.errors import UsageError
from dspark.export.rewriting import Nodes, input_names
from dspark.manifest import Graph

DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
FLOAT = ir.DataType.FLOAT
CACHE = "_cache"  # in the names of caches, and of no other input or output
# Where a short format costs more than it saves: what squares, sums many terms, or turns a position into an angle.
EXACT = {"RMSNormalization", "LayerNormalization", "Softmax", "LogSoftmax", "Cos", "Sin", "Exp", "Log", "Pow", "Sqrt"}
EXACT |= {"Reciprocal", "ReduceMean", "ReduceSum", "ReduceSumSquare", "CumSum"}
# Inputs that the plugins want in fp32.
FULL = ("sinks", "confidence_weight", "confidence_bias", "noise", "temperature")


@dataclass(frozen=True)
class TypedGraph:
    """A lowered graph on disk. plugins: (name, version, namespace) for each of its dspark:: nodes."""

    file: Path
    plugins: tuple[tuple[str, str, str], ...]

    def remove(self) -> None:
        self.file.unlink()
        self.file.with_suffix(".data").unlink(missing_ok=True)


def lower(folder: Path, graph: Graph, dtype: str, out: Path, block_size: int | None = None) -> TypedGraph:
    """Write the typed form of a portable graph into the folder `out`, with weights of its own.

    Requires: `graph` is of form portable and lies in `folder`. Ensures: the inputs and outputs are the graph's; the
    caches' number format is `dtype` (fp32, fp16, bf16). block_size: write MarkovArgmax in plain ops for blocks of
    exactly this many positions; None keeps the plugin, and blocks of any length.
    """
    model = ir.load(folder / graph.file)
    lower_model(model, dtype, block_size)
    file = out / Path(graph.file).name
    # Weights are converted one by one as they are written.
    ir.save(model, file, external_data=f"{file.stem}.data", size_threshold_bytes=1024)
    plugins = [(n.op_type, *(n.attributes[f"plugin_{part}"].as_string() for part in ("version", "namespace")))
               for n in plugin_nodes(model)]  # fmt: skip
    return TypedGraph(file, tuple(plugins))


def lower_model(model: ir.Model, dtype: str, block_size: int | None = None) -> None:
    """The passes of `lower`, in place."""
    _check(model)
    model.functions.clear()  # or the parser would take them instead of the plugins, whatever the nodes say
    Typing(model.graph, DTYPES[dtype]).run()
    if block_size is not None:
        unroll_markov(model, block_size)
    passes.RemoveUnusedNodesPass()(model)
    passes.NameFixPass()(model)


def _check(model: ir.Model) -> None:
    for node in model.graph:
        if node.domain == "dspark" and "inputs" not in node.attributes:
            raise UsageError(
                f"graph {model.graph.name}: {node.op_type} does not name its inputs; export the bundle again"
            )
        if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
            raise UsageError(
                f"graph {model.graph.name}: has a {node.op_type}; models with control flow are not supported"
            )


def plugin_nodes(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.domain == "dspark"]


class Typing:
    """Requires: a graph without subgraphs whose floating-point values are all fp32. Ensures: what may be short is.

    A value is wide if it comes from a graph input or from integers alone (taps, positions): products with it stay fp32
    until a norm brings the result to a known size, or a short value takes part. Casts are put where formats meet.
    """

    def __init__(self, graph: ir.Graph, short: ir.DataType):
        self.graph, self.short = graph, short
        self.wide: set[ir.Value] = set()
        self.casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}

    def run(self) -> None:
        for value in self.graph.inputs:
            if CACHE in str(value.name):
                value.type = ir.TensorType(self.short)
            elif value.dtype == FLOAT:
                self.wide.add(value)
        for node in list(self.graph):
            self._convert(node)
        for i, value in enumerate(self.graph.outputs):
            if CACHE not in str(value.name) and value.dtype == self.short != FLOAT:
                self._widen_output(i, value)

    def _convert(self, node: ir.Node) -> None:
        if node.domain == "dspark":
            self._convert_plugin(node)
            return
        floats = {i: x for i, x in enumerate(node.inputs) if x is not None and self._is_float(x)}
        computed = [x for x in floats.values() if not x.is_initializer()]
        wide = all(x in self.wide for x in computed) and (bool(computed) or not floats)
        dtype = FLOAT if wide or node.op_type in EXACT or node.op_type == "Cast" else self.short
        if node.op_type != "Cast":
            for i, x in floats.items():
                node.replace_input_with(i, self._as(node, x, dtype))
        for output in node.outputs:
            # A pass that made a node may have left its type open; such nodes keep their first input's.
            if self._is_float(output) or (output.dtype is None and 0 in floats):
                output.type = ir.TensorType(dtype)
                if wide and node.op_type not in EXACT - {"Cos", "Sin"}:
                    self.wide.add(output)

    def _convert_plugin(self, node: ir.Node) -> None:
        for i, (name, x) in enumerate(zip(input_names(node), node.inputs, strict=True)):
            if self._is_float(x):
                node.replace_input_with(i, self._as(node, x, FLOAT if name in FULL else self.short))
        for output in node.outputs:
            if self._is_float(output):
                output.type = ir.TensorType(FLOAT if node.op_type == "MarkovArgmax" else self.short)

    def _is_float(self, value: ir.Value) -> bool:
        return value.dtype in (FLOAT, self.short)

    def _as(self, node: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The value in a number format: itself, a weight converted, or a Cast in front of its first user."""
        if value.dtype == dtype:
            return value
        key = value, dtype
        if key not in self.casts:
            if value.is_initializer():
                self.casts[key] = self._weight(value, dtype)
            else:
                cast = self.casts[key] = Nodes(self.graph, node).add("Cast", value, to=dtype)
                cast.type, cast.shape = ir.TensorType(dtype), value.shape
        return self.casts[key]

    def _weight(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        tensor, name = value.const_value, f"{value.name}_{dtype.name.lower()}"
        assert tensor is not None
        if dtype == ir.DataType.FLOAT16 and np.abs(tensor.numpy()).max(initial=0) > np.finfo(np.float16).max:
            raise UsageError(f"--dtype fp16: the weight {value.name!r} leaves its range; use bf16")

        def convert() -> ir.Tensor:
            return ir.Tensor(tensor.numpy().astype(dtype.numpy()), dtype=dtype, name=name)

        weight = ir.LazyTensor(convert, dtype=dtype, shape=tensor.shape, name=name)
        new = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape, const_value=weight)
        self.graph.register_initializer(new)
        return new

    def _widen_output(self, i: int, value: ir.Value) -> None:
        """Put a Cast behind an output; the name goes with it."""
        at, name = Nodes(self.graph), value.name
        value.name = None
        cast = at.add("Cast", value, to=FLOAT)
        cast.name, cast.type, cast.shape = name, ir.TensorType(FLOAT), value.shape
        self.graph.outputs[i] = cast


def unroll_markov(model: ir.Model, block_size: int) -> None:
    """Requires: a typed drafter. Ensures: its MarkovArgmax node is plain ops for blocks of exactly `block_size`.

    Where two logits are equal TensorRT's TopK may choose either; the plugin takes the lowest.
    """
    (node,) = [node for node in plugin_nodes(model) if node.op_type == "MarkovArgmax"]
    given = dict(zip(input_names(node), node.inputs, strict=True))
    chain = MarkovChain(Nodes(model.graph, node), given, node.attributes["head"].as_string())
    with_markov = bool(node.attributes["confidence_with_markov"].as_int())
    for old, new in zip(node.outputs, chain.unroll(block_size, with_markov), strict=True):
        chain.at.replace(old, new)
    model.graph.remove(node, safe=True)
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([block_size if str(d) == "G" else d for d in value.shape])


class MarkovChain:
    """The steps of MarkovArgmax (plugins/README.md) as nodes; fp32 where the plugin is."""

    def __init__(self, at: Nodes, given: dict[str, ir.Value], head: str):
        self.at, self.given, self.head = at, given, head

    def add(self, kind: str, *inputs: ir.Value, dtype: ir.DataType | None = None, **attributes) -> ir.Value:
        value = self.at.add(kind, *inputs, **attributes)
        value.type = inputs[0].type if dtype is None else ir.TensorType(dtype)
        return value

    def float(self, x: ir.Value) -> ir.Value:
        return x if x.dtype == FLOAT else self.add("Cast", x, to=FLOAT, dtype=FLOAT)

    def linear(self, x: ir.Value, weight: str, bias: str | None = None) -> ir.Value:
        rest = () if bias is None else (self.given[bias],)
        return self.add("Gemm", x, self.given[weight], *rest, transB=1)

    def position(self, x: ir.Value, k: int) -> ir.Value:
        return self.add("Gather", x, self.at.constant(k), axis=1)

    def join(self, *parts: ir.Value) -> ir.Value:
        return self.add("Concat", *parts, axis=-1)

    def unroll(self, block_size: int, with_markov: bool) -> tuple[ir.Value, ir.Value, ir.Value]:
        """tokens int64 [R, G], confidence fp32 [R, G], logits fp32 [R, G, Vd]."""
        previous, state, drawing = self.given["anchors"], None, self._drawing()
        rows: list[tuple[ir.Value, ...]] = []
        for k in range(block_size):
            hidden, logits = (self.position(self.given[n], k) for n in ("hidden", "base_logits"))
            logits, embedding = self.float(logits), None
            if "w1" in self.given:
                embedding = self.add("Gather", self.given["w1"], previous, axis=0)
                state, e = self._head(state, embedding, hidden)
                logits = self.add("Add", logits, self.float(self.linear(e, "w2")))
            score = logits if drawing is None else self._score(logits, k, *drawing)
            previous = self.add("ArgMax", score, axis=-1, keepdims=0, dtype=ir.DataType.INT64)
            if "d2t" in self.given:
                previous = self.add("Add", previous, self.add("Gather", self.given["d2t"], previous, axis=0))
            token, logits = (self.add("Unsqueeze", x, self.at.constant([1])) for x in (previous, logits))
            rows.append((token, self._confidence(token, hidden, embedding if with_markov else None), logits))
        tokens, confidences, corrected = (self.add("Concat", *part, axis=1) for part in zip(*rows, strict=True))
        return tokens, confidences, corrected

    def _drawing(self) -> tuple[ir.Value, ir.Value] | None:
        """Which requests are drawn, bool [R, 1], and at what temperature, 1 for the others; None without noise."""
        if "noise" not in self.given:
            return None
        temperature = self.add("Unsqueeze", self.given["temperature"], self.at.constant([1]))
        drawn = self.add("Greater", temperature, self.at.constant(0.0, FLOAT), dtype=ir.DataType.BOOL)
        return drawn, self.add("Where", drawn, temperature, self.at.constant(1.0, FLOAT), dtype=FLOAT)

    def _score(self, logits: ir.Value, k: int, drawn: ir.Value, temperature: ir.Value) -> ir.Value:
        """What token k is the argmax of, fp32 [R, Vd]. A greedy request's noise is read too, and has no effect."""
        score = self.add("Add", self.add("Div", logits, temperature), self.position(self.given["noise"], k))
        return self.add("Where", drawn, score, logits, dtype=FLOAT)

    def _head(self, state: ir.Value | None, embedding: ir.Value, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        if self.head == "vanilla":
            return embedding, embedding
        if self.head == "gated":
            gate = self.add("Sigmoid", self.linear(self.join(hidden, embedding), "head_weight", "head_bias"))
            return embedding, self.add("Mul", gate, embedding)
        if state is None:
            state = self.add("Sub", embedding, embedding)  # zeros
        joint = self.linear(self.join(state, embedding, hidden), "head_weight", "head_bias")
        gate, candidate, output = self.at.add_multi("Split", joint, outputs=3, num_outputs=3, axis=-1)
        for part in (gate, candidate, output):
            part.type = joint.type
        # s + (1 - g) (c - s) with 1 - g = sigmoid(-gate)
        change = self.add("Sub", self.add("Tanh", candidate), state)
        rest = self.add("Sigmoid", self.add("Neg", gate))
        return self.add("Add", state, self.add("Mul", rest, change)), self.add("Tanh", output)

    def _confidence(self, token: ir.Value, hidden: ir.Value, embedding: ir.Value | None) -> ir.Value:
        """c_k [R, 1], without a head ones."""
        if "confidence_weight" not in self.given:
            same = self.add("Equal", token, token, dtype=ir.DataType.BOOL)
            return self.add("Cast", same, to=FLOAT, dtype=FLOAT)
        x = self.float(hidden if embedding is None else self.join(hidden, embedding))
        weight = self.at.add("Unsqueeze", self.given["confidence_weight"], self.at.constant([1]))
        logit = self.add("MatMul", x, weight)
        if "confidence_bias" in self.given:
            logit = self.add("Add", logit, self.given["confidence_bias"])
        return self.add("Sigmoid", logit)

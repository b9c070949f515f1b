"""Helpers of the graph passes."""

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes import common as passes


class Nodes:
    """Makes nodes in front of one place of a graph, or at its end. Equal ones are left to `remove_unused` to merge."""

    def __init__(self, graph: ir.Graph, before: ir.Node | None = None):
        self.graph, self.before = graph, before

    def add(self, kind: str, *inputs: ir.Value | None, domain: str = "", **attributes) -> ir.Value:
        return self.add_multi(kind, *inputs, domain=domain, outputs=1, **attributes)[0]

    def add_multi(
        self, kind: str, *inputs: ir.Value | None, outputs: int, domain: str = "", **attributes
    ) -> Sequence[ir.Value]:
        node = ir.node(kind, list(inputs), attributes, domain=domain, num_outputs=outputs)
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)
        return node.outputs

    def constant(self, values: Sequence | float, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        return self.add("Constant", value=ir.tensor(values, dtype=dtype))

    def reshape(self, x: ir.Value, shape: Sequence[int]) -> ir.Value:
        return self.add("Reshape", x, self.constant(shape))

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Let `new` take over the users, name, shape and type of `old`."""
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        name, old.name = old.name, None
        new.name, new.shape, new.type = name, old.shape, old.type


def remove_unused(model: ir.Model) -> None:
    """Merge equal nodes and drop what no output needs."""
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.DeduplicateInitializersPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.RemoveUnusedNodesPass()(model)


def input_names(node: ir.Node) -> list[str]:
    """The names of a `dspark::` node's inputs, in the node's order (plugin_nodes.py wrote them)."""
    return node.attributes["inputs"].as_string().split(",")


def inputs_by_name(node: ir.Node) -> dict[str, ir.Value | None]:
    """The inputs that a `dspark::` node has."""
    return dict(zip(input_names(node), node.inputs, strict=True))


def constant_ints(value: ir.Value | None) -> list[int] | None:
    """The integers of a constant, flattened; None where the value is not a small constant."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > 64 or not tensor.dtype.is_integer():
        return None
    return [int(n) for n in tensor.numpy().reshape(-1)]

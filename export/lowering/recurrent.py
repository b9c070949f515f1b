"""CausalConv and GatedDelta of one request: the same nodes, with bodies that have no loop over requests."""

import onnx_ir as ir

from dspark.export.functions import causal_conv_function, gated_delta_function
from dspark.export.rewriting import inputs_by_name

FUNCTIONS = {"CausalConv": causal_conv_function, "GatedDelta": gated_delta_function}
MARKERS = "row_start"


def lower_recurrent(model: ir.Model) -> None:
    """Requires: one request. Ensures: no recurrent node reads row markers."""
    for node in [node for node in model.graph if node.domain == "dspark" and node.op_type in FUNCTIONS]:
        given = inputs_by_name(node)
        del given[MARKERS]
        for i, value in enumerate(given.values()):
            node.replace_input_with(i, value)
        node.resize_inputs(len(given))
        node.attributes.add(ir.AttrString("inputs", ",".join(given)))
        opset = model.opset_imports[""]
        model.functions[("dspark", node.op_type, "")] = FUNCTIONS[node.op_type](opset, given)

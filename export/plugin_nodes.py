"""How `dspark::` nodes are written so that one file serves ONNX Runtime and TensorRT."""

import onnx_ir as ir

from dspark.export.functions import causal_conv, gated_delta
from dspark.export.functions.block_attention import INPUTS
from dspark.export.functions.markov_argmax import INPUTS as MARKOV_INPUTS
from dspark.export.functions.markov_argmax import OUTPUTS as MARKOV_OUTPUTS

NAMES: dict[str, tuple[str, ...]] = {"BlockAttention": INPUTS, "MarkovArgmax": MARKOV_INPUTS}
NAMES |= {"CausalConv": causal_conv.INPUTS, "GatedDelta": gated_delta.INPUTS}


def name_inputs(model: ir.Model) -> None:
    """Requires: dspark:: nodes with their op's inputs in its order, None where one is left out.

    Ensures: none is left out by a gap, which TensorRT's parser would hand to the plugin as a null pointer. The
    attribute `inputs` names those that are there, for plugin and passes; MarkovArgmax's `outputs` names its outputs.
    """
    for node in model.graph:
        if node.domain != "dspark":
            continue
        present = [(n, x) for n, x in zip(NAMES[node.op_type], node.inputs, strict=False) if x is not None]
        for i, (_, value) in enumerate(present):
            node.replace_input_with(i, value)
        node.resize_inputs(len(present))
        node.attributes.add(ir.AttrString("inputs", ",".join(name for name, _ in present)))
        if node.op_type == "MarkovArgmax":
            node.attributes.add(ir.AttrString("outputs", ",".join(MARKOV_OUTPUTS)))

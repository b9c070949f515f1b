"""Runs a typed graph (export/lowering/tensorrt.py) without TensorRT: onnx's reference evaluator knows bf16, and
tests/reference.py stands in for the plugins."""

from pathlib import Path

import numpy as np
import onnx
import reference
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun


class BlockAttention(OpRun):
    op_domain = "dspark"

    def _run(self, *values, causal, window, scale, softcap, inputs, **_plugin):
        given = dict(zip(inputs.split(","), values, strict=True))
        attributes = {"causal": bool(causal), "window": window, "scale": scale, "softcap": softcap}
        results = reference.block_attention(**given, **attributes)
        return tuple(r.astype(values[0].dtype) for r in results)


class MarkovArgmax(OpRun):
    op_domain = "dspark"

    def _run(self, *values, head, confidence_with_markov, inputs, **_plugin):
        given = {
            name: value if value.dtype.kind == "i" else value.astype(np.float64)
            for name, value in zip(inputs.split(","), values, strict=True)
        }
        attributes = {"head": head, "confidence_with_markov": bool(confidence_with_markov)}
        tokens, confidence, logits = reference.markov_argmax(**given, **attributes)
        return tokens, confidence.astype(np.float32), logits.astype(np.float32)


def run(file: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs by name. Caches come and go in the graph's own number format (ml_dtypes.bfloat16 for bf16)."""
    model = onnx.load(file)
    evaluator = ReferenceEvaluator(model, new_ops=[BlockAttention, MarkovArgmax])
    names = [output.name for output in model.graph.output]
    return dict(zip(names, evaluator.run(None, feeds), strict=True))

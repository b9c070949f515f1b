"""Builds single nodes with TensorRT-RTX in a process of its own: python node_builds.py LIBRARY < requests > answers.

TensorRT keeps the first logger it is given for the whole process, and these tests want one that hears everything.
Requests: JSON, {name: {kind, attributes, dtype, inputs: {name: [type, shape]}, changes: {attribute: value}}}.
Answers: {name: {parsed, built, errors: [line], layers: [line]}}.
"""

import json
import sys
from pathlib import Path

import numpy as np
from runner_case import TYPES
from single_node import single_node_model

from dspark import plugins
from dspark.tensorrt import import_tensorrt

MARKERS = ("row_start", "context_start")
FIXED = ("w1", "w2", "head_weight", "head_bias", "confidence_weight", "confidence_bias", "d2t")


def build(trt, log, kind: str, attributes: dict, inputs: dict, changes: dict) -> dict:
    import onnx_ir as ir

    arrays = {name: np.zeros(shape, TYPES[dtype]) for name, (dtype, shape) in inputs.items()}
    model = single_node_model(kind, arrays, attributes)
    for name, value in changes.items():
        node = next(iter(model.graph))
        del node.attributes[name]
        if value is not None:
            node.attributes.add((ir.AttrString if isinstance(value, str) else ir.AttrInt64)(name, value))
    log.lines.clear()
    builder = trt.Builder(log)
    network = builder.create_network()
    parser = trt.OnnxParser(network, log)
    parsed = parser.parse(ir.to_proto(model).SerializeToString())
    built = parsed and _serialise(trt, builder, network, arrays)
    severe = (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR)
    # "Layers:", a line for each, an empty line, and more.
    described = next((m for _, m in log.lines if m.startswith("Layers:\n")), "")
    layers = described.partition("\n\n")[0].splitlines()[1:]
    return {
        "parsed": bool(parsed),
        "built": bool(built),
        "errors": [m for severity, m in log.lines if severity in severe],
        "warnings": [m for severity, m in log.lines if severity == trt.ILogger.WARNING],
        "layers": layers,
    }


def _serialise(trt, builder, network, arrays) -> bool:
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = 2
    for i, capability in enumerate((trt.ComputeCapability.SM80, trt.ComputeCapability.SM120)):
        config.set_compute_capability(capability, i)
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        value = network.get_input(i)
        given = arrays[value.name].shape
        # Up to three times the case's requests, rows and pages; of markers there is one more than of requests.
        count = given[0] if value.name in FIXED else 3 * given[0] - 2 * (value.name in MARKERS)
        profile.set_shape(value.name, given, given, [count, *given[1:]])
    config.add_optimization_profile(profile)
    return builder.build_serialized_network(network, config) is not None


def main() -> None:
    trt = import_tensorrt("tensorrt-rtx")

    class Log(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)
            self.lines: list[tuple] = []

        def log(self, severity, message):
            self.lines.append((severity, message))

    log = Log()
    plugins.register(trt, Path(sys.argv[1]))
    answers = {name: build(trt, log, **request) for name, request in json.load(sys.stdin).items()}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

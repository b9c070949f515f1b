"""Builds engines of a bundle with TensorRT-RTX in a process of its own: python demo_engines.py BUNDLE FOLDER > answers.

A process of its own, since TensorRT keeps the first logger it is given, and this one hears everything. The graphs go
into FOLDER. Answers: {role: {"size": bytes, "layers": [line of the build log's list of layers]}} for target, drafter,
and `markov`: the drafter's Markov chain alone, in plain layers, built before any plugin is registered.
"""

import json
import sys
from pathlib import Path

import onnx

from dspark import plugins
from dspark.export import network
from dspark.export.lowering.tensorrt import TypedGraph, lower
from dspark.export.network import Options, build_engine
from dspark.export.profiles import input_shapes, plan
from dspark.manifest import read_manifest
from dspark.tensorrt import import_tensorrt

OPTIONS = Options("tensorrt-rtx", compute_capabilities=("8.0", "12.0"))


def main(bundle: Path, folder: Path) -> dict:
    trt = import_tensorrt("tensorrt-rtx")
    log = _listen(trt)
    manifest = read_manifest(bundle)
    drafter = manifest.graph("drafter", "portable")

    def build(typed: TypedGraph, shapes: dict) -> dict:
        log.layers = []
        engine = build_engine(trt, typed, shapes, OPTIONS, lambda stage: None)
        return {"size": engine.nbytes, "layers": log.layers}

    block = manifest.drafter.block_size
    whole = lower(bundle, drafter, "bf16", folder, block)
    alone = _markov_alone(bundle / drafter.file, whole.file, folder / "markov.onnx")
    answers = {"markov": build(TypedGraph(alone, ()), _fixed_shapes(alone, block))}
    plugins.register(trt)
    for role in ("target", "drafter"):
        graph = manifest.graph(role, "portable")
        answers[role] = build(lower(bundle, graph, "bf16", folder), input_shapes(graph, plan(manifest, role, {})))
    return answers


def _listen(trt):
    """A logger in the place of the project's, which also keeps the list of layers that a detailed build prints."""

    class Log(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)
            self.errors, self.layers = [], []

        def log(self, severity, message):
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)
            if message.startswith("Layers:\n"):
                self.layers = message.partition("\n\n")[0].splitlines()[1:]

    log, configure = Log(), network.configure

    def configure_detailed(trt, config, options):
        configure(trt, config, options)
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED

    import dspark.tensorrt

    network.logger = dspark.tensorrt.logger = lambda trt: log
    network.configure = configure_detailed
    return log


def _markov_alone(portable: Path, unrolled: Path, out: Path) -> Path:
    """What the unrolled drafter has for MarkovArgmax: base logits, hidden states, tokens, noise in, its outputs out."""
    graph = onnx.load(portable, load_external_data=False).graph
    (node,) = (node for node in graph.node if node.op_type == "MarkovArgmax")
    inputs = [node.input[0], node.input[2], "tokens", "noise", "temperature"]
    onnx.utils.extract_model(unrolled, out, inputs, list(node.output), check_model=False)
    return out


def _fixed_shapes(file: Path, block: int) -> dict:
    """{input: its shape, three times} of [1], [1, block] and [1, block, n] inputs."""
    inputs = onnx.load(file, load_external_data=False).graph.input
    dims = {value.name: value.type.tensor_type.shape.dim for value in inputs}
    return {name: ((1, block, *(d.dim_value for d in of[2:]))[: len(of)],) * 3 for name, of in dims.items()}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))

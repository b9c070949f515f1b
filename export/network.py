"""One typed graph -> one serialised TensorRT engine."""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from dspark.errors import DSparkError, UsageError
from dspark.export.lowering.tensorrt import TypedGraph
from dspark.tensorrt import logger, make_builder

COMPATIBILITY = {"none": "NONE", "ampere-plus": "AMPERE_PLUS", "same-compute-capability": "SAME_COMPUTE_CAPABILITY"}


@dataclass(frozen=True)
class Options:
    """How to build. profile: sizes of dimensions, in the place of the ones that the bundle's limits give.

    Of TensorRT alone: timing_cache (a file, made if missing), version_compatible, hardware_compatibility (a key of
    COMPATIBILITY). Of TensorRT-RTX alone: compute_capabilities, such as "8.9"; none stands for this machine's GPU, and
    where there is none for all from 8.0 on that the package knows.
    """

    backend: str
    dtype: str = "bf16"
    profile: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    timing_cache: Path | None = None
    version_compatible: bool = False
    hardware_compatibility: str = "none"
    compute_capabilities: tuple[str, ...] = ()
    unroll_markov: bool = False  # MarkovArgmax in plain layers, for blocks of exactly the drafter's size


def build_engine(
    trt: ModuleType, graph: TypedGraph, shapes: Mapping[str, tuple], options: Options, progress: Callable[[str], None]
) -> Any:
    """The serialised engine of a typed graph, as a buffer; the plugins must be registered.

    shapes: of every input the smallest, usual and largest. options.compute_capabilities must be set for TensorRT-RTX.
    Raises DSparkError when TensorRT refuses the graph or the build. An exception that a signal raises meanwhile comes
    through when TensorRT has stopped.
    """
    stop = threading.Event()
    # Python delivers signals to the main thread: an exception inside of one of TensorRT's callbacks would be lost.
    with ThreadPoolExecutor(1) as worker:
        try:
            return worker.submit(_build, trt, graph, shapes, options, progress, stop).result()
        finally:
            stop.set()


def _build(
    trt: ModuleType,
    graph: TypedGraph,
    shapes: Mapping[str, tuple],
    options: Options,
    progress: Callable[[str], None],
    stop: threading.Event,
) -> Any:
    role, log = graph.file.stem, logger(trt)
    log.errors.clear()
    progress(f"parsing the {role} graph")
    builder = make_builder(trt, options.backend)
    network = builder.create_network(0)  # strongly typed, as all are from TensorRT 11 on
    parse(trt, network, graph)
    config = builder.create_builder_config()
    configure(trt, config, options)
    _set_profile(builder, network, config, shapes)
    if options.timing_cache is not None:
        _load_timing_cache(config, options.timing_cache)
    progress(f"building the {role} engine ({options.backend} {trt.__version__}, {options.dtype})")
    config.progress_monitor = monitor = _monitor(trt, stop)
    engine = builder.build_serialized_network(network, config)
    del monitor  # the config keeps no reference to it
    if engine is None:
        raise DSparkError(f"{role}: {options.backend} {trt.__version__} could not build the engine: {_reason(log)}")
    if options.timing_cache is not None:
        _save_timing_cache(config, options.timing_cache)
    return engine


def parse(trt: ModuleType, network: Any, graph: TypedGraph) -> None:
    """Parse a typed graph into an empty network. Ensures: one plugin layer for each of its dspark:: nodes.

    DSparkError, with the parser's words on its first complaint, where it is refused.
    """
    parser = trt.OnnxParser(network, logger(trt))
    if not parser.parse_from_file(str(graph.file)):
        log = logger(trt)
        found = [_complaint(parser.get_error(i), log) for i in range(parser.num_errors)] or [_reason(log)]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise DSparkError(f"{graph.file.stem}: TensorRT cannot parse the graph: {found[0]}{more}")
    layers = sum(network.get_layer(i).type == trt.LayerType.PLUGIN_V3 for i in range(network.num_layers))
    if layers != len(graph.plugins):
        raise DSparkError(
            f"{graph.file.stem}: {layers} plugin layers for {len(graph.plugins)} nodes; build the plugin library again"
        )


def configure(trt: ModuleType, config: Any, options: Options) -> None:
    # The plugins update their caches in place.
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    # What the graph has in fp32 is meant so.
    config.clear_flag(trt.BuilderFlag.TF32)
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if options.hardware_compatibility != "none":
        level = COMPATIBILITY[options.hardware_compatibility]
        config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)
    if options.backend == "tensorrt-rtx":
        config.num_compute_capabilities = len(options.compute_capabilities)
        for i, capability in enumerate(options.compute_capabilities):
            kind = getattr(trt.ComputeCapability, f"SM{capability.replace('.', '')}")
            config.set_compute_capability(kind, i)


def _monitor(trt: Any, stop: threading.Event) -> Any:
    """Ends a build when `stop` is set."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            pass

        def phase_finish(self, name: str) -> None:
            pass

        def step_complete(self, name: str, step: int) -> bool:
            return not stop.is_set()

    return Monitor()


def _complaint(error: Any, log: Any) -> str:
    # A plugin says itself what it cannot take; else the first line names the kind of fault, the second one what was it.
    reason = _plugins_words(log) or " ".join(str(error.desc()).strip().splitlines()[:2])
    return f"node {error.node_name()!r} ({error.node_operator()}): {reason[:400]}"


def _plugins_words(log: Any) -> str:
    said = [line.removeprefix("dspark: ") for line in log.errors if line.startswith("dspark: ")]
    return said[0] if said else ""


def _reason(log: Any) -> str:
    """A plugin's words or TensorRT's own. That there is no driver is no reason where none is needed."""
    lines = [line for line in log.errors if "CUDA driver version is insufficient" not in line]
    return _plugins_words(log) or (" ".join(lines[0].split())[:400] if lines else "it gives no reason")


def _set_profile(builder: Any, network: Any, config: Any, shapes: Mapping[str, tuple]) -> None:
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        sizes = shapes.get(tensor.name)
        found = tuple(tensor.shape)
        if sizes is None or len(sizes[0]) != len(found):
            raise DSparkError(f"input {tensor.name!r} {list(found)} is not the manifest's; export the bundle again")
        if any(fixed not in (-1, size) for shape in sizes for fixed, size in zip(found, shape, strict=True)):
            raise DSparkError(f"input {tensor.name!r} is {list(found)}, the profile says {list(sizes[1])}")
        profile.set_shape(tensor.name, *sizes)
    if config.add_optimization_profile(profile) < 0:
        raise DSparkError("TensorRT refuses the profile; see --profile")


def _load_timing_cache(config: Any, file: Path) -> None:
    try:
        content = file.read_bytes() if file.exists() else b""
    except OSError as error:
        raise UsageError(f"--timing-cache {file}: cannot be read ({error.strerror}); name another file") from error
    cache = config.create_timing_cache(content)
    if cache is None or not config.set_timing_cache(cache, False):
        raise UsageError(f"--timing-cache {file}: is not of this TensorRT and GPU; remove it or name another file")


def _save_timing_cache(config: Any, file: Path) -> None:
    aside = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        aside.write_bytes(config.get_timing_cache().serialize())
        aside.replace(file)
    except OSError as error:
        raise UsageError(f"--timing-cache {file}: cannot be written ({error.strerror}); name another file") from error
    finally:
        aside.unlink(missing_ok=True)

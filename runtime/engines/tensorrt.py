"""TensorRT and TensorRT-RTX: a bundle's engines on device buffers, caches in place, small steps as CUDA graphs.

Every input and output has one device buffer of its largest size, bound once; a K/V cache is bound as input and as
output. Rows are padded to a few sizes, so that few shapes occur: the plugins pass over rows behind the last marker.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from dspark import plugins
from dspark.cuda import Gpu, dotted, require_gpu
from dspark.errors import DSparkError, UsageError
from dspark.manifest import Engine as Built
from dspark.manifest import Manifest, sized
from dspark.runtime.bundle import Bundle
from dspark.runtime.engines.base import NOISE, CacheRows
from dspark.runtime.engines.device import Device, DeviceRows, Memory, Pinned
from dspark.tensorrt import first_line, import_tensorrt, logger, make_runtime, version_numbers

WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}  # bytes
ROWS = ("T", "L", "G", "Tc")  # dimensions that may be padded
GRAPH_ROWS = 64  # a step of more rows keeps the GPU busy without a CUDA graph
ON_DEVICE = "taps"  # the output that goes to the other engine


class TensorRTEngine:
    """An Engine (see base.py) over the engine that a bundle has for a role, for one request."""

    def __init__(self, bundle: Bundle, role: str, capacity: int, backend: str, device: Device | None = None):
        """Load the engine of `role` with caches of `capacity` rows, rings of as many as it was built for.

        device: shared by engines that hand rows to each other. DSparkError: the package, a GPU or the plugin library is
        missing, or none of the bundle's engines fits them (the message says how to build one that does).
        """
        trt = import_tensorrt(backend)
        gpu = require_gpu(f"backend {backend}")
        self.built = choose(bundle.manifest, role, backend, trt.__version__, gpu)
        self.graph = bundle.manifest.graph(role, "portable")
        self.inputs = {tensor.name: tensor for tensor in self.graph.inputs}
        self.device = device or Device()
        self.capacity = capacity
        self.slots = 0  # no plugin, no engine for recurrent layers
        self.requests, self.owners = 1, dict[int, object]()
        self.seconds = 0.0
        self.version, self.sha256 = trt.__version__, self.built.sha256
        library = next(p.file for p in bundle.manifest.plugins if p.sha256 == self.built.plugins)
        plugins.register(trt, bundle.path(library))
        self._trt = trt
        self._runtime, self._engine = _deserialise(trt, bundle, self.built)
        self._sizes = {name: sizes[-1] for name, sizes in self.built.profile.items()}
        self._rows = rows = CacheRows.of(self.graph, capacity, self._sizes.get("W", 0) - self.graph.window)
        self.most_rows = rows.most
        self._fixed = {"R": 1, "P": 1, "N": rows.pages, "C": capacity, "W": rows.ring}
        self._sizes |= self._fixed
        for name in ("C", "W"):
            least, _, most = self.built.profile.get(name, (0, 0, self._fixed[name]))
            if not least <= self._fixed[name] <= most:
                raise UsageError(f"{self.built.file}: takes caches of {least} to {most} rows, not {self._fixed[name]}")
        self._memory = {t.name: self._room(t) for t in (*self.graph.inputs, *self.graph.outputs)}
        self._staging = {t.name: Pinned(self.device, self._memory[t.name].size) for t in self.graph.inputs}
        self._fetched: dict[str, Pinned] = {}
        for pair in self.graph.caches:
            size = pair.kv_heads * rows[pair] * pair.head_dim * WIDTH[self.built.dtype]
            self._memory[pair.input] = self._memory[pair.output] = Memory(self.device, size)
        self._scratch = Memory(self.device, self._engine.device_memory_size_v2)
        self._steps: dict[tuple[int, ...], _Step] = {}

    def _room(self, tensor) -> Memory:
        size = int(np.prod(sized(tensor.shape, self._sizes))) * np.dtype(tensor.dtype).itemsize
        return Memory(self.device, size)

    def run(self, inputs: Mapping[str, Any], fetch: Sequence[str]) -> dict[str, Any]:
        """Engine.run. `taps` may be DeviceRows as an input and are as an output. DSparkError when TensorRT fails."""
        started = time.perf_counter()
        sizes = dict(self._fixed)
        given = [tensor for name, tensor in self.inputs.items() if name != NOISE or name in inputs]
        for tensor in given:
            found = np.shape(inputs[tensor.name])
            sizes |= {d: n for d, n in zip(tensor.shape, found, strict=True) if d in ROWS}
        padded = sizes | {name: self._padded(name, sizes[name]) for name in ROWS if name in sizes}
        for tensor in given:
            self._feed(tensor, inputs[tensor.name], sized(tensor.shape, padded))
        self._step(padded)()
        results = {name: self._result(name, sizes) for name in fetch}
        # Staging buffers are written again by the next run.
        self.device.wait()
        self.seconds += time.perf_counter() - started
        return results

    def keep(self, rows: Sequence[int]) -> None:
        """Engine.keep: all that a request has is in the caches."""

    def _padded(self, name: str, size: int) -> int:
        smallest, _, largest = self.built.profile[name]
        if not 1 <= size <= largest:
            raise UsageError(
                f"{self.built.file}: {size} rows of {name}, it takes 1 to {largest}; use smaller pieces, or build it"
                f" again with --profile {name}={smallest}:{largest}:{size}"
            )
        tier = 1 << (size - 1).bit_length() if size <= GRAPH_ROWS else size
        return min(max(tier, smallest), largest)

    def _feed(self, tensor, value: Any, shape: tuple[int, ...]) -> None:
        memory = self._memory[tensor.name]
        if isinstance(value, DeviceRows):
            self.device.copy(memory.address, value.address, value.nbytes)
            return
        staged = self._staging[tensor.name].view(tensor.dtype, shape).reshape(-1)
        staged[: value.size] = value.reshape(-1)
        staged[value.size :] = 0  # a row, or a page, that exists
        self.device.to_device(memory.address, staged)

    def _result(self, name: str, sizes: Mapping[str, int]) -> Any:
        """The output without its padding, which lies behind it: there is one request."""
        tensor, memory = next(t for t in self.graph.outputs if t.name == name), self._memory[name]
        shape = sized(tensor.shape, sizes)
        if name == ON_DEVICE:
            return DeviceRows(memory, 0, (shape[0], shape[1]))
        if name not in self._fetched:
            self._fetched[name] = Pinned(self.device, memory.size)
        host = self._fetched[name].view(tensor.dtype, shape)
        self.device.to_host(host, memory.address)
        return host

    def _step(self, sizes: Mapping[str, int]) -> "_Step":
        """The step for these sizes. Small ones keep a context and a CUDA graph of their own: a context that has been
        given other shapes must not run an older graph."""
        rows = tuple(sizes[name] for name in ROWS if name in sizes)
        small = max(rows) <= GRAPH_ROWS
        key = rows if small and self.built.backend == "tensorrt" else ()
        if key not in self._steps:
            self._steps[key] = _Step(self._make_context(), self.device, self.built.file, graph=key != ())
            for name, memory in self._memory.items():
                self._steps[key].context.set_tensor_address(name, memory.address)
        step = self._steps[key]
        shapes = {t.name: sized(t.shape, sizes) for t in self.graph.inputs}
        shapes |= {p.input: (1, p.kv_heads, self._rows[p], p.head_dim) for p in self.graph.caches}
        step.reshape(shapes)
        return step

    def _make_context(self) -> Any:
        """Contexts share their scratch memory, since they run one after the other."""
        trt, managed = self._trt, self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self.built.backend == "tensorrt-rtx":  # it captures graphs by itself
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(managed)
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            context = self._engine.create_execution_context(config)
        else:
            context = self._engine.create_execution_context(managed)
        if context is None:
            raise DSparkError(f"{self.built.file}: no execution context: {_words(trt)}")
        context.set_device_memory(self._scratch.address, self._scratch.size)
        return context


class _Step:
    """An execution context and, from its third run with one shape on, the CUDA graph of it."""

    def __init__(self, context: Any, device: Device, file: str, graph: bool):
        self.context, self.device, self.file, self.graph = context, device, file, graph
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._runs = 0
        self._replay: Callable[[], None] | None = None

    def reshape(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            if self._shapes.get(name) != shape:
                if not self.context.set_input_shape(name, shape):
                    raise DSparkError(f"{self.file}: TensorRT refuses shape {list(shape)} for {name!r}; build it again")
                self._shapes[name] = shape

    def __call__(self) -> None:
        self._runs += 1
        if self.graph and self._replay is None and self._runs > 1:  # the first run prepares the context
            self._replay = self.device.capture(self._enqueue)
        (self._replay or self._enqueue)()

    def _enqueue(self) -> None:
        if not self.context.execute_async_v3(self.device.stream):
            raise DSparkError(f"{self.file}: TensorRT failed in a run; see its log")


def choose(manifest: Manifest, role: str, backend: str, version: str, gpu: Gpu) -> Built:
    """The first engine of a role that this TensorRT `version` on this GPU can load; DSparkError says why none can."""
    engines = [e for e in manifest.engines if (e.graph, e.backend) == (role, backend)]
    again = f"dspark build BUNDLE --backend {backend}"
    if not engines:
        raise DSparkError(f"the bundle has no {role} engine for {backend}; build one: {again}")
    reasons = []
    for engine in engines:
        reason = misfit(engine, version, gpu)
        if reason is None:
            return engine
        reasons.append(reason)
    raise DSparkError(f"{'; '.join(reasons)}; build it again here: {again}")


def misfit(engine: Built, version: str, gpu: Gpu) -> str | None:
    """Why an engine cannot be loaded, None where it can. TensorRT finds out too, but only after it has read it."""
    have, want = version_numbers(version), version_numbers(engine.trt_version)
    newer = engine.version_compatible and have[:1] == want[:1] and have >= want
    if version != engine.trt_version and not newer:
        return f"{engine.file} was built by {engine.backend} {engine.trt_version}, {version} is installed"
    capability = dotted(gpu.capability)
    ampere = engine.hardware_compatibility == "ampere-plus" and gpu.capability >= (8, 0)
    if capability not in engine.compute_capabilities and not ampere:
        built_for = ", ".join(engine.compute_capabilities)
        return f"{engine.file} is for GPUs of compute capability {built_for}, {gpu.name} has {capability}"
    return None


def _deserialise(trt: ModuleType, bundle: Bundle, built: Built) -> tuple[Any, Any]:
    """(runtime, engine); the runtime has to live as long."""
    runtime, log = make_runtime(trt), logger(trt)
    log.errors.clear()
    runtime.engine_host_code_allowed = built.version_compatible
    engine = runtime.deserialize_cuda_engine(bundle.path(built.file).read_bytes())
    if engine is None:
        raise DSparkError(f"{built.file}: {built.backend} cannot load it: {_words(trt)}; build it again")
    return runtime, engine


def _words(trt: ModuleType) -> str:
    errors = logger(trt).errors
    return first_line(errors[0]) if errors else "it gives no reason"

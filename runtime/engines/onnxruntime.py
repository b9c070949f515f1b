"""ONNX Runtime on the CPU: the lowered graphs of a bundle, K/V caches updated in place through I/O binding.

A cache is bound once, to one buffer, as input and as output. Small inputs are copied into bound buffers, outputs are
written by ONNX Runtime into ours: a step with unchanged shapes binds nothing and allocates nothing. States of recurrent
layers have two buffers: one for every place, which a step of one request reads where it is, and one for those after the
last rows of each request; a commit copies one of these.
"""

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from dspark.errors import DSparkError, UsageError
from dspark.manifest import CHUNK, Graph, Tensor, sized
from dspark.runtime.bundle import Bundle
from dspark.runtime.engines.base import NOISE, CacheRows

FORM, BATCH_FORM = "onnxruntime-cpu", "onnxruntime-cpu-batch"
_TYPES = {"float32": "float", "float16": "float16", "int64": "int64", "int32": "int32"}  # as ONNX Runtime spells them


class OnnxRuntimeEngine:
    """An Engine (see base.py) over one ONNX file: for one request, or for the requests of a batch."""

    def __init__(
        self,
        bundle: Bundle,
        role: str,
        capacity: int,
        threads: int | None = None,
        slack: int = CHUNK,
        requests: int = 1,
    ):
        """Load the graph of `role` ("target" or "drafter") with caches of `capacity` rows, rings of window + `slack`,
        for as many `requests` at once.

        threads: intra-op threads; None lets ONNX Runtime take one per core. DSparkError when the package is missing or
        refuses the file, UsageError when the graph is not what the manifest describes.
        """
        ort = _import()
        self.graph = bundle.manifest.graph(role, form_of(requests))
        file = bundle.path(self.graph.file)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads or 0
        options.log_severity_level = 4  # its errors reach us as exceptions; ours is the one line about them
        # Target and drafter run in turn: threads of one that go on spinning after its run would slow the other. Within
        # a run a short spin bridges the gaps between operators; a long one burns the core that a busy machine needs
        # (measured on 2 cores: quiet, as fast as long spinning; with other load, 1.5 times as fast).
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry("session.intra_op.spin_duration_us", "50")
        try:
            self._session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the package raises its own classes, whose names differ between versions
            raise DSparkError(f"{file}: ONNX Runtime cannot load it: {_first_line(error)}; export it again") from error
        _compare(self.graph, self._session, str(file))
        self._ort = ort
        self.inputs = {tensor.name: tensor for tensor in self.graph.inputs}
        self._outputs = {tensor.name: tensor for tensor in self.graph.outputs}
        self.requests = requests
        self.capacity, rows = capacity, CacheRows.of(self.graph, capacity, slack)
        self.most_rows = rows.most
        self.slots = self.graph.slots
        self.owners: dict[int, object] = {}
        self.seconds = 0.0
        self.version, self.sha256 = ort.__version__, bundle.manifest.files[self.graph.file].sha256
        try:
            # Zeroed memory of this size comes from the system untouched: rows cost memory when they are first written.
            self.caches = {
                pair.input: np.zeros((requests, pair.kv_heads, rows[pair], pair.head_dim), pair.dtype)
                for pair in self.graph.caches
            }
            self.states = {s.input: np.zeros((requests, *s.shape), s.dtype) for s in self.graph.states}
            # What a run gives as states: those after its last rows, or after all rows of a shorter one.
            self._flat = {
                s.output: np.empty(requests * s.slots * math.prod(s.shape), s.dtype) for s in self.graph.states
            }
        except MemoryError as error:
            many = f" for {requests} requests" if requests > 1 else ""
            raise DSparkError(
                f"{file}: no memory for K/V caches of {capacity} rows{many}; load it with a smaller max_context_len, or"
                " export it with one"
            ) from error
        self._bindings: dict[tuple[str, ...], _Binding] = {}
        # Of the last run: its requests' places, the rows that each brought, and the states after the last of these.
        self._places, self._rows = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._after: dict[str, np.ndarray] = {}

    def run(self, inputs: Mapping[str, np.ndarray], fetch: Sequence[str]) -> dict[str, np.ndarray]:
        """Engine.run; DSparkError when ONNX Runtime fails."""
        key = tuple(fetch)
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = self._bind_caches()
        sizes: dict[str, int] = {}  # of the symbolic dimensions, read off the inputs
        for name, tensor in self.inputs.items():
            if name == NOISE and name not in inputs:
                binding.leave(tensor, sizes)
                continue
            value = inputs[name]
            binding.feed(tensor, value)
            for symbol, size in zip(tensor.shape, value.shape, strict=True):
                if isinstance(symbol, str):
                    sizes[symbol] = size
        results = {name: binding.result(self._outputs[name], sizes) for name in key}
        if self.graph.states:
            self._read_states(binding, inputs)
        started = time.perf_counter()
        try:
            self._session.run_with_iobinding(binding.io)
        except Exception as error:
            raise DSparkError(f"{self.graph.file}: ONNX Runtime failed in a run: {_first_line(error)}") from error
        self.seconds += time.perf_counter() - started
        return results

    def keep(self, rows: Sequence[int]) -> None:
        """Engine.keep"""
        for state in self.graph.states:
            for place, ran, kept, after in zip(self._places, self._rows, rows, self._after[state.output], strict=True):
                if kept:
                    self.states[state.input][place] = after[len(after) - 1 - (ran - kept)]

    def _read_states(self, binding: "_Binding", inputs: Mapping[str, np.ndarray]) -> None:
        """Bind what a run reads as states and where it writes them. A batch's requests are of any places: a copy."""
        total = len(inputs["tokens"])
        if self.requests == 1:
            self._rows = np.array([total])
        else:
            self._places, self._rows = inputs["pages"][:, 0].copy(), np.diff(inputs["row_start"])
        for state in self.graph.states:
            if self.requests > 1:
                tensor = Tensor(state.input, state.dtype, ("R", *state.shape))
                binding.feed(tensor, self.states[state.input][self._places])
            shape = (len(self._places), min(total, state.slots), *state.shape)
            after = self._after[state.output] = self._flat[state.output][: math.prod(shape)].reshape(shape)
            binding.fill(state.output, after)

    def _bind_caches(self) -> "_Binding":
        """A binding for one set of outputs: bindings cannot drop a single output, so each set has its own."""
        binding = _Binding(self._session.io_binding(), self._ort.OrtValue.ortvalue_from_numpy)
        for pair in self.graph.caches:
            value = binding.wrap(self.caches[pair.input])
            binding.io.bind_ortvalue_input(pair.input, value)
            binding.io.bind_ortvalue_output(pair.output, value)
        for name, state in self.states.items() if self.requests == 1 else ():
            binding.io.bind_ortvalue_input(name, binding.wrap(state))
        return binding


def form_of(requests: int) -> str:
    """The form of the graphs that run up to so many requests in a step."""
    return FORM if requests == 1 else BATCH_FORM


class _Binding:
    """An IOBinding and the host buffers behind it. A buffer is flat and grows; a shape is a view of its beginning."""

    def __init__(self, io, wrap):
        self.io = io
        self.wrap = wrap
        self._flat: dict[str, np.ndarray] = {}
        self._bound: dict[str, np.ndarray] = {}

    def feed(self, tensor: Tensor, value: np.ndarray) -> None:
        """Copy `value` into the input's buffer, and bind that anew only if the shape changed."""
        bound = self._bound.get(tensor.name)
        if bound is None or bound.shape != value.shape:
            bound = self._view(tensor, value.shape)
            self.io.bind_ortvalue_input(tensor.name, self.wrap(bound))
        np.copyto(bound, value)

    def leave(self, tensor: Tensor, sizes: Mapping[str, int]) -> None:
        """Bind an input that the run will not read: memory with whatever is in it."""
        shape = sized(tensor.shape, sizes)
        bound = self._bound.get(tensor.name)
        if bound is None or bound.shape != shape:
            self.io.bind_ortvalue_input(tensor.name, self.wrap(self._view(tensor, shape)))

    def result(self, tensor: Tensor, sizes: Mapping[str, int]) -> np.ndarray:
        """The array that the next run fills with the output."""
        shape = sized(tensor.shape, sizes)
        bound = self._bound.get(tensor.name)
        if bound is None or bound.shape != shape:
            bound = self._view(tensor, shape)
            self.io.bind_ortvalue_output(tensor.name, self.wrap(bound))
        return bound

    def fill(self, name: str, array: np.ndarray) -> None:
        """Let the next run write an output into `array`, which is always the same memory."""
        bound = self._bound.get(name)
        if bound is None or bound.shape != array.shape:
            self._bound[name] = array
            self.io.bind_ortvalue_output(name, self.wrap(array))

    def _view(self, tensor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
        size = math.prod(shape)
        flat = self._flat.get(tensor.name)
        if flat is None or flat.size < size:
            flat = self._flat[tensor.name] = np.empty(size, tensor.dtype)
        view = self._bound[tensor.name] = flat[:size].reshape(shape)
        return view


def _import():
    try:
        import onnxruntime
    except ImportError as error:
        raise DSparkError("the package onnxruntime is missing; install it with: pip install '.[cpu]'") from error
    return onnxruntime


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _compare(graph: Graph, session, file: str) -> None:
    """Every tensor that the manifest names must be in the file, with its type and fixed dimensions, and no other."""

    def check(kind: str, stated: list[Tensor], found: dict) -> None:
        for tensor in stated:
            node = found.pop(tensor.name, None)
            if node is None:
                raise UsageError(f"{file}: has no {kind} {tensor.name!r}, which the manifest names; export it again")
            same = node.type == f"tensor({_TYPES.get(tensor.dtype)})" and len(node.shape) == len(tensor.shape)
            pairs = zip(tensor.shape, node.shape, strict=True) if same else ()
            # A name of a dimension means nothing here; two numbers must be the same number.
            if not same or any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs):
                stated_as = f"{tensor.dtype} {list(tensor.shape)}"
                raise UsageError(f"{file}: {kind} {tensor.name!r} is {node.type} {node.shape}, not {stated_as}")
        for name in found:
            raise UsageError(f"{file}: {kind} {name!r} is not in the manifest; export the bundle again")

    def cache(name: str, dtype: str, kv_heads: int, head_dim: int) -> Tensor:
        return Tensor(name, dtype, (1, kv_heads, "C", head_dim))

    pairs = graph.caches
    inputs = [*graph.inputs, *(cache(p.input, p.dtype, p.kv_heads, p.head_dim) for p in pairs)]
    outputs = [*graph.outputs, *(cache(p.output, p.dtype, p.kv_heads, p.head_dim) for p in pairs)]
    inputs += [Tensor(state.input, state.dtype, (1, *state.shape)) for state in graph.states]
    outputs += [Tensor(state.output, state.dtype, (1, "S", *state.shape)) for state in graph.states]
    check("input", inputs, {node.name: node for node in session.get_inputs()})
    check("output", outputs, {node.name: node for node in session.get_outputs()})

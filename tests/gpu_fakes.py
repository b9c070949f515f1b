"""A GPU, CUDA and TensorRT in plain Python, as far as runtime/engines needs them.

Device memory is host memory full of NaN; work is queued and done at the next synchronisation, so that a result that is
read too early, or a buffer that is written too early, is wrong. An "engine" is the bundle's portable graph on ONNX
Runtime.
"""

import contextlib
import ctypes
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnxruntime

from dspark import manifest as m
from dspark.cuda import Cuda, Gpu
from dspark.export import bundle as writing
from dspark.export.profiles import plan

GPU = Gpu("Fake GPU", (8, 9), 2**34)
VERSION = "11.4.0"


class FakeCuda:
    """The functions of cuda.bindings.runtime that device.py calls."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3)
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self):
        self.blocks: dict[int, np.ndarray] = {}
        self.queue: list = []
        self.recording: list | None = None
        self.launches = 0
        self.downloads: list[int] = []  # bytes

    def add(self, work):
        (self.queue if self.recording is None else self.recording).append(work)

    def array(self, address, size):
        for start, block in self.blocks.items():
            if start <= address and address + size <= start + len(block):
                return block[address - start : address - start + size]
        return None

    def allocate(self, size):
        block = np.full(size, 0xFF, np.uint8)
        self.blocks[block.ctypes.data] = block
        return 0, block.ctypes.data

    def cudaStreamCreate(self):
        return 0, 7

    def cudaStreamSynchronize(self, stream):
        assert self.recording is None
        work, self.queue = self.queue, []
        for step in work:
            step()
        return (0,)

    def cudaMallocAsync(self, size, stream):
        return self.allocate(size)

    def cudaHostAlloc(self, size, flags):
        return self.allocate(size)

    def cudaFreeAsync(self, address, stream):
        block = self.blocks[address]

        def free():
            block.fill(0xFF)
            del self.blocks[address]

        self.queue.append(free)
        return (0,)

    def cudaFreeHost(self, address):
        del self.blocks[address]
        return (0,)

    def cudaMemcpyAsync(self, target, source, size, kind, stream):
        for address in {1: (target,), 2: (source,), 3: (target, source)}[kind]:
            assert self.array(address, size) is not None, "a copy beyond the device's memory"
        if kind == 2:
            self.downloads.append(size)
        self.add(lambda: ctypes.memmove(target, source, size))
        return (0,)

    def cudaStreamBeginCapture(self, stream, mode):
        self.recording = []
        return (0,)

    def cudaStreamEndCapture(self, stream):
        graph, self.recording = self.recording, None
        return 0, graph

    def cudaGraphInstantiate(self, graph, flags):
        return 0, graph

    def cudaGraphDestroy(self, graph):
        return (0,)

    def cudaGraphLaunch(self, graph, stream):
        self.launches += 1
        self.queue.extend(graph)
        return (0,)


class FakeContext:
    def __init__(self, engine, config):
        self.engine, self.config = engine, config
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def set_input_shape(self, name, shape):
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def set_device_memory(self, address, size):
        assert self.engine.cuda.array(address, size) is not None

    def execute_async_v3(self, stream):
        assert stream == 7
        shapes = dict(self.shapes)

        def work():
            assert shapes == self.shapes, "the context was given other shapes after the graph was captured"
            self.engine.compute(shapes, self.addresses)

        self.engine.cuda.add(work)
        return True


class FakeEngine:
    device_memory_size_v2 = 1000

    def __init__(self, cuda, file):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.cuda, self.session = cuda, onnxruntime.InferenceSession(file, options)
        self.contexts: list[FakeContext] = []

    def create_runtime_config(self):
        return SimpleNamespace(set_execution_context_allocation_strategy=lambda strategy: None)

    def create_execution_context(self, config):
        self.contexts.append(FakeContext(self, config))
        return self.contexts[-1]

    def view(self, address, dtype, shape):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.cuda.array(address, size).view(dtype).reshape(shape)

    def compute(self, shapes, addresses):
        types = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(float)": np.float32}
        feeds = {
            node.name: self.view(addresses[node.name], types[node.type], shapes[node.name]).copy()
            for node in self.session.get_inputs()
        }
        outputs = [node.name for node in self.session.get_outputs()]
        for name, value in zip(outputs, self.session.run(outputs, feeds), strict=True):
            self.view(addresses[name], value.dtype, value.shape)[...] = value


class FakeTensorRT(ModuleType):
    """The module `tensorrt` or `tensorrt_rtx`. `loaded`: the engines that were deserialised."""

    __version__ = VERSION
    Builder = None

    class ILogger:
        ERROR, INTERNAL_ERROR = 1, 0

    def __init__(self, name, cuda):
        super().__init__(name)
        self.loaded: list[FakeEngine] = []
        self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED=2)
        self.CudaGraphStrategy = SimpleNamespace(WHOLE_GRAPH_CAPTURE=1)

        def deserialise(content):
            self.loaded.append(FakeEngine(cuda, content.decode()))
            return self.loaded[-1]

        self.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=deserialise)


@contextlib.contextmanager
def fake_gpu(monkeypatch, backend):
    """This machine has a GPU and the package of a backend; yields (cuda, trt)."""
    from dspark import plugins, tensorrt

    cuda = FakeCuda()
    trt = FakeTensorRT(tensorrt.PACKAGES[backend].module, cuda)
    monkeypatch.setitem(sys.modules, trt.__name__, trt)
    bindings = ModuleType("cuda.bindings")
    bindings.runtime = cuda
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr("dspark.cuda.query", lambda: Cuda("13.0", (GPU,), None))
    monkeypatch.setattr(plugins, "register", lambda trt, library=None: None)
    monkeypatch.setattr(tensorrt, "_name_library", lambda: None)
    tensorrt.import_tensorrt.cache_clear()
    yield cuda, trt
    tensorrt.import_tensorrt.cache_clear()


def with_engines(source: Path, folder: Path, backend: str, wanted: dict | None = None, **changes) -> Path:
    """A copy of a bundle with "engines" for a backend; `wanted` sizes of their profiles, `changes` of their manifest
    entries."""
    shutil.copytree(source, folder)
    old, library = m.read_manifest(folder), "plugins/library.so"
    for part in ("plugins", "engines"):
        (folder / part).mkdir()
    (folder / library).write_bytes(b"plugins")
    entry, engines = writing.file_entry(folder / library), []
    for role in ("target", "drafter"):
        file = f"engines/{role}.engine"
        (folder / file).write_text(str(folder / old.graph(role, "portable").file), encoding="utf-8")
        fields = {
            "backend": backend,
            "graph": role,
            "file": file,
            "sha256": writing.file_entry(folder / file).sha256,
            "trt_version": VERSION,
            "dtype": "fp32",
            "compute_capabilities": ["8.9"],
            "hardware_compatibility": "none",
            "version_compatible": False,
            "plugins": entry.sha256,
            "profile": plan(old, role, wanted or {}),
        }
        engines.append(fields | changes)
    raw = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    raw["engines"] = engines
    raw["plugins"] = [
        {"name": n, "version": "1", "namespace": "dspark", "file": library, "sha256": entry.sha256}
        for n in ("BlockAttention", "MarkovArgmax")
    ]
    for name in (library, *(engine["file"] for engine in engines)):
        added = writing.file_entry(folder / name)
        raw["files"][name] = {"sha256": added.sha256, "size": added.size}
    (folder / "manifest.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder

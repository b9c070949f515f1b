"""CUDA: memory, copies, one stream, graphs. The one importer of cuda-bindings, and only when a device is opened."""

import contextlib
import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from dspark.errors import DSparkError


class Device:
    """The current GPU and one stream on it. Everything is in the stream's order; `wait` waits for all of it."""

    def __init__(self) -> None:
        """DSparkError: cuda-bindings is missing, or CUDA does not start."""
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            hint = "pip install '.[tensorrt]', or '.[tensorrt-rtx]'"
            raise DSparkError(f"the package cuda-bindings is missing; install it with: {hint}") from error
        self._cuda = runtime
        self.stream = int(self.call("cudaStreamCreate"))

    def call(self, name: str, *arguments: Any) -> Any:
        """A function of the CUDA runtime; DSparkError with CUDA's words where it fails."""
        error, *values = getattr(self._cuda, name)(*arguments)
        if int(error):
            _, text = self._cuda.cudaGetErrorString(error)
            reason = text.decode() if isinstance(text, bytes) else str(text)
            raise DSparkError(f"CUDA: {name} failed: {reason}")
        return values[0] if values else None

    def wait(self) -> None:
        self.call("cudaStreamSynchronize", self.stream)

    def to_device(self, address: int, source: np.ndarray) -> None:
        """Copy a contiguous array, which must stay as it is until `wait`."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call("cudaMemcpyAsync", address, source.ctypes.data, source.nbytes, kind, self.stream)

    def to_host(self, target: np.ndarray, address: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.call("cudaMemcpyAsync", target.ctypes.data, address, target.nbytes, kind, self.stream)

    def copy(self, target: int, source: int, size: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self.call("cudaMemcpyAsync", target, source, size, kind, self.stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` puts on the stream; the result runs it again."""
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", self.stream, mode)
        work()
        graph = self.call("cudaStreamEndCapture", self.stream)
        launchable = self.call("cudaGraphInstantiate", graph, 0)
        self.call("cudaGraphDestroy", graph)
        return lambda: self.call("cudaGraphLaunch", launchable, self.stream)


class Memory:
    """Device memory, freed in the stream's order when the object goes."""

    def __init__(self, device: Device, size: int):
        self.device, self.size = device, size
        self.address = int(device.call("cudaMallocAsync", max(size, 1), device.stream))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # when the process ends, CUDA may be gone before this
            self.device.call("cudaFreeAsync", self.address, self.device.stream)


class Pinned:
    """Host memory that the GPU copies from and to without a detour, as an array of bytes."""

    def __init__(self, device: Device, size: int):
        self.device = device
        self.address = int(device.call("cudaHostAlloc", max(size, 1), 0))
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * max(size, 1)).from_address(self.address))

    def view(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """An array over the memory's beginning."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[:size].view(dtype).reshape(shape)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.device.call("cudaFreeHost", self.address)


class DeviceRows:
    """Rows fp32 [n, width] in device memory: to the stages what an array is, so that taps need not visit the host."""

    ndim, dtype = 2, np.dtype(np.float32)

    def __init__(self, memory: Memory, offset: int, shape: tuple[int, int]):
        """offset: of the first row in `memory`, in bytes."""
        self.memory, self.offset, self.shape = memory, offset, shape

    @property
    def address(self) -> int:
        return self.memory.address + self.offset

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Self:
        first, end, step = rows.indices(len(self))
        assert step == 1, "rows that follow each other"
        width = self.shape[1]
        return type(self)(self.memory, self.offset + first * width * self.dtype.itemsize, (max(end - first, 0), width))

    def copy(self) -> Self:
        return self.join([self])

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts in memory of their own."""
        device, width = parts[0].memory.device, parts[0].shape[1]
        memory, at = Memory(device, sum(part.nbytes for part in parts)), 0
        for part in parts:
            device.copy(memory.address + at, part.address, part.nbytes)
            at += part.nbytes
        return cls(memory, 0, (sum(map(len, parts)), width))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        host = np.empty(self.shape, np.float32)
        self.memory.device.to_host(host, self.address)
        self.memory.device.wait()
        return host if dtype is None else host.astype(dtype)

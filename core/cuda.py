"""What GPUs there are, asked of the CUDA driver itself: before any library is touched that crashes without one."""

import ctypes
import sys
from dataclasses import dataclass

from dspark.errors import DSparkError


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]  # compute capability, such as (8, 9)
    memory: int  # bytes


def dotted(capability: tuple[int, int]) -> str:
    """(8, 9) -> "8.9": as a manifest and the command line write compute capabilities."""
    return f"{capability[0]}.{capability[1]}"


@dataclass(frozen=True)
class Cuda:
    """driver: the newest CUDA version that the driver serves; error: why there is no driver."""

    driver: str | None
    gpus: tuple[Gpu, ...]
    error: str | None


def query() -> Cuda:
    """Driver and GPUs of this machine."""
    names = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
    for name in names:
        try:
            cuda = ctypes.CDLL(name)
            break
        except OSError:
            continue
    else:
        return Cuda(None, (), f"no CUDA driver ({names[0]} not found)")
    code = cuda.cuInit(0)
    if code:
        return Cuda(None, (), f"the CUDA driver does not start (cuInit: error {code})")
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return Cuda(driver, tuple(_gpu(cuda, index) for index in range(count.value)), None)


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    # Attributes 75 and 76: the compute capability.
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return Gpu(name.value.decode(), (major.value, minor.value), memory.value)


def require_gpu(purpose: str) -> Gpu:
    """The first GPU, which `purpose` (a plural or a gerund) needs; DSparkError, naming what is missing, without one."""
    cuda = query()
    if cuda.error is not None:
        raise DSparkError(f"{purpose} needs an NVIDIA GPU: {cuda.error}; use a machine with one")
    if not cuda.gpus:
        raise DSparkError(
            f"{purpose} needs an NVIDIA GPU: the CUDA driver {cuda.driver} shows none; use another machine"
        )
    return cuda.gpus[0]

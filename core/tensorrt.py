"""TensorRT and TensorRT-RTX, which have one API: the one place that imports them, and only when asked to.

Every function that takes `trt` wants the module that `import_tensorrt` returned.
"""

import ctypes
import functools
import importlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from dspark.alias import alias
from dspark.cuda import require_gpu
from dspark.errors import DSparkError


@dataclass(frozen=True)
class Package:
    module: str
    oldest: tuple[int, int]  # version
    install: str


PACKAGES = {
    "tensorrt": Package("tensorrt", (11, 0), "pip install '.[tensorrt]'"),
    "tensorrt-rtx": Package("tensorrt_rtx", (1, 7), "pip install '.[tensorrt-rtx]'"),
}
BACKENDS = tuple(PACKAGES)


@functools.cache
def import_tensorrt(backend: str) -> ModuleType:
    """The package of a backend (one of BACKENDS). DSparkError: missing, broken, or another version than is needed."""
    package = PACKAGES[backend]
    try:
        trt = importlib.import_module(package.module)
    except ModuleNotFoundError as error:
        raise DSparkError(
            f"backend {backend}: the package {package.module} is not installed; run {package.install}"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:  # a stub package, or libraries that do not load
        raise DSparkError(
            f"backend {backend}: the package {package.module} does not load ({first_line(error)}); install it again"
        ) from error
    version = getattr(trt, "__version__", "unknown")
    if version_numbers(version)[:2] < package.oldest or not hasattr(trt, "Builder"):
        needed = ".".join(map(str, package.oldest))
        raise DSparkError(
            f"backend {backend}: {package.module} {version} is installed, {needed} or newer is needed; run"
            f" {package.install}"
        )
    if backend == "tensorrt-rtx" and sys.platform == "linux":
        _name_library()
    return trt


def version_numbers(version: str) -> tuple[int, ...]:
    """'1.7.1.116' -> (1, 7, 1, 116); what is no number ends it."""
    numbers = []
    for part in version.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _name_library() -> None:
    """Let TensorRT-RTX's ONNX parser find `libtensorrt_rtx.so`.

    It opens the library by that name when it meets a plugin node; the wheel has only `libtensorrt_rtx.so.1`, which is
    loaded, and the process aborts.
    """
    name = "libtensorrt_rtx.so"
    try:
        ctypes.CDLL(name)
        return  # found: not the wheel, or done before
    except OSError:
        pass
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_bytes(alias(name, f"{name}.1"))
        ctypes.CDLL(str(file))  # it stays loaded


@functools.cache
def logger(trt: Any) -> Any:
    """The one logger of a package (TensorRT keeps a pointer to it), an ILogger with `errors`: the messages since the
    list was last cleared. Warnings are dropped, and nothing is printed: stdout belongs to --json."""

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

    return Logger()


def make_runtime(trt: ModuleType) -> Any:
    """A trt.Runtime. Without a driver TensorRT hands out an object that crashes, so the driver is asked first."""
    require_gpu("running TensorRT engines")
    return trt.Runtime(logger(trt))


def make_builder(trt: ModuleType, backend: str) -> Any:
    """A trt.Builder. TensorRT times kernels on the GPU; TensorRT-RTX builds without one."""
    if backend == "tensorrt":
        require_gpu("building TensorRT engines")
    return trt.Builder(logger(trt))


def first_line(error: Exception | str) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__

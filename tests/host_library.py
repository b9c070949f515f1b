"""The kernels of plugins/ on the CPU: builds their library over the host shim, and calls it with numpy arrays.

A library for a GPU (plugins/tests/device_api.cu) is called alike.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
from host_memory import Failed, Guarded, call, workspace_bytes

ROOT = Path(__file__).parents[1]
DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
# The largest relative error of rounding to the dtype.
ROUNDOFF = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}


def missing_tools() -> list[str]:
    return [tool for tool in ("cmake", "ninja", "g++") if shutil.which(tool) is None]


def build(sanitize: bool = False) -> Path:
    """Builds what changed, and returns the build's folder."""
    folder = ROOT / "build" / ("plugins-host-sanitized" if sanitize else "plugins-host")
    setting = f"-DDSPARK_SANITIZE={'ON' if sanitize else 'OFF'}"
    run("cmake", "-S", ROOT / "plugins", "-B", folder, "-G", "Ninja", setting)
    run("cmake", "--build", folder)
    return folder


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


# The checks of the shim's self test that have to pass; those named bad_* have to stop the program.
SHIM_CHECKS = ("barriers", "missing_barrier_shows", "warp_shuffles", "products", "numbers")


def shim_test(folder: Path, *names: str) -> subprocess.CompletedProcess:
    return subprocess.run([folder / "dspark_shim_test", *names], capture_output=True, text=True)


def sanitizer_environment() -> dict[str, str]:
    """The environment in which a plain Python can load the sanitized library."""
    runtime = run("g++", "-print-file-name=libasan.so").strip()
    # Python frees little at its end: its leaks are not ours.
    options = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return os.environ | options | {"DSPARK_HOST_LIBRARY": str(build(sanitize=True) / "libdspark_host.so")}


class Attention(ctypes.Structure):
    """dspark::BlockAttention, field by field."""

    held: dict[str, Guarded]  # what the pointers point into

    POINTERS = (
        "q", "k", "v", "key_cache", "value_cache", "row_start", "length", "pages",
        "context_k", "context_v", "context_start", "sinks", "out",
    )  # fmt: skip
    INTEGERS = (
        "dtype", "rows", "context_rows", "requests", "heads", "kv_heads", "head_size",
        "cache_pages", "request_pages", "page_rows", "causal", "window",
    )  # fmt: skip
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int32) for name in INTEGERS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("target_blocks", ctypes.c_int32),
    ]


class HostLibrary:
    def __init__(self, path: Path | str):
        self.c = ctypes.CDLL(str(path))
        self.c.dspark_host_status_text.restype = ctypes.c_char_p
        self.c.dspark_host_seed.argtypes = [ctypes.c_uint64]

    def seed(self, seed: int) -> None:
        """Chooses the order in which threads run from now on."""
        self.c.dspark_host_seed(seed)

    def status_text(self, status: int) -> str:
        return self.c.dspark_host_status_text(status).decode()

    def attention_status(self, params: Attention, workspace: int | None = None) -> int:
        """One call, with as many bytes of workspace as the library asks for, or `workspace`."""
        more = 0 if workspace is None else workspace - workspace_bytes(self.c, "block_attention", params)
        try:
            call(self.c, "block_attention", params, params.held, more)
        except Failed as error:
            return error.args[0]
        return 0

    def block_attention(self, arrays: dict[str, np.ndarray], **settings) -> tuple[np.ndarray, ...]:
        """(out, key cache, value cache) of the op; `settings` are its attributes, and target_blocks.

        AssertionError if it writes to an input.
        """
        params = attention_params(arrays | {"out": np.full_like(arrays["q"], np.nan)}, **settings)
        status = self.attention_status(params)
        assert status == 0, self.status_text(status)
        outputs = ("out", "key_cache", "value_cache")
        for name in arrays.keys() - set(outputs):
            assert params.held[name].array.tobytes() == arrays[name].tobytes(), f"{name} was written to"
        return tuple(params.held[name].array for name in outputs)


def attention_params(arrays: dict[str, np.ndarray], **settings) -> Attention:
    """The struct for one call. It points to copies of the arrays, which it holds."""
    total, heads, head_size = arrays["q"].shape
    cache_pages, kv_heads, page_rows, _ = arrays["key_cache"].shape
    params = Attention(
        dtype=[*DTYPES.values()].index(arrays["q"].dtype), rows=total, heads=heads, head_size=head_size,
        kv_heads=kv_heads, cache_pages=cache_pages, page_rows=page_rows, requests=arrays["pages"].shape[0],
        request_pages=arrays["pages"].shape[1], context_rows=len(arrays.get("context_k", ())), **settings,
    )  # fmt: skip
    params.held = {name: Guarded.of(array) for name, array in arrays.items()}
    for name, one in params.held.items():
        setattr(params, name, one.address)
    return params

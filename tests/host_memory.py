"""Memory for kernels whose surroundings are known, and calls of the library that has the kernels.

What lies around an input is NaN (floats) or far outside of every range (integers), what lies around an output has to
stay as it is, and an output begins as such values too. Where the library is for a GPU
(plugins/tests/device_api.cu), a call works on copies there, surroundings and all.
"""

import ctypes
import os
from collections.abc import Mapping

import numpy as np

# Bytes on either side. AddressSanitizer and compute-sanitizer see what reaches over an array's end, which finds more.
GUARD = 0 if {"ASAN_OPTIONS", "DSPARK_NO_GUARDS"} & os.environ.keys() else 256


class Guarded:
    """One array of a kernel: `array`, aligned to 16 bytes and then moved by `shift` elements, between guards."""

    def __init__(self, shape: tuple[int, ...], dtype, shift: int = 0):
        dtype = np.dtype(dtype)
        self._size = int(np.prod(shape)) * dtype.itemsize
        # 0x7f in an integer: no token and no row. 0xff: NaN in every float, and in a workspace of bytes.
        self._fill = 0x7F if dtype.kind == "i" else 0xFF
        self._at = GUARD + shift * dtype.itemsize
        self._memory = np.full(self._at + self._size + GUARD, self._fill, np.uint8)
        assert self._memory.ctypes.data % 16 == 0
        self.array = self._memory[self._at : self._at + self._size].view(dtype).reshape(shape)

    @classmethod
    def of(cls, array: np.ndarray, shift: int = 0) -> "Guarded":
        made = cls(array.shape, array.dtype, shift)
        made.array[...] = array
        return made

    @property
    def address(self) -> int:
        return self._memory.ctypes.data + self._at

    def check(self, name: str) -> None:
        """AssertionError if something wrote around the array."""
        around = np.concatenate((self._memory[: self._at], self._memory[self._at + self._size :]))
        assert (around == self._fill).all(), f"{name}: written outside of it"

    def upload(self, library: ctypes.CDLL) -> int:
        """The address of the array's copy on the GPU."""
        self._copy = ctypes.c_void_p()
        _expect(library.dspark_device_upload, ctypes.byref(self._copy), self._memory)
        return (self._copy.value or 0) + self._at

    def download(self, library: ctypes.CDLL) -> None:
        _expect(library.dspark_device_download, self._memory, self._copy)


def _expect(function, to, from_) -> None:
    size = next(each.size for each in (to, from_) if isinstance(each, np.ndarray))
    to, from_ = (ctypes.c_void_p(e.ctypes.data) if isinstance(e, np.ndarray) else e for e in (to, from_))
    function.restype = ctypes.c_char_p
    error = function(to, from_, ctypes.c_size_t(size))
    assert error is None, error.decode()


# dspark::Status, of status.h.
STATUS = {"ok": 0, "bad_shape": 1, "bad_dtype": 2, "bad_pointer": 3, "workspace_too_small": 5}


class Failed(Exception):
    """The status that a call ended with."""


def workspace_bytes(library: ctypes.CDLL, kernel: str, params: ctypes.Structure) -> int:
    """What the kernel needs for this call. AssertionError if its struct has another size than ours."""
    for function in ("size", "workspace"):
        getattr(library, f"dspark_host_{kernel}_{function}").restype = ctypes.c_size_t
    assert getattr(library, f"dspark_host_{kernel}_size")() == ctypes.sizeof(params)
    return getattr(library, f"dspark_host_{kernel}_workspace")(ctypes.byref(params))


def call(
    library: ctypes.CDLL, kernel: str, params: ctypes.Structure, held: Mapping[str, Guarded], more: int = 0
) -> None:
    """Run `kernel` on `params`, which point into `held`; `more` bytes of workspace than it needs.

    Failed if the kernel refuses the call; AssertionError if it wrote around an array or its workspace.
    """
    needed = workspace_bytes(library, kernel, params)
    workspace = Guarded((max(0, needed + more),), np.uint8)
    params, place, memory = type(params).from_buffer_copy(params), workspace.address, [*held.values(), workspace]
    on_device = hasattr(library, "dspark_device_upload")
    if on_device:
        place = workspace.upload(library)
        for name, one in held.items():
            copy = one.upload(library)
            if getattr(params, name) == one.address:  # and not something wrong on purpose
                setattr(params, name, copy)
    status = getattr(library, f"dspark_host_{kernel}")(
        ctypes.byref(params), ctypes.c_void_p(place), ctypes.c_size_t(workspace.array.size), None
    )
    if on_device:
        for one in memory:
            one.download(library)
    for name, one in held.items():
        one.check(name)
    workspace.check("workspace")
    if status:
        raise Failed(status)

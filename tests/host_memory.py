"""Memory for kernels on the host whose surroundings are known.

What lies around an input is NaN (floats) or far outside of every range (integers), what lies around an output has to
stay as it is, and an output begins as such values too.
"""

import ctypes
import os
from collections.abc import Mapping

import numpy as np

# Bytes on either side. AddressSanitizer puts forbidden ones there itself, which finds more.
GUARD = 0 if "ASAN_OPTIONS" in os.environ else 256


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


# dspark::Status, of status.h.
STATUS = {"ok": 0, "bad_shape": 1, "bad_dtype": 2, "bad_pointer": 3, "workspace_too_small": 5}


class Failed(Exception):
    """The status that a call ended with."""


def call(
    library: ctypes.CDLL, kernel: str, params: ctypes.Structure, held: Mapping[str, Guarded], more: int = 0
) -> None:
    """Run the host build's `kernel` on `params`, which point into `held`; `more` bytes of workspace than it needs.

    Failed if the kernel refuses the call; AssertionError if it wrote around an array or its workspace.
    """
    for function in ("size", "workspace"):
        getattr(library, f"dspark_host_{kernel}_{function}").restype = ctypes.c_size_t
    assert getattr(library, f"dspark_host_{kernel}_size")() == ctypes.sizeof(params)
    needed = getattr(library, f"dspark_host_{kernel}_workspace")(ctypes.byref(params))
    workspace = Guarded((max(0, needed + more),), np.uint8)
    status = getattr(library, f"dspark_host_{kernel}")(
        ctypes.byref(params), ctypes.c_void_p(workspace.address), ctypes.c_size_t(workspace.array.size)
    )
    for name, one in held.items():
        one.check(name)
    workspace.check("workspace")
    if status:
        raise Failed(status)

"""Memory for kernels on the host whose surroundings are known.

What lies around an input is NaN (floats) or far outside of every range (integers), what lies around an output has to
stay as it is, and an output begins as such values too.
"""

import os

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

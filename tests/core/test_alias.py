"""The second name of a loaded library, tried on libc."""

import ctypes
import os
import sys

import pytest

from dspark.alias import alias

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ELF")


def test_a_library_is_found_by_its_second_name(tmp_path):
    name = "libdspark_second_name_of_libc.so"
    with pytest.raises(OSError):
        ctypes.CDLL(name)
    file = tmp_path / name
    file.write_bytes(alias(name, "libc.so.6"))
    ctypes.CDLL(str(file))
    file.unlink()  # it stays loaded
    found = ctypes.CDLL(name)
    assert found.getpid() == os.getpid()
    assert (
        ctypes.cast(found.getpid, ctypes.c_void_p).value
        == ctypes.cast(ctypes.CDLL("libc.so.6").getpid, ctypes.c_void_p).value
    )


def test_a_library_that_is_not_there(tmp_path):
    file = tmp_path / "libx.so"
    file.write_bytes(alias("libx.so", "libdspark_nowhere.so.1"))
    with pytest.raises(OSError, match="libdspark_nowhere"):
        ctypes.CDLL(str(file))

"""plugins/tests/device_api.cu: it compiles, and the kernels' tests go through copies in a GPU's memory.

The GPU's memory is played by a library here that hands out memory of its own, so that the way there and back is tested
on the CPU. tools/gpu_check.sh runs the kernels' tests with the real one.
"""

import ctypes
import os
import shutil
from pathlib import Path

import host_library
import numpy as np
import pytest
from accept_kernel import Calls, run
from host_library import HostLibrary
from host_memory import Guarded
from kernel_builds import assert_tests_pass

from dspark import cuda

# Over the host build's library: `held` counts, so that what is never fetched or fetched twice shows.
DEVICE = """
#include <cstdlib>
#include <cstring>
#include "host_api.h"
static int held = 0;
DSPARK_HOST_API const char* dspark_device_upload(void** to, const void* from, size_t bytes) {
    if (posix_memalign(to, 256, bytes + 1) != 0) return "out of memory";
    held++;
    std::memcpy(*to, from, bytes);
    return nullptr;
}
DSPARK_HOST_API const char* dspark_device_download(void* to, void* from, size_t bytes) {
    if (bytes == 13) return "an illegal memory access was encountered";
    held--;
    std::memcpy(to, from, bytes);
    std::memset(from, 0x55, bytes);
    std::free(from);
    return nullptr;
}
DSPARK_HOST_API int dspark_device_held() { return held; }
"""


@pytest.fixture(scope="module")
def device(host_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("device")
    source, library = folder / "device.cpp", folder / "libdevice.so"
    source.write_text(DEVICE)
    include = f"-I{host_library.ROOT / 'plugins' / 'tests'}"
    # The kernels' entry points are looked up through it, in the library that it needs.
    flags = ("-std=c++17", "-fPIC", "-shared", include, "-Wl,--no-as-needed", f"-Wl,-rpath,{host_folder}")
    host_library.run("g++", *flags, source, host_folder / "libdspark_host.so", "-o", library)
    return library


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("test_block_attention.py", "test_table and fp16 and whole or refused or dropped or not_finite"),
        ("test_markov_argmax.py", "test_table or refused or nowhere or alone"),
        ("test_accept.py", "test_cases or refused or outside"),
    ],
)
def test_the_kernels_tests_through_copies(device, file, chosen):
    environment = os.environ | {"DSPARK_HOST_LIBRARY": str(device)}
    assert_tests_pass(str(Path(__file__).with_name(file)), "-k", chosen, environment=environment)


def test_every_copy_is_fetched_once(device):
    library = HostLibrary(device)
    arrays = Calls(drafts=(2, 1)).arrays()
    through_copies = run(library.c, arrays)
    assert library.c.dspark_device_held() == 0
    own = HostLibrary(device.parent / "libdevice.so")  # the same, called with host memory
    np.testing.assert_array_equal(through_copies, run(_without_device(own), arrays))


def _without_device(library: HostLibrary):
    class Plain:
        def __getattr__(self, name: str):
            if name.startswith("dspark_device"):
                raise AttributeError(name)
            return getattr(library.c, name)

    return Plain()


def test_what_is_written_around_an_array_on_the_device_is_found(device):
    library = HostLibrary(device).c
    one = Guarded.of(np.arange(4, dtype=np.int32))
    address = one.upload(library)
    assert address % 16 == one.address % 16
    np.ctypeslib.as_array((ctypes.c_int32 * 5).from_address(address))[:] = 9
    one.download(library)
    np.testing.assert_array_equal(one.array, [9, 9, 9, 9])
    with pytest.raises(AssertionError, match="it: written outside"):
        one.check("it")


def test_an_error_of_the_device_is_the_test_s(device, monkeypatch):
    monkeypatch.setattr("host_memory.GUARD", 0)
    library = HostLibrary(device).c
    one = Guarded((13,), np.uint8)
    one.upload(library)
    with pytest.raises(AssertionError, match="an illegal memory access"):
        one.download(library)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc not found")
@pytest.mark.parametrize("architecture", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_it_compiles_with_everything_in_it(tmp_path, architecture):
    library = tmp_path / "libdspark_device.so"
    include = f"-I{host_library.ROOT / 'plugins' / 'include'}"
    flags = ("-std=c++17", f"-arch=sm_{architecture}", "-shared", "-cudart", "static", "-Werror", "all-warnings")
    source = host_library.ROOT / "plugins" / "tests" / "device_api.cu"
    host_library.run("nvcc", *flags, "-Xcompiler", "-fPIC,-fvisibility=hidden", include, source, "-o", library)
    loaded = HostLibrary(library)
    assert loaded.status_text(0) == "ok"
    loaded.seed(3)
    if not cuda.query().gpus:
        with pytest.raises(AssertionError, match="CUDA"):
            run(loaded.c, Calls().arrays())

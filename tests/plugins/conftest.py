import os
from pathlib import Path

import host_library
import pytest


@pytest.fixture(scope="session")
def host_folder() -> Path:
    """The folder of the host build, built now if need be."""
    if missing := host_library.missing_tools():
        pytest.skip(f"{', '.join(missing)} not found")
    return host_library.build()


@pytest.fixture(scope="session")
def host(request) -> host_library.HostLibrary:
    """The kernels on the CPU; DSPARK_HOST_LIBRARY names another library, such as one for a GPU (device_api.cu)."""
    other = os.environ.get("DSPARK_HOST_LIBRARY")
    if other:
        return host_library.HostLibrary(other)
    return host_library.HostLibrary(request.getfixturevalue("host_folder") / "libdspark_host.so")


@pytest.fixture(scope="session")
def host_runner(host_folder) -> Path:
    """The folder with the plugins over the host shim, and the runner that plays TensorRT's part."""
    try:
        host_library.run("cmake", "--build", host_folder, "--target", "dspark_runner_host")
    except AssertionError as error:
        if "unknown target" in str(error):
            pytest.skip("TensorRT's headers not found: `make plugins` fetches them")
        raise
    return host_folder

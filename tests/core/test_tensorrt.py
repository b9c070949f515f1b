"""Importing TensorRT: what is missing or wrong is one line that says what to do. Nothing here needs TensorRT."""

import sys
from types import ModuleType

import pytest

from dspark import cuda, tensorrt
from dspark.errors import DSparkError


@pytest.fixture(autouse=True)
def fresh():
    tensorrt.import_tensorrt.cache_clear()
    yield
    tensorrt.import_tensorrt.cache_clear()


def fails(call, *words):
    with pytest.raises(DSparkError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def package(monkeypatch, name, version, **members):
    module = ModuleType(name)
    vars(module).update({"__version__": version, "Builder": object, **members})
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("backend", tensorrt.BACKENDS)
def test_missing(monkeypatch, backend):
    module = tensorrt.PACKAGES[backend].module
    monkeypatch.setitem(sys.modules, module, None)
    fails(
        lambda: tensorrt.import_tensorrt(backend), f"package {module} is not installed", f"pip install '.[{backend}]'"
    )


@pytest.mark.parametrize(
    ("version", "right"),
    [("11.0.0", True), ("11.4.0.106", True), ("12.0", True), ("10.14.1", False), ("8.6", False), ("unknown", False)],
)
def test_version(monkeypatch, version, right):
    module = package(monkeypatch, "tensorrt", version)
    if right:
        assert tensorrt.import_tensorrt("tensorrt") is module
    else:
        fails(lambda: tensorrt.import_tensorrt("tensorrt"), f"tensorrt {version} is installed", "11.0 or newer")


def test_broken_package(monkeypatch, tmp_path):
    (tmp_path / "tensorrt.py").write_text("raise ImportError('libnvinfer.so.11: cannot open\\nmore')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    fails(lambda: tensorrt.import_tensorrt("tensorrt"), "does not load (libnvinfer.so.11: cannot open)")


def test_package_without_builder(monkeypatch):
    """A runtime-only package under the same name."""
    del package(monkeypatch, "tensorrt", "11.4").Builder
    fails(lambda: tensorrt.import_tensorrt("tensorrt"), "11.0 or newer is needed")


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (cuda.Cuda(None, (), "no CUDA driver (libcuda.so.1 not found)"), "libcuda.so.1 not found"),
        (cuda.Cuda(None, (), "the CUDA driver does not start (cuInit: error 100)"), "error 100"),
        (cuda.Cuda("13.0", (), None), "shows none"),
    ],
)
def test_no_gpu(monkeypatch, found, word):
    """trt.Runtime without a driver is an object that crashes: it must not be made."""

    def crash(*_args):
        raise AssertionError("asked for before the driver was")

    monkeypatch.setattr(cuda, "query", lambda: found)
    trt = package(monkeypatch, "tensorrt", "11.4", Runtime=crash)
    trt.Builder = crash
    fails(lambda: tensorrt.make_runtime(trt), "running TensorRT engines needs an NVIDIA GPU", word)
    fails(lambda: tensorrt.make_builder(trt, "tensorrt"), "building TensorRT engines needs an NVIDIA GPU", word)


@pytest.mark.parametrize(("text", "numbers"), [("1.7.1.116", (1, 7, 1, 116)), ("11.0rc1", (11,)), ("", ())])
def test_version_numbers(text, numbers):
    assert tensorrt.version_numbers(text) == numbers


def test_the_driver_answers_or_says_why():
    found = cuda.query()
    assert (found.driver is None) == (found.error is not None)
    assert not found.gpus or found.driver


@pytest.mark.trt
def test_the_wheel_of_tensorrt_rtx(capfd):
    """It imports, and its parser finds the library by the name that the wheel does not have."""
    pytest.importorskip("tensorrt_rtx_libs")
    trt = tensorrt.import_tensorrt("tensorrt-rtx")
    assert tensorrt.import_tensorrt("tensorrt-rtx") is trt
    assert tensorrt.version_numbers(trt.__version__) >= (1, 7)
    log = tensorrt.logger(trt)
    assert log is tensorrt.logger(trt)
    builder = tensorrt.make_builder(trt, "tensorrt-rtx")
    assert not trt.OnnxParser(builder.create_network(0), log).parse(b"nonsense")
    assert log.errors
    assert capfd.readouterr() == ("", "")

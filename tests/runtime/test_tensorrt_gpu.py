"""Engines built and run on a real GPU (marker gpu): they say what ONNX Runtime says."""

import shutil

import pytest

from dspark import plugins
from dspark.errors import DSparkError, UsageError
from dspark.export.engines import build_engines
from dspark.export.lowering.tensorrt import DTYPES
from dspark.export.network import Options
from dspark.runtime import load
from dspark.runtime.bundle import open_bundle
from dspark.tensorrt import BACKENDS, import_tensorrt
from dspark.tools.verify import verify

pytestmark = pytest.mark.gpu
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100] * 8


@pytest.fixture(scope="module", params=[(backend, dtype) for backend in BACKENDS for dtype in DTYPES], ids=str)
def built(request, wide, tmp_path_factory):
    """(backend, number format, bundle with engines for this machine's GPU)"""
    backend, dtype = request.param
    try:
        import_tensorrt(backend)
        plugins.plugin_library_path()
    except (DSparkError, UsageError) as error:
        pytest.skip(str(error))
    bundle = shutil.copytree(wide, tmp_path_factory.mktemp(f"{backend}-{dtype}") / "bundle")
    build_engines(bundle, Options(backend, dtype=dtype), lambda stage: None)
    return backend, dtype, bundle


def test_verify(built):
    backend, _, bundle = built
    report = verify(open_bundle(bundle), [backend], lambda stage: None, required=True)
    assert report["passed"], report


@pytest.mark.parametrize("options", [{}, {"draft_len": 2}, {"mode": "plain"}, {"prefill_chunk": 30}], ids=str)
def test_generates_what_onnxruntime_does(built, options):
    backend, dtype, bundle = built
    if dtype != "fp32":
        pytest.skip("short formats have other near-ties")
    ours, theirs = load(bundle, backend=backend), load(bundle)
    for prompt in (PROMPT, PROMPT[:3], PROMPT * 3):
        found, expected = (d.generate(prompt, max_new_tokens=60, ignore_eos=True, **options) for d in (ours, theirs))
        assert found.token_ids == expected.token_ids
        assert found.stats.accepted == expected.stats.accepted

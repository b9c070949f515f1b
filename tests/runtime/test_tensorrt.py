"""The TensorRT engine on a GPU made of Python (gpu_fakes.py): what it binds, copies, pads and captures, and its errors.

The real thing is tests/gpu: nothing here says that TensorRT does what the fake one does.
"""

import sys
from dataclasses import replace

import numpy as np
import pytest
from gpu_fakes import GPU, VERSION, fake_gpu, with_engines

from dspark.cuda import Cuda
from dspark.errors import DSparkError, UsageError
from dspark.manifest import Engine
from dspark.runtime import load, load_drafter
from dspark.runtime.engines.base import join_rows
from dspark.runtime.engines.device import Device, DeviceRows, Memory
from dspark.runtime.engines.tensorrt import GRAPH_ROWS, misfit

BACKENDS = ("tensorrt", "tensorrt-rtx")
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100] * 8


@pytest.fixture(scope="module")
def plain(pairs):
    """The bundle without engines."""
    return pairs("qwen3-vanilla").bundle


@pytest.fixture(params=BACKENDS)
def gpu(request, monkeypatch, plain, tmp_path):
    """(backend, bundle with its engines, cuda, trt)"""
    with fake_gpu(monkeypatch, request.param) as (cuda, trt):
        yield request.param, with_engines(plain, tmp_path / "bundle", request.param), cuda, trt


def rounds_of(decoder, **options):
    rounds = []
    result = decoder.generate(PROMPT, on_round=rounds.append, ignore_eos=True, max_new_tokens=40, **options)
    return result.token_ids, [(r.anchor, r.position, r.drafts, r.verified, r.accepted) for r in rounds]


@pytest.mark.parametrize("options", [{}, {"draft_len": 3}, {"prefill_chunk": 30}, {"mode": "plain"}], ids=str)
def test_equals_onnxruntime(plain, gpu, options):
    backend, bundle, _, _ = gpu
    assert rounds_of(load(bundle, backend=backend), **options) == rounds_of(load(plain, threads=1), **options)


def test_small_steps_become_graphs(gpu):
    backend, bundle, cuda, trt = gpu
    decoder = load(bundle, backend=backend)
    rounds_of(decoder)
    if backend == "tensorrt":
        assert cuda.launches > 10
        assert len(trt.loaded[0].contexts) <= 6, "one for each of a few sizes, and one for all large ones"
    else:
        assert cuda.launches == 0 and len(trt.loaded[0].contexts) == 1
        assert trt.loaded[0].contexts[0].config.cuda_graph_strategy == 1
    assert len(PROMPT) > GRAPH_ROWS


def test_caches_are_bound_once_for_both_directions(gpu):
    backend, bundle, _, trt = gpu
    decoder = load(bundle, backend=backend)
    rounds_of(decoder)
    for engine, loaded in zip((decoder.target_engine, decoder.drafter_engine), trt.loaded, strict=True):
        for context in loaded.contexts:
            for pair in engine.graph.caches:
                assert context.addresses[pair.input] == context.addresses[pair.output]
                assert context.shapes[pair.input] == (1, pair.kv_heads, engine.capacity, pair.head_dim)


def test_taps_stay_on_the_device(gpu, monkeypatch):
    backend, bundle, _, _ = gpu

    def fetched(*_args, **_options):
        raise AssertionError("taps came to the host")

    monkeypatch.setattr(DeviceRows, "__array__", fetched)
    decoder = load(bundle, backend=backend)
    rounds_of(decoder)
    assert isinstance(decoder.session().target.forward([1], np.array([0])).taps, DeviceRows)


def test_drafter_alone_takes_arrays(plain, gpu):
    backend, bundle, _, _ = gpu
    width = 2 * load(plain, threads=1).manifest.target.hidden_size
    taps = np.random.default_rng(0).normal(size=(9, width)).astype(np.float32)
    ours, theirs = load_drafter(bundle, backend=backend), load_drafter(plain, threads=1)
    for drafter in (ours, theirs):
        drafter.observe(taps[:4])
    assert ours.propose(65, taps[4:]).tokens == theirs.propose(65, taps[4:]).tokens


def test_drawn_drafts(plain, gpu):
    """Noise is uploaded where a draft is drawn, and is what nobody wrote (NaN) where it is greedy."""
    backend, bundle, _, _ = gpu
    drafters = load_drafter(bundle, backend=backend), load_drafter(plain, threads=1)
    rng, width = np.random.default_rng(0), 2 * load(plain, threads=1).manifest.target.hidden_size
    for size, temperature in ((7, 0), (5, 1.5), (3, 0.0), (3, 0.5), (7, 2.0)):
        taps = rng.normal(size=(3, width)).astype(np.float32)
        vocab = drafters[0].spec.draft_vocab_size
        noise = rng.gumbel(size=(size, vocab)).astype(np.float32) if temperature else None
        options = {"draft_len": size, "temperature": temperature, "noise": noise, "read_logits": True}
        ours, theirs = (drafter.propose(65, taps, **options) for drafter in drafters)
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-4)


def test_rows_that_the_engine_does_not_take(gpu):
    backend, bundle, _, _ = gpu
    decoder = load(bundle, backend=backend)
    target = decoder.session().target
    with pytest.raises(UsageError, match=r"target.engine: 513 rows of T, it takes 1 to 512.*--profile T=1:512:513"):
        target.forward([1] * 513, np.array([0]))


def test_device_rows(monkeypatch):
    with fake_gpu(monkeypatch, "tensorrt"):
        device = Device()
        values = np.arange(12, dtype=np.float32).reshape(4, 3)
        memory = Memory(device, values.nbytes)
        device.to_device(memory.address, values)
        rows = DeviceRows(memory, 0, values.shape)
        np.testing.assert_array_equal(np.asarray(rows[1:3]), values[1:3])
        np.testing.assert_array_equal(np.asarray(rows[2:][:1]), values[2:3])
        assert len(rows[3:2]) == 0 and rows.ndim == 2 and rows.dtype == np.float32
        kept = rows[:2].copy()
        device.to_device(memory.address, np.zeros_like(values))
        np.testing.assert_array_equal(np.asarray(join_rows([kept, rows[1:2]])), [*values[:2], [0, 0, 0]])
        np.testing.assert_array_equal(join_rows([values[:1], kept]), [values[0], *values[:2]])


BUILT = Engine(
    "tensorrt", "target", "engines/t.engine", "0", VERSION, "bf16", ("8.9",), "none", False, "0", {"C": (1, 2, 3)}
)


@pytest.mark.parametrize(
    ("changes", "version", "capability", "words"),
    [
        ({}, VERSION, (8, 9), None),
        ({}, "11.5.0", (8, 9), (VERSION, "11.5.0")),
        ({"version_compatible": True}, "11.5.0", (8, 9), None),
        ({"version_compatible": True}, "11.3.9", (8, 9), (VERSION, "11.3.9")),
        ({"version_compatible": True}, "12.0.0", (8, 9), (VERSION, "12.0.0")),
        ({}, VERSION, (9, 0), ("8.9", "Fake GPU has 9.0")),
        ({"hardware_compatibility": "ampere-plus"}, VERSION, (9, 0), None),
        ({"hardware_compatibility": "ampere-plus"}, VERSION, (7, 5), ("7.5",)),
        ({"hardware_compatibility": "same-compute-capability"}, VERSION, (9, 0), ("9.0",)),
        ({"compute_capabilities": ("8.0", "12.0")}, VERSION, (12, 0), None),
    ],
)
def test_what_an_engine_fits(changes, version, capability, words):
    reason = misfit(replace(BUILT, **changes), version, replace(GPU, capability=capability))
    assert reason is None if words is None else all(word in reason for word in words)


class TestErrors:
    """One line each, before anything of TensorRT's is touched."""

    def fails(self, bundle, backend, *words, kind=DSparkError):
        with pytest.raises(kind) as caught:
            load(bundle, backend=backend)
        message = str(caught.value)
        assert "\n" not in message
        for word in words:
            assert word in message, message

    def test_unknown_backend(self, plain):
        self.fails(plain, "cuda", "'cuda'", "onnxruntime, tensorrt, tensorrt-rtx", kind=UsageError)

    def test_no_package(self, plain, monkeypatch):
        monkeypatch.setitem(sys.modules, "tensorrt", None)
        self.fails(plain, "tensorrt", "package tensorrt", "pip install '.[tensorrt]'")

    def test_no_gpu(self, gpu, monkeypatch):
        monkeypatch.setattr("dspark.cuda.query", lambda: Cuda("13.0", (), None))
        self.fails(gpu[1], gpu[0], "NVIDIA GPU", "shows none")

    def test_no_driver(self, gpu, monkeypatch):
        monkeypatch.setattr("dspark.cuda.query", lambda: Cuda(None, (), "no CUDA driver (libcuda.so.1 not found)"))
        self.fails(gpu[1], gpu[0], "NVIDIA GPU", "libcuda.so.1 not found")

    def test_no_engine(self, plain, gpu):
        self.fails(plain, gpu[0], "no target engine", f"dspark build BUNDLE --backend {gpu[0]}")

    def test_no_cuda_bindings(self, gpu, monkeypatch):
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        self.fails(gpu[1], gpu[0], "cuda-bindings", "pip install")

    def test_engine_of_another_version(self, plain, gpu, tmp_path):
        bundle = with_engines(plain, tmp_path / "old", gpu[0], trt_version="11.0.1")
        self.fails(bundle, gpu[0], "11.0.1", VERSION, f"dspark build BUNDLE --backend {gpu[0]}")

    def test_engine_of_another_gpu(self, plain, gpu, tmp_path):
        bundle = with_engines(plain, tmp_path / "other", gpu[0], compute_capabilities=["8.0", "12.0"])
        self.fails(bundle, gpu[0], "8.0, 12.0", "Fake GPU has 8.9")

    def test_damaged_engine(self, gpu, monkeypatch):
        backend, bundle, _, trt = gpu
        monkeypatch.setattr(
            trt, "Runtime", lambda logger: type("R", (), {"deserialize_cuda_engine": lambda *_: None})()
        )
        self.fails(bundle, backend, "engines/target.engine", "cannot load it")

    def test_cuda_that_fails(self, gpu, monkeypatch):
        backend, bundle, cuda, _ = gpu
        monkeypatch.setattr(cuda, "cudaMallocAsync", lambda size, stream: (2, None))
        monkeypatch.setattr(cuda, "cudaGetErrorString", lambda error: (0, b"out of memory"), raising=False)
        self.fails(bundle, backend, "cudaMallocAsync", "out of memory")

    def test_run_that_fails(self, gpu, monkeypatch):
        backend, bundle, _, _ = gpu
        decoder = load(bundle, backend=backend)
        monkeypatch.setattr("gpu_fakes.FakeContext.execute_async_v3", lambda self, stream: False)
        with pytest.raises(DSparkError, match=r"target.engine: TensorRT failed in a run"):
            decoder.generate(PROMPT, max_new_tokens=2)

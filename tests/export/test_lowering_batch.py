"""The ONNX Runtime CPU form of many requests: the op against the float64 reference, and what the graphs look like."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import reference
from single_node import session, single_node_model

from dspark.export.lowering.onnxruntime_cpu import BATCH_FORM, FORM, lower, lower_model
from dspark.manifest import read_manifest

CACHES = ("key_cache", "value_cache")
TAKEN = [c for c in reference.ATTENTION_CASES if c.page is None and not c.padding and 0 not in c.blocks]
MANY = [
    reference.AttentionCase("decode", (1,) * 8, (3, 60, 0, 17, 200, 1, 90, 33), heads=9, kv_heads=3),
    reference.AttentionCase("verify", (8,) * 5, (3, 60, 0, 17, 90), heads=9, kv_heads=3),
    reference.AttentionCase("a prompt among decoding ones", (1, 70, 4, 1), (40, 9, 0, 3), heads=4, kv_heads=4),
    reference.AttentionCase("softcap", (3, 1, 9), (4, 30, 0), softcap=1.5),
    reference.AttentionCase("sinks", (3, 1, 9), (4, 30, 0), sinks=True, heads=6),
    reference.AttentionCase("sinks, softcap, window", (3, 1, 9), (4, 30, 0), sinks=True, softcap=0.5, window=6),
    reference.AttentionCase("window of 1", (3, 1, 2), (4, 30, 0), window=1),
    reference.AttentionCase("rings", (5, 1, 2, 3), (50, 21, 3, 0), window=5, ring=5, heads=9, kv_heads=3),
    reference.AttentionCase("rings, sinks", (4, 1), (37, 6), window=8, ring=4, softcap=0.5, sinks=True),
    reference.AttentionCase(
        "draft, ragged", (5,) * 4, (6, 0, 11, 30), (2, 60, 1, 0), causal=False, heads=9, kv_heads=3
    ),
    reference.AttentionCase("draft, no context", (3, 3), (6, 2), (0, 0), causal=False),
    reference.AttentionCase("draft, window, sinks", (3, 3), (9, 0), (2, 7), causal=False, window=4, sinks=True),
    reference.AttentionCase("draft, one row", (1,) * 3, (9, 0, 2), (2, 7, 1), causal=False, softcap=2.0),
]


def lowered(case: reference.AttentionCase) -> onnxruntime.InferenceSession:
    model = single_node_model("BlockAttention", case.inputs(), case.attributes)
    lower_model(model, BATCH_FORM)
    return session(model)


def run_in_place(run: onnxruntime.InferenceSession, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """The result `out`; the caches in `arrays` are updated, each one buffer for input and output."""
    binding = run.io_binding()
    for name, array in arrays.items():
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(name, value)
        if name in CACHES:
            binding.bind_ortvalue_output(f"{name}_out", value)
    binding.bind_output("out")
    run.run_with_iobinding(binding)
    return next(v.numpy().copy() for v in binding.get_outputs() if v.shape() == list(arrays["q"].shape))


def among_others(case: reference.AttentionCase, seed: int = 0) -> dict[str, np.ndarray]:
    """A case's inputs, whose pages lie among those of requests that take no part; room for a draft's block as well."""
    arrays, rng = case.inputs(seed), np.random.default_rng(seed)
    spare = max(case.blocks) if case.ring is None and not case.causal else 0
    own = len(arrays["key_cache"])
    places = rng.permutation(own + 3)[:own]
    for name in CACHES:
        padded = np.pad(arrays[name], ((0, 3), (0, 0), (0, spare), (0, 0)), constant_values=np.nan)
        arrays[name] = np.full_like(padded, np.nan)
        arrays[name][places] = padded[:own]
    arrays["pages"] = places[arrays["pages"]].astype(np.int32)
    return arrays


@pytest.mark.parametrize("case", TAKEN + MANY, ids=str)
def test_equals_reference_in_place(case):
    arrays = among_others(case)
    before = {name: arrays[name].copy() for name in CACHES}
    expected, *caches = reference.block_attention(**(arrays | before), **case.attributes)
    if not case.causal:  # a draft's block is written behind the context, where nobody reads it
        context = {n: a for n, a in arrays.items() if n not in ("context_k", "context_v", "context_start")}
        new = np.array(case.contexts, np.int32)
        moved = context | dict(zip(CACHES, caches, strict=True)) | {"length": context["length"] + new}
        _, *caches = reference.block_attention(**moved, **(case.attributes | {"causal": True}))
    out = run_in_place(lowered(case), arrays)
    np.testing.assert_allclose(out, expected, atol=3e-6)
    # To the bit, NaN included: what belongs to other requests, and rows that this step has not written.
    for name, cache in zip(CACHES, caches, strict=True):
        np.testing.assert_array_equal(arrays[name], cache.astype(np.float32))


def test_one_file_serves_every_step():
    """Steps in a row of any places in any order, rows of one and of a prompt, on one session and one pair of caches."""
    kind = reference.AttentionCase("", (1,), (0,), heads=9, kv_heads=3)
    run, rng, places, capacity = lowered(kind), np.random.default_rng(0), 6, 130
    caches = {name: np.full((places, 3, capacity, 8), np.nan, np.float32) for name in CACHES}
    lengths = np.zeros(places, np.int32)
    for _ in range(12):
        chosen = rng.permutation(places)[: rng.integers(1, places + 1)]
        rows = rng.choice([1, 1, 2, 7, 30], size=len(chosen))
        lengths[lengths > capacity - 31] = 0  # a new request at a used place
        arrays = {"q": rng.normal(size=(rows.sum(), 9, 8)).astype(np.float32)}
        arrays |= {name: rng.normal(size=(rows.sum(), 3, 8)).astype(np.float32) for name in "kv"}
        arrays |= caches | {"row_start": np.cumsum([0, *rows]).astype(np.int32), "length": lengths[chosen]}
        arrays |= {"pages": chosen[:, None].astype(np.int32)}
        expected, *written = reference.block_attention(**arrays, **kind.attributes)
        np.testing.assert_allclose(run_in_place(run, arrays), expected, atol=3e-6)
        for name, cache in zip(CACHES, written, strict=True):
            np.testing.assert_array_equal(caches[name], cache.astype(np.float32))
        lengths[chosen] += rng.integers(0, rows + 1).astype(np.int32)  # some rows are rejected


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm")
@pytest.mark.parametrize("window", [0, 8])
def test_no_cache_is_copied(window):
    """Of caches far larger than what a step touches only that comes into memory, unless they are two buffers each."""
    case = reference.AttentionCase("", (2, 5), (40, 3), window=window)
    arrays, run = case.inputs(), lowered(case)
    large = {name: np.zeros((2, 2, 2_000_000, 8), np.float32) for name in CACHES}
    for name, cache in large.items():
        cache[:, :, : arrays[name].shape[2]] = np.nan_to_num(arrays[name])
    size, before = large["key_cache"].nbytes, resident()
    run_in_place(run, arrays | large)
    assert resident() - before < size / 4
    outputs = run.run(None, arrays | large)
    assert resident() - before > size
    assert len(outputs) == 3


@pytest.fixture(scope="module")
def graphs(finished):
    """The lowered graphs by role and form."""
    manifest = read_manifest(finished)
    return {
        (role, form): onnx.load(finished / manifest.graph(role, form).file, load_external_data=False)
        for role in ("target", "drafter")
        for form in (FORM, BATCH_FORM)
    }


@pytest.mark.parametrize(("role", "layers"), [("target", 4), ("drafter", 2)])
def test_what_the_graphs_are_made_of(graphs, role, layers):
    one, many = ([node.op_type for node in graphs[role, form].graph.node] for form in (FORM, BATCH_FORM))
    assert many.count("Gemm") == one.count("Gemm"), "linear layers run on the rows of all requests at once"
    assert many.count("Scan") == layers and many.count("ScatterND") == 2 * layers
    assert not {"BlockAttention", "Loop", "TensorScatter"} & set(many)
    assert len(many) < len(one) + 10 * layers + 60


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_caches_go_straight_in_and_out(graphs, role):
    """Nothing but the ScatterND lies between a cache's input and its output: a view between them would be a copy."""
    graph = graphs[role, BATCH_FORM].graph
    writers = {name: node for node in graph.node for name in node.output}
    for name in (o.name for o in graph.output if "_cache_out." in o.name):
        assert writers[name].op_type == "ScatterND" and writers[name].input[0] == name.replace("_out.", ".")
        readers = [n for n in graph.node if name.replace("_out.", ".") in n.input]
        assert readers == [writers[name]], "an old row could be read after it was overwritten"


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_the_manifests_entry(finished, role):
    """The portable graph's own inputs and outputs, and room for the block that a draft writes."""
    portable, batch = (read_manifest(finished).graph(role, form) for form in ("portable", BATCH_FORM))
    assert batch.file == f"onnx/{role}.cpu-batch.onnx" and batch.cache_slack == 1
    assert dataclasses.replace(batch, form="portable", file=portable.file, cache_slack=0) == portable


def test_same_bytes_and_no_weights(finished, tmp_path):
    shutil.copytree(finished / "onnx", tmp_path / "onnx")
    for role in ("target", "drafter"):
        lower(tmp_path, read_manifest(finished).graph(role, "portable"), BATCH_FORM)
    for file in (finished / "onnx").iterdir():
        assert (tmp_path / "onnx" / file.name).read_bytes() == file.read_bytes()
    assert {file.name for file in (tmp_path / "onnx").iterdir()} == {
        file.name for file in (finished / "onnx").iterdir()
    }
    assert sum(file.suffix == ".data" for file in (finished / "onnx").iterdir()) == 2

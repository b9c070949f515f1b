"""The ONNX Runtime CPU form of BlockAttention against the float64 reference, caches bound in place."""

import numpy as np
import onnxruntime
import pytest
import reference
from single_node import session, single_node_model

from dspark.export.lowering.onnxruntime_cpu import DROPPED, lower_model

SINGLE = [case for case in reference.ATTENTION_CASES if case.single]
EXTRA = [
    reference.AttentionCase(f"{rows} rows at {length}", (rows,), (length,), heads=6, kv_heads=2, window=window)
    for rows in (1, 2, 6, 33)
    for length in (0, rows, 2 * rows, 2 * rows - 1)
    for window in (0, 7)
] + [
    reference.AttentionCase(
        f"draft {rows} at {length}+{new}", (rows,), (length,), (new,), False, window, heads=6, kv_heads=2
    )
    for rows in (1, 5, 7)
    for length, new in ((0, 1), (0, 2 * rows), (3, 1), (60, 6))
    for window in (0, 4)
]


def lowered(case: reference.AttentionCase, arrays: dict[str, np.ndarray]) -> onnxruntime.InferenceSession:
    model = single_node_model("BlockAttention", arrays, case.attributes)
    lower_model(model)
    return session(model)


def run_in_place(run: onnxruntime.InferenceSession, arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """(out, key cache, value cache), each cache one buffer for input and output."""
    binding = run.io_binding()
    caches = {n: onnxruntime.OrtValue.ortvalue_from_numpy(arrays[n].copy()) for n in ("key_cache", "value_cache")}
    for name, array in arrays.items():
        if name in caches:
            binding.bind_ortvalue_input(name, caches[name])
        elif name not in DROPPED:
            binding.bind_cpu_input(name, array)
    binding.bind_output("out")
    for name, cache in caches.items():
        binding.bind_ortvalue_output(f"{name}_out", cache)
    run.run_with_iobinding(binding)
    # Copies: the arrays are views of memory that goes with the values.
    return binding.get_outputs()[0].numpy().copy(), *(cache.numpy().copy() for cache in caches.values())


@pytest.mark.parametrize("case", SINGLE + EXTRA, ids=str)
def test_equals_reference_in_place(case):
    arrays = case.inputs()
    spare = case.blocks[0] if case.ring is None else 0  # a drafter's step writes its block behind the context
    for name in ("key_cache", "value_cache"):
        arrays[name] = np.pad(arrays[name], ((0, 0), (0, 0), (0, spare), (0, 0)), constant_values=np.nan)
    out, *caches = run_in_place(lowered(case, arrays), arrays)
    expected, *expected_caches = reference.block_attention(**arrays, **case.attributes)
    np.testing.assert_allclose(out, expected, atol=3e-6)
    if case.ring is not None:
        _, *written = reference.block_attention(**arrays, **(case.attributes | {"causal": True}))
        np.testing.assert_array_equal(caches, np.array(written, np.float32))
        return
    committed = case.lengths[0] + (case.blocks[0] if case.causal else case.contexts[0])
    for ours, theirs in zip(caches, expected_caches, strict=True):
        np.testing.assert_array_equal(ours[:, :, :committed], theirs[:, :, :committed].astype(np.float32))
        written = committed + (0 if case.causal else case.blocks[0])
        assert np.isnan(ours[:, :, written:]).all(), "rows were written beyond the block"


def test_one_file_serves_every_shape():
    cases = [c for c in SINGLE if c.causal and not (c.window or c.softcap or c.sinks)]
    cases = [c for c in cases if (c.heads, c.depth) == (4, 8)]
    assert len(cases) >= 5
    run = lowered(cases[0], cases[0].inputs())
    for case in cases:
        arrays = case.inputs(seed=2)
        out, *_ = run_in_place(run, arrays)
        np.testing.assert_allclose(
            out, reference.block_attention(**arrays, **case.attributes)[0], atol=3e-6, err_msg=str(case)
        )

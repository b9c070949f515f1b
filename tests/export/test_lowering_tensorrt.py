"""The typed graphs for TensorRT, run by onnx's reference evaluator, against the portable ones on ONNX Runtime."""

import numpy as np
import onnx_ir as ir
import pytest
import reference
import typed_graphs
from single_node import session, single_node_model

from dspark.errors import UsageError
from dspark.export.lowering.tensorrt import DTYPES, EXACT, lower, lower_model, unroll_markov
from dspark.export.parity_replay import open_session
from dspark.manifest import read_manifest

# Of values near 1 (taps, logits of the tiny pair), after a handful of layers.
TOLERANCE = {"fp32": 2e-5, "fp16": 1e-2, "bf16": 8e-2}
ROLES = ("target", "drafter")


@pytest.fixture(scope="module")
def typed(finished, tmp_path_factory):
    """typed(role, dtype, block_size=None) -> the lowered .onnx file."""
    made = {}

    def make(role, dtype, block_size=None):
        key = role, dtype, block_size
        if key not in made:
            graph = read_manifest(finished).graph(role, "portable")
            made[key] = lower(finished, graph, dtype, tmp_path_factory.mktemp(role), block_size).file
        return made[key]

    return make


def feeds(role: str, gamma: int = 5) -> dict[str, np.ndarray]:
    """Two requests on pages of one cache; the first rows of each are committed."""
    rng = np.random.default_rng(0)
    shared = {
        "length": np.array([3, 6], np.int32),
        "pages": np.array([[2, 0, 5], [1, 4, 3]], np.int32),
    }
    if role == "target":
        counts, starts = (4, 2), np.array([0, 4, 6], np.int32)
        return shared | {
            "tokens": rng.integers(0, 256, 6),
            "positions": np.concatenate([n + np.arange(c) for n, c in zip((3, 6), counts, strict=True)]),
            "row_start": starts,
            "logit_rows": np.array([0, 3, 5]),
        }
    counts, vocab = (2, 1), 272
    noise = rng.gumbel(size=(2, gamma, vocab)).astype(np.float32)
    noise[0] = np.nan  # that request is greedy
    ends = np.array([3, 6]) + counts
    return shared | {
        "tokens": rng.integers(0, 256, (2, gamma)),
        "positions": ends[:, None] + np.arange(gamma),
        "taps": rng.normal(size=(3, 96)).astype(np.float32),
        "context_positions": np.array([3, 4, 6]),
        "row_start": np.array([0, gamma, 2 * gamma], np.int32),
        "context_start": np.array([0, 2, 3], np.int32),
        "noise": noise,
        "temperature": np.array([0, 1.25], np.float32),
    }


def caches(bundle, role: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    pairs = read_manifest(bundle).graph(role, "portable").caches
    return {p.input: rng.normal(size=(6, p.kv_heads, 8, p.head_dim)).astype(np.float32) for p in pairs}


def portable(bundle, role, arrays) -> dict[str, np.ndarray]:
    run = open_session(bundle / read_manifest(bundle).graph(role, "portable").file)
    names = [o.name for o in run.get_outputs()]
    return dict(zip(names, run.run(names, arrays), strict=True))


def same_drafts(arrays, expected, found, atol):
    """Positions are compared as long as the drafts agree; where they part, two logits must have been close."""
    for request in range(len(expected["draft_tokens"])):
        for k, (ours, theirs) in enumerate(
            zip(found["draft_tokens"][request], expected["draft_tokens"][request], strict=True)
        ):
            logits = expected["draft_logits"][request, k]
            np.testing.assert_allclose(found["draft_logits"][request, k], logits, atol=atol, rtol=atol)
            np.testing.assert_allclose(found["confidence"][request, k], expected["confidence"][request, k], atol=atol)
            if ours != theirs:
                temperature = arrays["temperature"][request]
                scores = logits / temperature + arrays["noise"][request, k] if temperature else logits
                assert scores[theirs] - scores[ours] < 2 * atol
                break


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role", ROLES)
def test_equals_the_portable_graph(finished, typed, role, dtype):
    arrays, cached = feeds(role), caches(finished, role)
    expected = portable(finished, role, arrays | cached)
    short = DTYPES[dtype].numpy()
    found = typed_graphs.run(typed(role, dtype), arrays | {n: c.astype(short) for n, c in cached.items()})
    atol = TOLERANCE[dtype]
    for name, value in expected.items():
        if "_cache" in name:
            assert found[name].dtype == short
            np.testing.assert_allclose(found[name].astype(np.float32), value, atol=atol, rtol=atol, err_msg=name)
        else:
            assert found[name].dtype == value.dtype, "all but the caches keep their number format"
    if role == "target":
        for name in ("logits", "taps"):
            np.testing.assert_allclose(found[name], expected[name], atol=atol, rtol=atol, err_msg=name)
    else:
        same_drafts(arrays, expected, found, atol)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_unrolled_drafter_equals_the_plugin(finished, typed, dtype):
    arrays, short = feeds("drafter"), DTYPES[dtype].numpy()
    arrays |= {n: c.astype(short) for n, c in caches(finished, "drafter").items()}
    expected, found = (typed_graphs.run(typed("drafter", dtype, size), arrays) for size in (None, 5))
    if dtype == "fp32":
        np.testing.assert_array_equal(found["draft_tokens"], expected["draft_tokens"])
    same_drafts(arrays, expected, found, TOLERANCE[dtype])


@pytest.mark.parametrize("case", reference.MARKOV_CASES, ids=str)
def test_unrolled_chain_equals_reference(case):
    arrays = case.inputs()
    model = single_node_model("MarkovArgmax", arrays, case.attributes)
    model.functions.clear()
    unroll_markov(model, case.gamma)
    assert not any(node.domain == "dspark" for node in model.graph)
    tokens, confidence, logits = session(model).run(None, arrays)
    expected = reference.markov_argmax(**arrays, **case.attributes)
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_allclose(confidence, expected[1], atol=1e-5)
    np.testing.assert_allclose(logits, expected[2], atol=1e-5)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("role", ROLES)
def test_number_formats(typed, role, dtype):
    model, short, full = ir.load(typed(role, dtype)), DTYPES[dtype], ir.DataType.FLOAT
    for node in model.graph:
        floats = {x.dtype for x in node.inputs if x is not None and x.dtype in (short, full)}
        if node.op_type in EXACT:
            assert floats == {full}, node
        elif node.domain != "dspark":
            assert len(floats) <= 1, f"{node.op_type} mixes number formats: TensorRT refuses it"
    weights = {n: v.dtype for n, v in model.graph.initializers.items() if v.dtype in (short, full)}
    kept = sorted(name for name, kind in weights.items() if kind == full)
    assert all("norm" in n or "fc" in n or "inv_freq" in n or "confidence" in n or "select" in n for n in kept), kept
    caches = [v for v in (*model.graph.inputs, *model.graph.outputs) if "_cache" in v.name]
    assert caches and {v.dtype for v in caches} == {short}


def test_the_taps_projection_is_fp32(typed):
    """Real checkpoints have taps beyond fp16's range."""
    model = ir.load(typed("drafter", "fp16"))
    (fc,) = (n for n in model.graph if n.op_type == "Gemm" and n.inputs[0].name == "taps")
    assert fc.inputs[1].dtype == fc.outputs[0].dtype == ir.DataType.FLOAT


def test_weights_beyond_fp16_are_refused(finished):
    graph = read_manifest(finished).graph("target", "portable")
    model = ir.load(finished / graph.file)
    weight = next(node.inputs[1] for node in model.graph if node.op_type == "Gemm")
    weight.const_value = ir.tensor(np.full(weight.shape.numpy(), 7e4, np.float32), name=weight.name)
    with pytest.raises(UsageError, match=f"--dtype fp16: the weight '{weight.name}' leaves its range; use bf16"):
        lower_model(model, "fp16")


def test_a_bundle_of_an_older_version(finished):
    model = ir.load(finished / read_manifest(finished).graph("drafter", "portable").file)
    for node in model.graph:
        node.attributes.pop("inputs", None)
    with pytest.raises(UsageError, match="BlockAttention does not name its inputs; export the bundle again"):
        lower_model(model, "bf16")


def test_shared_weights_stay_one(typed):
    """The embedding and the tied or shared head are one stored tensor in the short format too."""
    model = ir.load(typed("target", "bf16"))
    names = [v.const_value.name for v in model.graph.initializers.values()]
    assert len(names) == len(set(names))
    assert not model.functions


def test_fp32_needs_no_casts(finished):
    graph = read_manifest(finished).graph("target", "portable")
    model = ir.load(finished / graph.file)
    casts = sum(node.op_type == "Cast" for node in model.graph)
    lower_model(model, "fp32")
    assert sum(node.op_type == "Cast" for node in model.graph) == casts


def test_the_bundle_is_not_touched(finished, typed):
    before = {file: file.stat().st_mtime_ns for file in finished.rglob("*")}
    typed("target", "fp16")
    assert {file: file.stat().st_mtime_ns for file in finished.rglob("*")} == before

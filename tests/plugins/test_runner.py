"""The TensorRT plugins without TensorRT: plugins/tests/runner.cpp plays its part, over the host shim.

The kernels have tests of their own; these are about what lies between TensorRT and them.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import reference
import runner_case
from host_library import DTYPES, ROUNDOFF
from runner_case import Refused

ATTENTION = ("verify", "ragged, paged", "draft, ragged, window, padding", "draft, no context row", "softcap and window")
ATTENTION += ("sinks, ragged, paged, padding", "draft, sinks", "rings, ragged, padding", "draft, ring")
TARGET_BLOCKS = 2 * 132  # what the plugins fill where there is no device


@pytest.fixture(scope="session")
def play(request):
    """Runs a plugin: on the host, or what DSPARK_RUNNER and DSPARK_PLUGIN_LIBRARY name (on a GPU)."""
    if runner := os.environ.get("DSPARK_RUNNER"):
        program, library = Path(runner), Path(os.environ["DSPARK_PLUGIN_LIBRARY"])
    else:
        folder = request.getfixturevalue("host_runner")
        program, library = folder / "dspark_runner_host", folder / "libdspark_plugins_host.so"
    return lambda *arguments, **settings: runner_case.run(program, library, *arguments, **settings)


def attention_case(name: str) -> reference.AttentionCase:
    return replace(next(c for c in reference.ATTENTION_CASES if c.name == name), depth=64)


def check_attention(found, arrays, attributes, dtype):
    exact = {n: a.astype(np.float32) if a.dtype in DTYPES.values() else a for n, a in arrays.items()}
    out, *caches = reference.block_attention(**exact, **attributes)
    if not attributes["causal"]:  # the kernels leave the block's rows behind the committed ones
        _, *caches = reference.block_attention(**exact, **(attributes | {"causal": True}))
    values = [np.nan_to_num(exact[n]) for n in ("v", "value_cache", "context_v") if n in exact]
    largest = max(np.abs(v).max() for v in values if v.size)
    error = np.abs(found[0].astype(np.float64) - out)
    assert (error <= ROUNDOFF[dtype] * (np.abs(out) + largest) + 1e-5 * max(largest, 1)).all(), error.max()
    for ours, theirs in zip(found[1:], caches, strict=True):
        np.testing.assert_array_equal(ours.astype(np.float64), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ATTENTION)
def test_block_attention(play, name, dtype):
    case = attention_case(name)
    arrays = runner_case.typed(case.inputs(), dtype)
    fields = runner_case.fields("BlockAttention", case.attributes, arrays)
    (found,) = play("BlockAttention", fields, [arrays])
    check_attention(found, arrays, case.attributes, dtype)


@pytest.mark.parametrize("name", ATTENTION[:3])
def test_caches_in_other_buffers(play, name):
    case = attention_case(name)
    arrays = runner_case.typed(case.inputs(), "bf16")
    fields = runner_case.fields("BlockAttention", case.attributes, arrays)
    (separate,), (aliased,) = (play("BlockAttention", fields, [arrays], *o) for o in (("--separate",), ()))
    for one, other in zip(separate, aliased, strict=True):
        assert one.tobytes() == other.tobytes()


def test_shapes_change_between_calls(play):
    """Batches of other sizes, up and down, with one object and the workspace of the largest."""
    cases = [
        attention_case(n) for n in ("ragged", "ragged, paged", "verify", "first prompt", "long chunk", "one row late")
    ]
    calls = [runner_case.typed(case.inputs(seed), "fp16") for seed, case in enumerate(cases)]
    fields = runner_case.fields("BlockAttention", cases[0].attributes, calls[0])
    for found, arrays, case in zip(play("BlockAttention", fields, calls), calls, cases, strict=True):
        check_attention(found, arrays, case.attributes, "fp16")


def test_inputs_in_another_order(play):
    case = attention_case("draft, sinks")
    arrays = runner_case.typed(case.inputs(), "bf16")
    arrays = {name: arrays[name] for name in sorted(arrays)}
    fields = runner_case.fields("BlockAttention", case.attributes, arrays)
    (found,) = play("BlockAttention", fields, [arrays])
    check_attention(found, arrays, case.attributes, "bf16")


def test_no_rows(play):
    """A round in which a drafter only takes in context, and one in which a target gets nothing at all."""
    case = replace(attention_case("draft, one context row"), blocks=(0,))
    arrays = runner_case.typed(case.inputs(), "bf16")
    fields = runner_case.fields("BlockAttention", case.attributes, arrays)
    ((out, *_),) = play("BlockAttention", fields, [arrays])
    assert out.shape == (0, case.heads, case.depth)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", reference.MARKOV_CASES, ids=str)
def test_markov_argmax(play, case, dtype):
    arrays = runner_case.typed(case.inputs(), dtype)
    fields = runner_case.fields("MarkovArgmax", case.attributes, arrays)
    (found,) = play("MarkovArgmax", fields, [arrays])
    check_markov(found, arrays, case.attributes)


def check_markov(found, arrays, attributes):
    exact = {n: a.astype(np.float32) if a.dtype in DTYPES.values() else a for n, a in arrays.items()}
    tokens, confidence, logits = reference.markov_argmax(**exact, **attributes)
    np.testing.assert_array_equal(found[0], tokens)
    np.testing.assert_allclose(found[1], confidence, atol=1e-5)
    if len(found) == 3:
        np.testing.assert_allclose(found[2], logits, atol=2e-4)


def test_markov_shapes_change(play):
    case = reference.MarkovCase("", "rnn", draft_vocab=30)
    calls = [
        runner_case.typed(replace(case, requests=r, gamma=g).inputs(), "bf16")
        for r, g in ((2, 5), (1, 1), (9, 3), (1, 7), (3, 2))
    ]
    # The weights are a model's: the same at every call.
    kept = ("w1", "w2", "head_weight", "head_bias", "confidence_weight", "confidence_bias", "d2t")
    calls = [call | {name: calls[0][name] for name in kept} for call in calls]
    fields = runner_case.fields("MarkovArgmax", case.attributes, calls[0])
    for found, arrays in zip(play("MarkovArgmax", fields, calls), calls, strict=True):
        check_markov(found, arrays, case.attributes)


def test_markov_without_logits_with_noise(play):
    case = reference.MarkovCase("", "vanilla", temperatures=(0.0, 1.3))
    arrays = runner_case.typed(case.inputs(), "bf16")
    fields = runner_case.fields("MarkovArgmax", case.attributes, arrays) | {"outputs": "tokens,confidence"}
    (found,) = play("MarkovArgmax", fields, [arrays])
    assert len(found) == 2
    check_markov(found, arrays, case.attributes)


# ---- What they refuse, and how they say it.

BLOCK = {"causal": 1, "window": 0, "scale": 0.125, "softcap": 0.0}
BLOCK["inputs"] = "q,k,v,key_cache,value_cache,row_start,length,pages"
MARKOV = {"head": "gated", "confidence_with_markov": 1, "outputs": "tokens,confidence,logits"}
MARKOV["inputs"] = "base_logits,anchors,hidden,w1,w2,head_weight,head_bias,confidence_weight,confidence_bias"
MISSING = object()
BAD_FIELDS = [
    ("BlockAttention", {"causal": MISSING}, "field 'causal' is missing"),
    ("BlockAttention", {"causal": 2}, "field 'causal' is 2, it has to be 0 to 1"),
    ("BlockAttention", {"causal": 1.0}, "field 'causal' is of type FLOAT32, it has to be INT32"),
    ("BlockAttention", {"window": -1}, "field 'window' is -1, it has to be 0 to 2147483647"),
    ("BlockAttention", {"window": MISSING}, "field 'window' is missing"),
    ("BlockAttention", {"scale": 0.0}, "field 'scale' is 0, it has to be a finite number above 0"),
    ("BlockAttention", {"scale": 1}, "field 'scale' is of type INT32, it has to be FLOAT32"),
    ("BlockAttention", {"softcap": -1.0}, "field 'softcap' is -1, it has to be a finite number from 0"),
    ("BlockAttention", {"inputs": MISSING}, "field 'inputs' is missing"),
    ("BlockAttention", {"inputs": 3}, "field 'inputs' is of type INT32, it has to be CHAR"),
    ("BlockAttention", {"inputs": "q,k"}, "field 'inputs' does not name 'v'"),
    ("BlockAttention", {"inputs": BLOCK["inputs"] + ",x"}, "field 'inputs' names 'x', which is not one of them"),
    ("BlockAttention", {"inputs": BLOCK["inputs"] + ",q"}, "field 'inputs' names 'q' twice"),
    ("BlockAttention", {"inputs": BLOCK["inputs"] + ","}, "field 'inputs' names '', which is not one of them"),
    ("BlockAttention", {"inputs": BLOCK["inputs"] + ",context_k"}, "there are all or none"),
    ("BlockAttention", {"dropout": 0.1}, "there is no field 'dropout'"),
    ("MarkovArgmax", {"head": "lstm"}, "field 'head' is 'lstm', it has to be vanilla, gated, rnn or none"),
    ("MarkovArgmax", {"head": MISSING}, "field 'head' is missing"),
    ("MarkovArgmax", {"confidence_with_markov": 7}, "field 'confidence_with_markov' is 7, it has to be 0 to 1"),
    ("MarkovArgmax", {"outputs": "tokens"}, "field 'outputs' does not name 'confidence'"),
    ("MarkovArgmax", {"inputs": "base_logits,anchors,hidden,w2"}, "a head needs the input 'w1'"),
    ("MarkovArgmax", {"inputs": "base_logits,anchors,hidden,w1,w2"}, "gated or rnn head needs the input 'head_weight'"),
    ("MarkovArgmax", {"inputs": MARKOV["inputs"].replace("confidence_weight,", "")}, "the input 'confidence_weight'"),
    ("MarkovArgmax", {"inputs": MARKOV["inputs"] + ",noise"}, "'noise' needs the input 'temperature'"),
    ("MarkovArgmax", {"inputs": MARKOV["inputs"] + ",temperature"}, "'temperature' needs the input 'noise'"),
]  # fmt: skip


@pytest.mark.parametrize(("plugin", "changes", "message"), BAD_FIELDS, ids=[message for *_, message in BAD_FIELDS])
def test_bad_fields(play, plugin, changes, message):
    fields = (BLOCK if plugin == "BlockAttention" else MARKOV) | changes
    with pytest.raises(Refused, match="createPlugin") as error:
        play(plugin, {n: v for n, v in fields.items() if v is not MISSING}, [])
    assert f"dspark: {plugin}: " in str(error.value) and message in str(error.value)


def test_good_fields(play):
    for plugin, fields in (("BlockAttention", BLOCK), ("MarkovArgmax", MARKOV)):
        assert play(plugin, fields, []) == []


def attention_arrays(**changes) -> dict[str, np.ndarray]:
    return runner_case.typed(attention_case("verify").inputs(), "bf16") | changes


def zeros(dtype: str, *shape: int) -> np.ndarray:
    return np.zeros(shape, runner_case.TYPES[dtype])


BAD_ATTENTION = [
    ({"k": zeros("fp32", 6, 2, 64)}, "k is fp32, it has to be fp32, fp16 or bf16, like the other weights"),
    ({"length": zeros("int64", 1)}, "length is int64, it has to be int32"),
    ({"q": zeros("int32", 6, 4, 64)}, "q is int32, it has to be fp32, fp16 or bf16"),
    ({"k": zeros("bf16", 6, 2)}, "k has 2 dimensions, it has to have 3"),
    ({"k": zeros("bf16", 5, 2, 64)}, "k has T = 5, q has 6"),
    ({"row_start": zeros("int32", 3)}, "length has R = 1, row_start has 2"),
    ({"value_cache": zeros("bf16", 1, 2, 40, 64)}, "value_cache has C = 40, key_cache has 48"),
    ({n: zeros("bf16", 6, 3, 64) for n in "kv"}, "key_cache has Hkv = 2, k has 3"),
    (
        {n: zeros("bf16", *shape, 80) for n, shape in (("q", (6, 4)), ("k", (6, 2)), ("v", (6, 2)))}
        | {n: zeros("bf16", 1, 2, 48, 80) for n in ("key_cache", "value_cache")},
        "the head size is 80, it has to be 64, 128, 256 or 512",
    ),
    ({"q": zeros("bf16", 6, 5, 64)}, "5 query heads are not a multiple of 2 key/value heads"),
    ({"sinks": zeros("fp32", 4)}, "the node has 9 inputs, its field 'inputs' names 8"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ATTENTION, ids=[message for _, message in BAD_ATTENTION])
def test_bad_tensors(play, changes, message):
    with pytest.raises(Refused) as error:
        play("BlockAttention", BLOCK, [attention_arrays(**changes)])
    assert f"dspark: BlockAttention: {message}" in str(error.value)


BAD_MARKOV = [
    ({"anchors": zeros("int32", 2)}, "anchors is int32, it has to be int64"),
    ({"confidence_weight": zeros("bf16", 18)}, "confidence_weight is bf16, it has to be fp32"),
    ({"confidence_weight": zeros("fp32", 12)}, "confidence_weight has 12 confidence columns, it has to have 18"),
    ({"head_weight": zeros("bf16", 6, 12)}, "head_weight has 12 head columns, it has to have 18"),
    ({"head_bias": zeros("bf16", 7)}, "head_bias has head rows = 7, head_weight has 6"),
    ({"w2": zeros("bf16", 40, 6)}, "w2 has Vd = 40, base_logits has 50"),
    ({"w2": zeros("bf16", 50, 8)}, "w2 has r = 8, w1 has 6"),
    ({"confidence_bias": zeros("fp32", 2)}, "confidence_bias has 2 biases, it has to have 1"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_MARKOV, ids=[message for _, message in BAD_MARKOV])
def test_bad_markov_tensors(play, changes, message):
    arrays = runner_case.typed(reference.MarkovCase("", "gated").inputs(), "bf16") | changes
    with pytest.raises(Refused) as error:
        play("MarkovArgmax", MARKOV, [arrays])
    assert f"dspark: MarkovArgmax: {message}" in str(error.value)

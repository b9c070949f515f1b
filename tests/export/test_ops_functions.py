"""The ONNX function bodies, run by stock ONNX Runtime, against the float64 reference."""

import numpy as np
import pytest
import reference
from single_node import session, single_node_model

ATTENTION = pytest.mark.parametrize("case", reference.ATTENTION_CASES, ids=str)
MARKOV = pytest.mark.parametrize("case", reference.MARKOV_CASES, ids=str)


@ATTENTION
def test_block_attention_function_equals_reference(case):
    arrays = case.inputs()
    found = session(single_node_model("BlockAttention", arrays, case.attributes)).run(None, arrays)
    expected = reference.block_attention(**arrays, **case.attributes)
    for name, ours, theirs in zip(("out", "key cache", "value cache"), found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6, err_msg=name)


@MARKOV
def test_markov_argmax_function_equals_reference(case):
    arrays = case.inputs()
    tokens, confidence, logits = session(single_node_model("MarkovArgmax", arrays, case.attributes)).run(None, arrays)
    expected = reference.markov_argmax(**arrays, **case.attributes)
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_allclose(confidence, expected[1], atol=1e-5)
    np.testing.assert_allclose(logits, expected[2], atol=1e-5)


@pytest.mark.parametrize("case", (*reference.MARKOV_CASES, *reference.ATTENTION_CASES[:3]), ids=str)
def test_nodes_name_their_inputs_and_leave_no_gap(case):
    """TensorRT's parser hands a left-out input to the plugin as a null pointer."""
    kind, arrays = "MarkovArgmax" if case in reference.MARKOV_CASES else "BlockAttention", case.inputs()
    (node,) = single_node_model(kind, arrays, case.attributes).graph
    assert [x.name for x in node.inputs] == list(arrays) == node.attributes["inputs"].as_string().split(",")
    if kind == "MarkovArgmax":
        assert node.attributes["outputs"].as_string() == "tokens,confidence,logits"


@pytest.mark.parametrize("context", [False, True])
def test_one_file_serves_every_shape(context):
    """The body has no shape of its own: one session runs all cases of its attributes and heads."""
    cases = [c for c in reference.ATTENTION_CASES if (c.contexts is not None) == context and c.causal != context]
    cases = [c for c in cases if not (c.window or c.softcap or c.sinks) and (c.heads, c.kv_heads, c.depth) == (4, 2, 8)]
    assert len(cases) > 3
    run = session(single_node_model("BlockAttention", cases[0].inputs(), cases[0].attributes))
    for case in cases:
        arrays = case.inputs(seed=1)
        np.testing.assert_allclose(
            run.run(None, arrays)[0],
            reference.block_attention(**arrays, **case.attributes)[0],
            atol=2e-6,
            err_msg=str(case),
        )

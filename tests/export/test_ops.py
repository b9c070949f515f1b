"""The torch ops against the float64 reference."""

import numpy as np
import pytest
import reference
import torch

from dspark.export.modules.ops import block_attention, markov_argmax

ATTENTION = pytest.mark.parametrize("case", reference.ATTENTION_CASES, ids=str)
MARKOV = pytest.mark.parametrize("case", reference.MARKOV_CASES, ids=str)


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


@ATTENTION
def test_block_attention_equals_reference(case):
    arrays = case.inputs()
    given = tensors(arrays)
    found = block_attention(**given, **case.attributes)
    expected = reference.block_attention(**arrays, **case.attributes)
    for name, ours, theirs in zip(("out", "key cache", "value cache"), found, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, atol=2e-6, err_msg=name)
    for name, array in arrays.items():
        np.testing.assert_array_equal(given[name].numpy(), array, err_msg=f"{name} was written to")


@MARKOV
def test_markov_argmax_equals_reference(case):
    arrays = case.inputs()
    tokens, confidence, logits = markov_argmax(**tensors(arrays), **case.attributes)
    expected = reference.markov_argmax(**arrays, **case.attributes)
    np.testing.assert_array_equal(tokens.numpy(), expected[0])
    np.testing.assert_allclose(confidence.numpy(), expected[1], atol=1e-5)
    np.testing.assert_allclose(logits.numpy(), expected[2], atol=1e-5)


def test_markov_argmax_takes_the_lowest_of_equal_logits():
    tokens, _, _ = markov_argmax(torch.zeros(1, 2, 5), torch.tensor([3]), torch.zeros(1, 2, 4), head="none")
    assert tokens.tolist() == [[0, 0]]


def test_the_batch_does_not_matter():
    """Each request of a ragged batch gets what it gets alone, to the bit."""
    case = next(c for c in reference.ATTENTION_CASES if c.name == "ragged, paged")
    given = tensors(case.inputs())
    together, *_ = block_attention(**given, **case.attributes)
    for request in range(len(case.blocks)):
        first, end = given["row_start"][request : request + 2].tolist()
        alone = given | {name: given[name][first:end] for name in ("q", "k", "v")}
        alone |= {name: given[name][request : request + 1] for name in ("length", "pages")}
        alone["row_start"] = torch.tensor([0, end - first], dtype=torch.int32)
        assert torch.equal(block_attention(**alone, **case.attributes)[0], together[first:end])


def test_fake_kernels_give_the_right_shapes_and_dtypes():
    attention = next(c for c in reference.ATTENTION_CASES if c.name == "draft, ragged")
    markov = next(c for c in reference.MARKOV_CASES if c.name == "rnn, reduced vocabulary")
    for op, case in ((block_attention, attention), (markov_argmax, markov)):
        torch.library.opcheck(
            op, (), tensors(case.inputs()) | case.attributes, test_utils=("test_schema", "test_faketensor")
        )

"""The Markov kernels, on the host, against the float64 reference."""

import numpy as np
import pytest
import reference
from host_library import DTYPES
from host_memory import STATUS, Failed
from markov_kernel import HEADS, Call, Compared, Random, compare, run

DTYPE = pytest.mark.parametrize("dtype", DTYPES)


@DTYPE
@pytest.mark.parametrize("case", reference.MARKOV_CASES, ids=str)
def test_table(host, case, dtype):
    compare(host.c, case.inputs(), case.attributes, Call(dtype), Compared())


@pytest.mark.parametrize("part", range(4))
def test_random_calls(host, part):
    counts = Compared()
    for seed in range(part * 90, part * 90 + 90):
        host.seed(seed)
        try:
            compare(host.c, *Random(seed).draw(), counts)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert counts.skipped <= 0.05 * counts.positions, counts


def test_rows_longer_than_one_round_of_loads(host):
    """More than 4 chunks of 32 elements, and a last one that is not whole."""
    for dtype, rank in (("bf16", 296), ("fp16", 264), ("fp32", 268)):
        case = reference.MarkovCase("", "rnn", requests=1, gamma=2, hidden=rank, rank=rank, vocab=40)
        arrays = case.inputs()
        arrays |= {name: arrays[name] / np.float32(rank**0.5) for name in ("w2", "head_weight")}
        compare(host.c, arrays, case.attributes, Call(dtype), Compared())


def none(logits: np.ndarray, **more) -> tuple[dict[str, np.ndarray], dict]:
    """A call without a head whose logits are `logits` [R, G, V]."""
    requests, gamma, _ = logits.shape
    arrays = {
        "base_logits": logits.astype(np.float32),
        "anchors": np.zeros(requests, np.int64),
        "hidden": np.zeros((requests, gamma, 4), np.float32),
    }
    return arrays | more, {"head": "none", "confidence_with_markov": False}


@pytest.mark.parametrize("equal", [(0, 299), (7, 8), (15, 16), (127, 128), (200, 201, 290), (64, 65), (1, 9)])
def test_the_lowest_of_equal_logits(host, equal):
    """Equal ones in one lane, in one warp, in two, in two blocks."""
    logits = np.full((1, 2, 300), -3.0)
    logits[:, :, list(equal)] = 1.5
    for seed in range(4):
        host.seed(seed)
        tokens, _, _ = run(host.c, *none(logits), Call())
        assert tokens.tolist() == [[min(equal)] * 2]


def test_zero_equals_minus_zero(host):
    logits = np.full((1, 1, 40), -1.0)
    logits[0, 0, [3, 30]] = -0.0, 0.0
    assert run(host.c, *none(logits), Call())[0].tolist() == [[3]]


def test_nan_and_minus_infinity_never_win(host):
    nan, infinity = np.nan, np.inf
    rows = [[nan, -infinity, -5, nan], [nan] * 4, [-infinity] * 4, [-infinity, nan, nan, -1e38], [nan, 1, infinity, 9]]
    tokens, _, _ = run(host.c, *none(np.array(rows)[None]), Call())
    assert tokens.tolist() == [[2, 0, 0, 3, 2]]


@DTYPE
def test_every_head_follows_the_draft_vocabulary_in_any_order(host, dtype):
    """d2t is a permutation here, so that an index taken for a token leads to another row of W1."""
    for head in HEADS[1:]:
        case = reference.MarkovCase("", head, requests=3, gamma=6, hidden=16, rank=8, vocab=64, draft_vocab=40)
        arrays = case.inputs(3)
        at = np.arange(40)
        arrays["d2t"] = np.random.default_rng(1).permutation(arrays["d2t"] + at) - at
        counts = Compared()
        compare(host.c, arrays, case.attributes, Call(dtype), counts)
        assert counts.positions >= 12


@DTYPE
@pytest.mark.parametrize("head", HEADS)
def test_a_request_in_a_batch_is_what_it_is_alone(host, head, dtype):
    case = reference.MarkovCase("", head, requests=5, gamma=3, hidden=24, rank=16, vocab=90, with_markov=head != "none")
    arrays = case.inputs(2)
    together = run(host.c, arrays, case.attributes, Call(dtype))
    for request in range(5):
        alone = arrays | {name: arrays[name][request : request + 1] for name in ("base_logits", "anchors", "hidden")}
        for one, all_of_them in zip(run(host.c, alone, case.attributes, Call(dtype)), together, strict=True):
            np.testing.assert_array_equal(one[0], all_of_them[request])


def test_noise_at_a_temperature_draws_the_softmax(host):
    """Gumbel noise: the shares of 4000 draws from one row; a greedy request beside them ignores its noise."""
    draws, vocab, temperature = 4000, 5, 0.7
    row = np.array([0.3, -1.0, 1.1, 0.0, 0.6])
    rng = np.random.default_rng(5)
    noise = rng.gumbel(size=(2, draws, vocab)).astype(np.float32)
    given = {"noise": noise, "temperature": np.array([temperature, 0], np.float32)}
    arrays, attributes = none(np.broadcast_to(row, (2, draws, vocab)), **given)
    tokens, _, logits = run(host.c, arrays, attributes, Call())
    expected = np.exp(row / temperature)
    expected *= draws / expected.sum()
    counts = np.bincount(tokens[0], minlength=vocab)
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom: p = 0.001
    assert (tokens[1] == 2).all()
    np.testing.assert_array_equal(logits[1, 7], row.astype(np.float32))


def test_an_anchor_from_nowhere_reads_nothing_outside(host):
    """Its tokens mean nothing; the last row of W1, or the first, stands in for the one that is not there."""
    case = reference.MarkovCase("", "vanilla", requests=2, gamma=1, vocab=30)
    arrays = case.inputs()
    wild = run(host.c, arrays | {"anchors": np.array([2**40, -1])}, case.attributes, Call())
    near = run(host.c, arrays | {"anchors": np.array([29, 0])}, case.attributes, Call())
    np.testing.assert_array_equal(wild[2], near[2])


WRONG = [
    ({"dtype": 7}, "bad_dtype"),
    ({"head": 9}, "bad_shape"),
    ({"requests": 0}, "bad_shape"),
    ({"gamma": 0}, "bad_shape"),
    ({"draft_vocab": 0}, "bad_shape"),
    ({"rank": 0}, "bad_shape"),
    ({"vocab": -1}, "bad_shape"),
    *[({name: None}, "bad_pointer") for name in ("base_logits", "anchors", "hidden", "w1", "w2", "head_weight")],
    *[({name: None}, "bad_pointer") for name in ("tokens", "confidence")],
]


@pytest.mark.parametrize(("changes", "status"), WRONG, ids=str)
def test_a_wrong_call_is_refused(host, changes, status):
    case = reference.MarkovCase("", "rnn")
    with pytest.raises(Failed, match=f"^{STATUS[status]}$"):
        run(host.c, case.inputs(), case.attributes, Call(changes=changes))


def test_a_small_workspace_is_refused(host):
    case = reference.MarkovCase("", "rnn")
    with pytest.raises(Failed, match=f"^{STATUS['workspace_too_small']}$"):
        run(host.c, case.inputs(), case.attributes, Call(workspace=-1))

"""The acceptance kernels, on the host, against a plain loop in float64."""

import numpy as np
import pytest
from accept_kernel import Calls, Compared, compare, random_calls, run
from host_library import DTYPES
from host_memory import STATUS, Failed

DTYPE = pytest.mark.parametrize("dtype", DTYPES)
DRAWN, SOFT = (1.0, 0.6), (1.0, 0.5)
CASES = {
    "greedy": Calls(),
    "greedy, one draft": Calls(drafts=(1,), gamma=1),
    "nothing drafted": Calls(drafts=(0, 0), gamma=0, temperatures=(0.0, 1.0)),
    "ragged": Calls(drafts=(0, 5, 2, -1, 3), gamma=5, temperatures=(0.0, 1.0)),
    "greedy, more than a chunk": Calls(drafts=(2,), vocab=4099),
    "argmax drafts": Calls(drafts=(4, 4, 4), gamma=4, temperatures=DRAWN),
    "argmax drafts, reduced vocabulary": Calls(drafts=(4, 4), gamma=4, draft_vocab=7, temperatures=DRAWN),
    "argmax drafts beside their logits": Calls(drafts=(4, 4), gamma=4, temperatures=DRAWN, draft_temperatures=(0.0,)),
    "drawn drafts": Calls(drafts=(4, 4, 4), gamma=4, temperatures=DRAWN, draft_temperatures=SOFT),
    "drawn drafts, reduced vocabulary": Calls(
        drafts=(4, 4, 4), gamma=4, draft_vocab=9, temperatures=DRAWN, draft_temperatures=SOFT
    ),
    "drawn drafts, more than a chunk": Calls(drafts=(3,), vocab=5000, temperatures=DRAWN, draft_temperatures=SOFT),
    "drawn drafts, reduced, more than a chunk": Calls(
        drafts=(3,), vocab=5000, draft_vocab=2500, temperatures=DRAWN, draft_temperatures=SOFT
    ),
    "all kinds": Calls(
        drafts=(6, 0, 3, 1, 5, 2), gamma=6, vocab=33, temperatures=(0.0, 1.0), draft_temperatures=(0.0, 0.8)
    ),
}


@DTYPE
@pytest.mark.parametrize("name", CASES)
def test_cases(host, name, dtype):
    for seed in range(3):
        compare(host.c, CASES[name].arrays(seed), dtype, Compared())


@pytest.mark.parametrize("part", range(3))
def test_random_calls(host, part):
    counts = Compared()
    for seed in range(part * 110, part * 110 + 110):
        host.seed(seed)
        try:
            compare(host.c, *random_calls(seed), counts)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert counts.skipped + counts.edges <= 0.02 * counts.requests, counts


def test_the_lowest_of_equal_logits_is_the_target_s_argmax(host):
    rows = np.full((3, 5000), -1.0, np.float32)
    rows[0, [40, 4000]] = rows[1, [7, 8]] = rows[2, [2047, 2048]] = 2.0
    arrays = {"target_logits": rows, "row_start": np.array([0, 3], np.int32), "drafts": np.array([[40, 7]])}
    assert [x.tolist() for x in run(host.c, arrays)] == [[2], [2047]]
    assert [x.tolist() for x in run(host.c, arrays | {"drafts": np.array([[4000, 7]])})] == [[0], [40]]
    assert [x.tolist() for x in run(host.c, arrays | {"drafts": np.array([[40, 8]])})] == [[1], [7]]


def one(rows, draft, *, accept=0.5, final=0.5, temperature=1.0, draft_row=None) -> dict[str, np.ndarray]:
    """One request, one draft."""
    made = {
        "target_logits": np.array(rows, np.float32),
        "row_start": np.array([0, 2], np.int32),
        "drafts": np.array([[draft]]),
        "temperature": np.array([temperature], np.float32),
        "accept_uniform": np.array([[accept]], np.float32),
        "final_uniform": np.array([final], np.float32),
    }
    if draft_row is not None:
        made |= {
            "draft_logits": np.array([[draft_row]], np.float32),
            "draft_temperature": np.array([1], np.float32),
        }
    return made


LAST = np.nextafter(np.float32(1), np.float32(0))
N, I = np.nan, np.inf  # noqa: E741
EDGES = {
    # name: (target rows, draft, options, accepted, next)
    "p(x) = 0 is refused by u = 0": ([[0, -I, 0], [0, 0, 0]], 1, {"accept": 0, "final": 0}, 0, 0),
    "p(x) = 0 is never drawn by u = 0": ([[-I, 5, 0], [0, 0, 0]], 0, {"accept": 0, "final": 0}, 0, 1),
    "nor after the last one by the largest u": ([[1, -I, -I], [1, 0, -I]], 0, {"accept": 0, "final": LAST}, 1, 1),
    "p(x) = 1 is kept by the largest u": ([[9, -I, -I], [-I, 0, -I]], 0, {"accept": LAST}, 1, 1),
    "the refused draft is not drawn": ([[3, 0, -I], [0, 0, 0]], 0, {"accept": LAST, "final": LAST}, 0, 1),
    "no residual: p": ([[2, N, -I], [0, 0, 0]], 1, {"accept": LAST, "draft_row": [2, N, -I], "final": 0.9}, 0, 0),
    "NaN counts as -inf": ([[N, 0, N], [N, N, 4]], 1, {"accept": 0.9}, 1, 2),
    "an infinite logit is alone": ([[0, I, 0], [I, 0, 0]], 1, {"accept": 0.9}, 1, 0),
    "a row of -inf gives 0": ([[-I, -I, -I], [0, 0, 0]], 1, {"accept": 0}, 0, 0),
    "a row of NaN gives 0, greedy": ([[N, N, N], [N, 1, N]], 0, {"temperature": 0}, 1, 1),
    "a tiny temperature is greedy": ([[0, 1e-3, 0], [0, 0, 1e-3]], 1, {"temperature": 1e-30, "accept": LAST}, 1, 2),
    "a draft that q has not drawn": ([[0, 0, 0], [-I, -I, 0]], 1, {"draft_row": [0, -I, 0], "accept": LAST}, 1, 2),
    "a token from nowhere is refused": ([[-I, 0, -I], [0, 0, 0]], 2**40, {"accept": 0}, 0, 1),
    "a negative token too, greedy": ([[0, 1, 0], [0, 0, 0]], -1, {"temperature": 0}, 0, 1),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(host, name):
    rows, draft, options, accepted, following = EDGES[name]
    assert [x.tolist() for x in run(host.c, one(rows, draft, **options))] == [[accepted], [following]]


def test_without_temperature_all_are_greedy_and_need_no_uniforms(host):
    arrays = Calls(drafts=(3, 3)).arrays()
    greedy = run(host.c, {n: arrays[n] for n in ("target_logits", "row_start", "drafts")})
    np.testing.assert_array_equal(greedy, run(host.c, arrays))


@pytest.mark.parametrize("seed", range(3))
def test_a_request_in_a_batch_is_what_it_is_alone(host, seed):
    arrays = CASES["all kinds"].arrays(seed)
    accepted, following = run(host.c, arrays)
    for request in range(6):
        first, end = arrays["row_start"][request : request + 2]
        alone = {n: a[request : request + 1] for n, a in arrays.items() if n not in ("target_logits", "row_start")}
        alone |= {
            "target_logits": arrays["target_logits"][first:end],
            "row_start": np.array([0, end - first], np.int32),
        }
        assert [x.tolist() for x in run(host.c, alone)] == [[accepted[request]], [following[request]]]


@pytest.mark.parametrize("drafter", ["argmax", "drawn", "reduced"])
def test_what_is_emitted_has_the_target_s_distribution(host, drafter):
    """4000 one-draft requests on one pair of rows: the first token that each emits, and those drawn at a rejection."""
    requests, vocab = 4000, 6
    rng = np.random.default_rng(11)
    target, tokens = rng.normal(size=vocab) * 1.2, np.arange(vocab)
    if drafter == "reduced":
        tokens = np.array([4, 0, 3])
    row = rng.normal(size=len(tokens)) * 1.2
    p, drawn = np.exp(target / 0.8), np.exp(row / 1.3)
    p, drawn = p / p.sum(), drawn / drawn.sum()
    q = np.zeros(vocab)
    arrays = {
        "target_logits": np.tile(target, (2 * requests, 1)).astype(np.float32),
        "row_start": (2 * np.arange(requests + 1)).astype(np.int32),
        "temperature": np.full(requests, 0.8, np.float32),
        "accept_uniform": rng.random((requests, 1), np.float32),
        "final_uniform": rng.random(requests, np.float32),
    }
    if drafter == "argmax":
        q[1] = 1
        arrays["drafts"] = np.full((requests, 1), 1)
    else:
        q[tokens] = drawn
        arrays["drafts"] = rng.choice(tokens, size=(requests, 1), p=drawn)
        arrays["draft_logits"] = np.tile(row, (requests, 1, 1)).astype(np.float32)
        arrays["draft_temperature"] = np.full(requests, 1.3, np.float32)
    if drafter == "reduced":
        arrays["d2t"] = tokens - np.arange(3)
    accepted, following = run(host.c, arrays)
    assert 0 < accepted.sum() < requests

    def chi_square(found: np.ndarray, law: np.ndarray) -> float:
        seen, expected = np.bincount(found, minlength=vocab), law * len(found)
        assert not seen[law == 0].any()
        return ((seen - expected)[law > 0] ** 2 / expected[law > 0]).sum()

    # 5 degrees of freedom at most: above 20.5 once in 1000 seeds.
    assert chi_square(np.where(accepted == 1, arrays["drafts"][:, 0], following), p) < 20.5
    assert chi_square(following[accepted == 1], p) < 20.5  # bonus tokens: the rows are equal
    residual = np.maximum(p - q, 0)
    assert chi_square(following[accepted == 0], residual / residual.sum()) < 20.5


WRONG = [
    ({"dtype": 3}, "bad_dtype"),
    ({"requests": 0}, "bad_shape"),
    ({"gamma": -1}, "bad_shape"),
    ({"vocab": 0}, "bad_shape"),
    ({"rows": -1}, "bad_shape"),
    ({"draft_vocab": 0}, "bad_shape"),
    *[({n: None}, "bad_pointer") for n in ("target_logits", "row_start", "drafts", "accept_uniform", "final_uniform")],
    *[({n: None}, "bad_pointer") for n in ("accepted", "next")],
]


@pytest.mark.parametrize(("changes", "status"), WRONG, ids=str)
def test_a_wrong_call_is_refused(host, changes, status):
    with pytest.raises(Failed, match=f"^{STATUS[status]}$"):
        run(host.c, CASES["drawn drafts"].arrays(), changes=changes)


def test_a_small_workspace_is_refused(host):
    with pytest.raises(Failed, match=f"^{STATUS['workspace_too_small']}$"):
        run(host.c, CASES["drawn drafts"].arrays(), workspace=-1)


def test_markers_outside_of_the_rows_read_nothing(host):
    arrays = Calls().arrays() | {"row_start": np.array([0, 4, 900], np.int32)}
    accepted, following = run(host.c, arrays)
    assert (accepted[1], following[1]) == (0, -1)

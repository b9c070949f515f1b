"""MarkovArgmax on the host build of its kernels, and the comparison with the float64 reference."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

import host_memory
import numpy as np
import reference
from host_library import DTYPES
from host_memory import Guarded

HEADS = ("none", "vanilla", "gated", "rnn")  # in the order of dspark::MarkovHead
WEIGHTS = ("base_logits", "hidden", "w1", "w2", "head_weight", "head_bias")
INPUTS = (
    "base_logits", "anchors", "hidden", "w1", "w2", "head_weight", "head_bias", "confidence_weight", "confidence_bias",
    "d2t", "noise", "temperature",
)  # fmt: skip
OUTPUTS = ("tokens", "confidence", "logits")
SIZES = ("dtype", "head", "confidence_with_markov", "requests", "gamma", "hidden_size", "rank", "vocab", "draft_vocab")


class Params(ctypes.Structure):
    """struct MarkovArgmax of markov_argmax.cuh."""

    _fields_ = [(name, ctypes.c_void_p) for name in INPUTS + OUTPUTS] + [(name, ctypes.c_int32) for name in SIZES]


@dataclass(frozen=True)
class Call:
    """How a kernel is called beyond the op's inputs."""

    dtype: str = "fp32"
    shift: int = 0  # elements by which the arrays are off a 16-byte boundary
    with_logits: bool = True
    changes: Mapping[str, int | None] = field(default_factory=dict)  # fields of Params, to be wrong on purpose
    workspace: int = 0  # bytes more than needed


def quantised(arrays: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """The op's inputs with the weights in `dtype`."""
    return {n: np.ascontiguousarray(a, DTYPES[dtype] if n in WEIGHTS else None) for n, a in arrays.items()}


def run(library: ctypes.CDLL, arrays: Mapping[str, np.ndarray], attributes: Mapping, call: Call) -> tuple:
    """(tokens, confidence, logits or None) of the kernels; Failed if they refuse the call."""
    given = quantised(arrays, call.dtype)
    held = {name: Guarded.of(array, call.shift) for name, array in given.items()}
    requests, gamma, draft_vocab = arrays["base_logits"].shape
    held["tokens"] = Guarded((requests, gamma), np.int64)
    held["confidence"] = Guarded((requests, gamma), np.float32)
    if call.with_logits:
        held["logits"] = Guarded((requests, gamma, draft_vocab), np.float32, call.shift)
    w1 = arrays.get("w1", np.empty((1, 0)))
    values = {name: one.address for name, one in held.items()} | {
        "dtype": [*DTYPES].index(call.dtype),
        "head": HEADS.index(attributes["head"]),
        "confidence_with_markov": int(attributes["confidence_with_markov"]),
        "requests": requests,
        "gamma": gamma,
        "hidden_size": arrays["hidden"].shape[-1],
        "rank": w1.shape[1],
        "vocab": w1.shape[0],
        "draft_vocab": draft_vocab,
    }
    host_memory.call(library, "markov_argmax", Params(**(values | dict(call.changes))), held, call.workspace)
    for name, array in given.items():
        assert held[name].array.tobytes() == array.tobytes(), f"{name} was written to"
    return tuple(held[name].array if name in held else None for name in OUTPUTS)


def tolerance(arrays: Mapping[str, np.ndarray], head: str) -> float:
    """What fp32 arithmetic may do to a corrected logit: 2^-24 x the largest sum of magnitudes x 2 sqrt(terms).

    Terms are those of the longest sums on its way, r of W2 e and H + r (gated) or H + 2 r (rnn) of e, and 16 for the
    rest; their roundings are independent of each other. An error of the rnn's state grows on its way through the steps:
    8 times as much. It is the same for every dtype, since the reference has the very same inputs and an e in parts
    (PARTS) is as exact as fp32. Head none computes nothing: 0.
    """
    if head == "none":
        return 0.0
    rank, hidden = arrays["w1"].shape[1], arrays["hidden"].shape[-1]
    terms = rank + 16 + {"vanilla": 0, "gated": hidden + rank, "rnn": hidden + 2 * rank}[head]
    largest_e = 1.0 if head == "rnn" else np.abs(arrays["w1"]).max()
    magnitude = np.abs(arrays["base_logits"]).max() + largest_e * np.abs(arrays["w2"]).sum(-1).max()
    return 2.0**-24 * magnitude * 2 * terms**0.5 * (8 if head == "rnn" else 1)


@dataclass
class Compared:
    """Positions whose tokens were held to the reference, and those behind a near-tie, which were not."""

    positions: int = 0
    skipped: int = 0


def compare(
    library: ctypes.CDLL, arrays: Mapping[str, np.ndarray], attributes: Mapping, call: Call, counts: Compared
) -> None:
    """AssertionError where the kernels leave the reference.

    Logits to `tolerance`. Tokens exactly, except where the reference's two best scores are closer than twice what
    rounding may do to a score: there, and behind it in its request, either chain may follow.
    """
    tokens, confidence, logits = run(library, arrays, attributes, call)
    exact = {n: a.astype(np.float32) if n in WEIGHTS else a for n, a in quantised(arrays, call.dtype).items()}
    expected_tokens, expected_confidence, expected_logits = reference.markov_argmax(**exact, **attributes)
    bound = tolerance(exact, attributes["head"])
    assert np.isfinite(confidence).all() and (logits is None or np.isfinite(logits).all()), "poison is left"
    for request, position in np.ndindex(tokens.shape):
        if position == 0:
            near = False
        if near:
            counts.skipped += 1
            continue
        where = f"request {request}, position {position}"
        found, wanted = confidence[request, position], expected_confidence[request, position]
        assert abs(found - wanted) <= 1e-5, f"confidence {found}, not {wanted}: {where}"
        scores = expected_logits[request, position]
        if logits is not None:
            error = np.abs(logits[request, position] - scores).max()
            assert error <= bound, f"logits off by {error}, allowed {bound}: {where}"
        slack = bound
        if "noise" in arrays and arrays["temperature"][request] > 0:
            temperature = np.float64(arrays["temperature"][request])
            scores = scores / temperature + arrays["noise"][request, position]
            slack = bound / temperature + 2.0**-22 * np.abs(scores).max()
        best = np.sort(scores)[-2:]
        if slack > 0 and len(best) == 2 and best[1] - best[0] <= 2 * slack:
            near = True
            counts.skipped += 1
            continue
        counts.positions += 1
        found, wanted = tokens[request, position], expected_tokens[request, position]
        assert found == wanted, f"token {found}, not {wanted}: {where}"


@dataclass(frozen=True)
class Random:
    """A random call, everything drawn from its seed."""

    seed: int

    def draw(self) -> tuple[dict[str, np.ndarray], dict, Call]:
        rng = np.random.default_rng(self.seed)

        def one_of(*values):
            return values[rng.integers(len(values))]

        head, dtype = HEADS[self.seed % 4], [*DTYPES][self.seed // 4 % 3]
        aligned = self.seed // 12 % 3 > 0  # two of three: rows of whole 16 bytes
        each = 8 if aligned else 1
        requests = int(one_of(1, 1, 1, 2, 3, 7, 8, 9, 17))
        few = requests <= 3
        vocab = int(rng.integers(1, 420 if few else 150))
        case = reference.MarkovCase(
            name="",
            head=head,
            requests=requests,
            gamma=int(one_of(1, 2, 5, 7) if few else one_of(1, 2)),
            hidden=each * int(rng.integers(1, 12 if aligned else 70)),
            rank=each * int(rng.integers(1, 20 if few and aligned else 6)),
            vocab=vocab,
            draft_vocab=int(rng.integers(1, vocab + 1)) if rng.random() < 0.4 else None,
            confidence=bool(rng.random() < 0.7),
            with_markov=bool(head != "none" and rng.random() < 0.7),
        )
        arrays = case.inputs(seed=self.seed)
        if head == "none" and rng.random() < 0.5:  # many equal ones
            arrays["base_logits"] = np.rint(arrays["base_logits"])
        # As trained ones are: sums that do not grow with their length, or e would be all 0 and 1.
        for name in ("head_weight", "w2"):
            if name in arrays:
                arrays[name] /= np.float32(arrays[name].shape[1] ** 0.5)
        if "d2t" in arrays and rng.random() < 0.5:  # in any order
            at = np.arange(len(arrays["d2t"]))
            arrays["d2t"] = rng.permutation(arrays["d2t"] + at) - at
        absent = {}
        for name in ("head_bias", "confidence_bias"):
            if name in arrays and rng.random() < 0.2:  # null stands for 0
                arrays[name] = np.zeros_like(arrays[name])
                absent[name] = None
        if rng.random() < 0.3:
            arrays["noise"] = rng.gumbel(size=arrays["base_logits"].shape).astype(np.float32)
            arrays["temperature"] = rng.choice([0.0, 0.3, 1.0, 2.5], size=requests).astype(np.float32)
            # A greedy request's noise is not read.
            arrays["noise"][arrays["temperature"] == 0] = np.nan
        call = Call(dtype, int(rng.random() < 0.15), bool(rng.random() < 0.8), absent)
        return arrays, case.attributes, call

"""The acceptance of drafts in float64, as plainly as it can be said, and on the host build of its kernels."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from host_library import DTYPES
from host_memory import Guarded, call

INPUTS = (
    "target_logits", "row_start", "drafts", "temperature", "draft_logits", "draft_temperature", "d2t",
    "accept_uniform", "final_uniform",
)  # fmt: skip
OUTPUTS = ("accepted", "next")
SIZES = ("dtype", "rows", "requests", "gamma", "vocab", "draft_vocab")
# What fp32 may do to a probability or a sum of some: about 30 roundings of 2^-24 (16 elements of a thread, 5 and 2
# steps of the reductions, the chunks), those of an exponential, and twice that, since p and q both have them.
NEAR = 1e-5


class Params(ctypes.Structure):
    """struct Accept of accept.cuh."""

    _fields_ = [(name, ctypes.c_void_p) for name in INPUTS + OUTPUTS] + [(name, ctypes.c_int32) for name in SIZES]


def quantised(arrays: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """The inputs with the target's logits in `dtype`."""
    return {n: np.ascontiguousarray(a, DTYPES[dtype] if n == "target_logits" else None) for n, a in arrays.items()}


def run(
    library: ctypes.CDLL,
    arrays: Mapping[str, np.ndarray],
    dtype: str = "fp32",
    changes: Mapping[str, int | None] | None = None,
    workspace: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """(accepted [R], next [R]) of the kernels; Failed if they refuse the call.

    changes: fields of Params, to be wrong on purpose. workspace: bytes more than needed.
    """
    held = {name: Guarded.of(array) for name, array in quantised(arrays, dtype).items()}
    requests, gamma = arrays["drafts"].shape
    held["accepted"], held["next"] = Guarded((requests,), np.int32), Guarded((requests,), np.int64)
    values = {name: one.address for name, one in held.items()} | {
        "dtype": [*DTYPES].index(dtype),
        "rows": len(arrays["target_logits"]),
        "requests": requests,
        "gamma": gamma,
        "vocab": arrays["target_logits"].shape[1],
        "draft_vocab": arrays["draft_logits"].shape[-1] if "draft_logits" in arrays else 0,
    }
    call(library, "accept", Params(**(values | dict(changes or {}))), held, workspace)
    return held["accepted"].array, held["next"].array


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    """In float64; NaN counts as -inf, and a row without anything else gives 0."""
    logits = logits.astype(np.float64)
    logits[np.isnan(logits)] = -np.inf
    if logits.max() == -np.inf:
        return np.zeros_like(logits)
    weights = np.exp((logits - logits.max()) / np.float64(temperature))
    return weights / weights.sum()


def argmax(logits: np.ndarray) -> int:
    logits = logits.astype(np.float64)
    logits[np.isnan(logits)] = -np.inf
    return int(np.argmax(logits))


@dataclass
class Outcome:
    """What one request comes to."""

    accepted: int
    next: int | None = None  # of a greedy request
    weights: np.ndarray | None = None  # [V] of a drawn one: next is drawn from these
    near: bool = False  # some accept draw was so close to its bound that rounding decides


def accept(
    target_logits, row_start, drafts, temperature=None, draft_logits=None, draft_temperature=None, d2t=None,
    accept_uniform=None, final_uniform=None,
):  # fmt: skip
    """One Outcome per request; accept.cuh says the same in words."""
    outcomes = []
    for request in range(len(drafts)):
        rows = target_logits[row_start[request] : row_start[request + 1]]
        if not len(rows):
            outcomes.append(Outcome(0, -1))
            continue
        if temperature is None or temperature[request] <= 0:
            accepted = 0
            while accepted < len(rows) - 1 and drafts[request, accepted] == argmax(rows[accepted]):
                accepted += 1
            outcomes.append(Outcome(accepted, argmax(rows[accepted])))
            continue
        soft = draft_logits is not None and draft_temperature is not None and draft_temperature[request] > 0
        outcome = Outcome(0)
        for k in range(len(rows)):
            p = softmax(rows[k], temperature[request])
            if k == len(rows) - 1:
                outcome.weights = p
                break
            token = drafts[request, k]
            q = np.zeros_like(p)
            if soft:
                tokens = np.arange(draft_logits.shape[-1]) + (0 if d2t is None else d2t)
                q[tokens] = softmax(draft_logits[request, k], draft_temperature[request])
            else:
                q[token] = 1
            bound = np.float64(accept_uniform[request, k]) * q[token]
            outcome.near |= 0 < abs(bound - p[token]) <= NEAR * (bound + p[token])
            if not bound < p[token]:
                outcome.weights = np.maximum(p - q, 0) if np.maximum(p - q, 0).sum() > 0 else p
                break
            outcome.accepted += 1
        outcomes.append(outcome)
    return outcomes


@dataclass
class Compared:
    requests: int = 0
    skipped: int = 0  # an accept draw near its bound
    edges: int = 0  # a final draw near the bound of two tokens: either is right


def compare(library: ctypes.CDLL, arrays: Mapping[str, np.ndarray], dtype: str, counts: Compared) -> None:
    """AssertionError where the kernels leave the float64 loop."""
    check(quantised(arrays, dtype), run(library, arrays, dtype), counts)


def check(arrays: Mapping[str, np.ndarray], found: tuple[np.ndarray, np.ndarray], counts: Compared) -> None:
    """AssertionError where `found` (accepted, next) leaves the float64 loop over these arrays.

    Accepted counts exactly, except where an accept draw is within NEAR (relative) of its bound. The drawn token
    exactly, except where the draw is within NEAR (of the whole distribution) of the bound between two tokens.
    """
    accepted, following = found
    for request, outcome in enumerate(accept(**arrays)):
        counts.requests += 1
        if outcome.near:
            counts.skipped += 1
            continue
        where = f"request {request}: {accepted[request]} accepted, next {following[request]}"
        assert accepted[request] == outcome.accepted, f"{where}; not {outcome.accepted} accepted"
        if outcome.weights is None:
            assert following[request] == outcome.next, f"{where}; not {outcome.next}"
            continue
        token, edges = following[request], np.concatenate(([0.0], np.cumsum(outcome.weights)))
        assert 0 <= token < len(outcome.weights), where
        at = np.float64(arrays["final_uniform"][request]) * edges[-1]
        assert edges[token] - NEAR <= at < edges[token + 1] + NEAR, (
            f"{where}; {at} is not in {edges[token : token + 2]}"
        )
        counts.edges += not edges[token] <= at < edges[token + 1]


@dataclass(frozen=True)
class Calls:
    """A batch of requests, drawn from a seed."""

    drafts: tuple[int, ...] = (3, 3)  # verified of each request; -1: it has no rows
    gamma: int = 3
    vocab: int = 20
    draft_vocab: int | None = None  # None: the whole vocabulary
    temperatures: tuple[float, ...] = (0.0,)  # one of them for each request
    draft_temperatures: tuple[float, ...] | None = None  # None: there are no draft logits
    spread: float = 2.0  # of the logits
    tilt: float = 0.0  # how much larger they are at the end of the vocabulary: chunks of it differ

    def arrays(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        requests, drafted = len(self.drafts), self.draft_vocab or self.vocab
        rows = [count + 1 for count in self.drafts]
        made = {
            "target_logits": rng.normal(size=(sum(rows), self.vocab)).astype(np.float32) * np.float32(self.spread),
            "row_start": np.cumsum([0, *rows]).astype(np.int32),
            "temperature": rng.choice(self.temperatures, size=requests).astype(np.float32),
            "accept_uniform": rng.random((requests, self.gamma), np.float32),
            "final_uniform": rng.random(requests, np.float32),
        }
        made["target_logits"] += np.linspace(0, self.tilt, self.vocab, dtype=np.float32)
        tokens = np.arange(drafted)
        if self.draft_vocab:
            tokens = rng.permutation(self.vocab)[:drafted]
            made["d2t"] = tokens - np.arange(drafted)
        # Drafts that are near the target's own distribution, as a drafter's are, so that whole prefixes are kept.
        logits = (rng.normal(size=(requests, self.gamma, drafted)) * self.spread).astype(np.float32)
        for request, count in enumerate(self.drafts):
            for k in range(max(0, count)):
                target = made["target_logits"][made["row_start"][request] + k][tokens]
                logits[request, k] = logits[request, k] * 0.3 + target
        made["drafts"] = tokens[logits.argmax(-1)].reshape(requests, self.gamma)
        if self.draft_temperatures is not None:
            temperatures = rng.choice(self.draft_temperatures, size=requests).astype(np.float32)
            made |= {"draft_logits": logits, "draft_temperature": temperatures}
            for request in np.flatnonzero(temperatures):
                for k in range(self.gamma):
                    q = softmax(logits[request, k], temperatures[request])
                    made["drafts"][request, k] = rng.choice(tokens, p=q)
        # What is behind the verified drafts of a request means nothing.
        for request, count in enumerate(self.drafts):
            made["drafts"][request, max(0, count) :] = 2**62
            made["accept_uniform"][request, max(0, count) :] = np.nan
            if "draft_logits" in made:
                made["draft_logits"][request, max(0, count) :] = np.nan
        return made


def random_calls(seed: int) -> tuple[dict[str, np.ndarray], str]:
    rng = np.random.default_rng(seed)
    large = seed % 6 == 0  # more than a chunk
    gamma = int(rng.integers(4 if large else 0, 7))
    vocab = int(rng.integers(2049, 6200) if large else rng.integers(2, 200))
    drafts = tuple(int(n) for n in rng.integers(2 if large else -1, gamma + 1, size=2 if large else rng.integers(1, 6)))
    calls = Calls(
        drafts=drafts if max(drafts) >= 0 else (gamma, *drafts),
        gamma=gamma,
        vocab=vocab,
        draft_vocab=int(rng.integers(1, vocab + 1)) if rng.random() < 0.4 else None,
        temperatures=(0.0, 0.5, 1.0, 1.7) if large else ((0.0,), (1.0,), (0.0, 0.5, 1.0, 1.7))[rng.integers(3)],
        draft_temperatures=(None, (0.0, 1.0), (0.4, 1.3))[rng.integers(3)],
        spread=float(rng.choice([0.5, 2.0, 6.0])),
        tilt=float(rng.choice([-6.0, 0.0, 6.0])),
    )
    arrays = calls.arrays(seed)
    if rng.random() < 0.2:  # many equal ones, zeros of both signs the largest
        whole = np.rint(arrays["target_logits"])
        arrays["target_logits"] = np.where(whole > 0, np.float32(0), whole)
    return arrays, [*DTYPES][seed % 3]

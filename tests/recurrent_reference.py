"""What the ops of recurrent layers mean, in float64 and as plainly as it can be said, and the one table of cases.

As in reference.py: every realisation is held to these functions on these cases. The state of a request that has
nothing committed is NaN in every case: a realisation that reads it fails.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RecurrentCase:
    """One call over the rows of some requests, for either op."""

    name: str
    blocks: tuple[int, ...]  # rows of each request
    lengths: tuple[int, ...]  # what each has committed
    slots: int = 4
    heads: int = 4  # of values, for GatedDelta
    key_heads: int = 2
    key_depth: int = 5
    depth: int = 3
    channels: int = 6  # for CausalConv
    taps: int = 4
    bias: bool = False
    padding: int = 0  # rows behind the last marker
    same_keys: bool = False  # each row overwrites what the one before wrote, and nothing fades

    def __str__(self) -> str:
        return self.name

    @property
    def single(self) -> bool:
        """One request without padding: what a graph without row markers takes."""
        return len(self.blocks) == 1 and not self.padding

    @property
    def attributes(self) -> dict:
        return {"slots": self.slots}

    def _common(self, rng, *shape: int) -> dict[str, np.ndarray]:
        state = rng.normal(size=(len(self.blocks), *shape)).astype(np.float32)
        state[np.array(self.lengths) == 0] = np.nan
        starts = np.cumsum((0, *self.blocks)).astype(np.int32)
        return {"state": state, "row_start": starts, "length": np.array(self.lengths, np.int32)}

    def delta_inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng, rows = np.random.default_rng(seed), sum(self.blocks) + self.padding

        def draw(*shape: int) -> np.ndarray:
            return rng.normal(size=(rows, *shape)).astype(np.float32)

        q, k = (draw(self.key_heads, self.key_depth) for _ in range(2))
        made = {"q": q, "k": k / np.linalg.norm(k, axis=-1, keepdims=True), "v": draw(self.heads, self.depth)}
        made |= {"g": -np.exp(draw(self.heads)), "beta": 1 / (1 + np.exp(-draw(self.heads)))}
        if self.same_keys:
            made["k"][:], made["g"][:], made["beta"][:] = made["k"][:1], 0, 1
        return made | self._common(rng, self.heads, self.key_depth, self.depth)

    def conv_inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng, rows = np.random.default_rng(seed), sum(self.blocks) + self.padding
        made = {"x": rng.normal(size=(rows, self.channels)).astype(np.float32)}
        made["weight"] = rng.normal(size=(self.channels, self.taps)).astype(np.float32)
        made |= self._common(rng, self.taps - 1, self.channels)
        return made | ({"bias": rng.normal(size=self.channels).astype(np.float32)} if self.bias else {})


def gated_delta(q, k, v, g, beta, state, row_start, length, *, slots):
    """(out, states) in float64; plugins/README.md says the same in words."""
    q, k, v, g, beta = (x.astype(np.float64) for x in (q, k, v, g, beta))
    out, states, group = np.zeros_like(v), [], v.shape[1] // k.shape[1]
    kept = min(len(v), slots)
    for request, committed in enumerate(length):
        memory = state[request].astype(np.float64) if committed else np.zeros(state.shape[1:])
        seen = [memory]
        for row in range(row_start[request], row_start[request + 1]):
            memory = memory.copy()
            for head in range(v.shape[1]):
                key, query = k[row, head // group], q[row, head // group]
                memory[head] *= np.exp(g[row, head])
                error = v[row, head] - key @ memory[head]
                memory[head] += beta[row, head] * np.outer(key, error)
                out[row, head] = query @ memory[head]
            seen.append(memory)
        states.append(_last(seen, kept))
    return out, np.array(states)


def causal_conv(x, weight, state, row_start, length, bias=None, *, slots):
    """(out, states) in float64."""
    out, states, past = np.zeros(x.shape), [], weight.shape[1] - 1
    for request, committed in enumerate(length):
        memory = state[request].astype(np.float64) if committed else np.zeros(state.shape[1:])
        seen = [memory]
        for row in range(row_start[request], row_start[request + 1]):
            window = np.concatenate((memory, x[row : row + 1]))  # [K, C], the row itself last
            out[row] = (window * weight.T).sum(0) + (0 if bias is None else bias)
            memory = window[len(window) - past :]
            seen.append(memory)
        states.append(_last(seen, min(len(x), slots)))
    return out, np.array(states)


def _last(seen: list[np.ndarray], kept: int) -> np.ndarray:
    """The last `kept` states; the one before the first row stands for those that are not there."""
    return np.array([seen[max(0, len(seen) - kept + slot)] for slot in range(kept)])


CASES = (
    RecurrentCase("one row of a new request", (1,), (0,)),
    RecurrentCase("one row late", (1,), (9,)),
    RecurrentCase("first prompt", (11,), (0,)),
    RecurrentCase("next chunk", (11,), (20,)),
    RecurrentCase("fewer rows than slots", (3,), (7,)),
    RecurrentCase("as many rows as slots", (4,), (7,)),
    RecurrentCase("one row more", (5,), (7,)),
    RecurrentCase("the last state alone", (6,), (7,), slots=1),
    RecurrentCase("no groups", (5,), (7,), heads=3, key_heads=3),
    RecurrentCase("groups of 3", (5,), (7,), heads=6, key_heads=2, key_depth=4, depth=8),
    RecurrentCase("fewer rows than taps", (2,), (1,), taps=4, slots=8),
    RecurrentCase("two taps and a bias", (5,), (7,), taps=2, bias=True),
    RecurrentCase("requests", (5, 5), (7, 0)),
    RecurrentCase("requests of one row", (1, 1, 1), (7, 0, 3)),
    RecurrentCase("ragged", (6, 1, 3), (7, 2, 0)),
    RecurrentCase("a request without rows", (2, 0, 5), (7, 3, 1)),
    RecurrentCase("a new request without rows", (0, 2), (0, 3), bias=True),
    RecurrentCase("padding", (2, 3), (4, 0), padding=3),
    RecurrentCase("padding alone kept", (1,), (4,), padding=5),
    RecurrentCase("long", (60,), (4,)),
    RecurrentCase("long, new", (36,), (0,)),
    RecurrentCase("long, ragged", (40, 1, 23), (0, 5, 9), padding=1),
    RecurrentCase("long, the same keys", (50,), (4,), slots=9, same_keys=True),
)

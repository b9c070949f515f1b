"""What the two custom ops mean, in float64 and as plainly as it can be said, and the one table of cases.

Everything that realises an op (torch, ONNX function body, backend lowering, CUDA kernel) is held to these functions on
these cases. Unused cache rows are NaN in every case: a realisation that reads one fails.
"""

from dataclasses import dataclass
from math import ceil

import numpy as np


@dataclass(frozen=True)
class AttentionCase:
    """One call of BlockAttention: per request its block rows, committed length and new context rows."""

    name: str
    blocks: tuple[int, ...]
    lengths: tuple[int, ...]
    contexts: tuple[int, ...] | None = None  # None: the op's context inputs are absent
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    heads: int = 4
    kv_heads: int = 2
    depth: int = 8
    page: int | None = None  # rows of a page; None: one page per request, just large enough
    padding: int = 0  # rows behind the last marker
    sinks: bool = False
    ring: int | None = None  # rows beyond the window that a request's one page has; all its columns name that page

    def __str__(self) -> str:
        return self.name

    @property
    def single(self) -> bool:
        """One request on a linear cache or a ring, without padding: what the ONNX Runtime CPU form takes."""
        return len(self.blocks) == 1 and self.page is None and not self.padding

    @property
    def attributes(self) -> dict:
        return {
            "causal": self.causal,
            "window": self.window,
            "scale": 0.7 / self.depth**0.5,
            "softcap": self.softcap,
        }

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        """The op's inputs, fp32, with NaN in every cache row that holds nothing."""
        rng = np.random.default_rng(seed)
        requests, contexts = len(self.blocks), self.contexts or (0,) * len(self.blocks)
        rows = [sum(r) for r in zip(self.blocks, self.lengths, contexts, strict=True)]
        page = self.page or (max(rows) + 2 if self.ring is None else self.window + self.ring)
        each = max(1, ceil(max(rows) / page))

        def draw(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        own = each if self.ring is None else 1
        pages = rng.permutation(requests * own).astype(np.int32).reshape(requests, own).repeat(each // own, axis=1)
        caches = np.full((2, requests * own, self.kv_heads, page, self.depth), np.nan, np.float32)
        for request, length in enumerate(self.lengths):
            # In a ring, what no window reaches any more may have been overwritten: NaN.
            seen = max(0, length - self.window + self.causal)
            for row in range(0 if self.ring is None else seen, length):
                caches[:, pages[request, row // page], :, row % page] = draw(2, self.kv_heads, self.depth)
        total = sum(self.blocks) + self.padding
        made = {
            "q": draw(total, self.heads, self.depth),
            "k": draw(total, self.kv_heads, self.depth),
            "v": draw(total, self.kv_heads, self.depth),
            "key_cache": caches[0],
            "value_cache": caches[1],
            "row_start": np.cumsum((0, *self.blocks)).astype(np.int32),
            "length": np.array(self.lengths, np.int32),
            "pages": pages,
        }
        if self.contexts is not None:
            made["context_k"] = draw(sum(contexts), self.kv_heads, self.depth)
            made["context_v"] = draw(sum(contexts), self.kv_heads, self.depth)
            made["context_start"] = np.cumsum((0, *contexts)).astype(np.int32)
        if self.sinks:
            made["sinks"] = draw(self.heads)
        return made


def block_attention(
    q, k, v, key_cache, value_cache, row_start, length, pages,
    context_k=None, context_v=None, context_start=None, sinks=None, *, causal, window, scale, softcap,
):  # fmt: skip
    """(out, key cache, value cache) in float64; plugins/README.md says the same in words."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    caches = [key_cache.astype(np.float64), value_cache.astype(np.float64)]
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    size = key_cache.shape[2]

    def put(request: int, row: int, values) -> None:
        for cache, value in zip(caches, values, strict=True):
            cache[pages[request, row // size], :, row % size] = value

    for request in range(len(length)):
        committed = int(length[request])
        if context_start is not None:
            for row in range(context_start[request], context_start[request + 1]):
                put(request, committed, (context_k[row], context_v[row]))
                committed += 1
        block = range(row_start[request], row_start[request + 1])
        for i, row in enumerate(block):
            first = 0
            if window:
                first = max(0, committed + i - window + 1 if causal else committed - window)
            seen_block = list(block)[: i + 1] if causal else list(block)
            if window and causal:
                seen_block = [b for b in seen_block if b - block[0] > i - window]
            at = [(pages[request, j // size], j % size) for j in range(first, committed)]
            for head in range(q.shape[1]):
                keys = [caches[0][p, head // group, c] for p, c in at] + [k[b, head // group] for b in seen_block]
                values = [caches[1][p, head // group, c] for p, c in at] + [v[b, head // group] for b in seen_block]
                scores = scale * np.array(keys) @ q[row, head]
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - scores.max()))
                out[row, head] = weights / total @ np.array(values)
        if causal:
            for i, row in enumerate(block):
                put(request, committed + i, (k[row], v[row]))
    return out, *caches


ATTENTION_CASES = (
    # The target: causal, the block is appended.
    AttentionCase("one row, empty cache", (1,), (0,)),
    AttentionCase("first prompt", (7,), (0,)),
    AttentionCase("verify", (6,), (40,)),
    AttentionCase("one row late", (1,), (33,)),
    AttentionCase("long chunk", (40,), (9,)),
    AttentionCase("no groups", (4,), (11,), heads=2, kv_heads=2),
    AttentionCase("groups of 3", (5,), (21,), heads=9, kv_heads=3, depth=16),
    AttentionCase("more rows than cached", (6,), (2,), heads=12, kv_heads=2),
    AttentionCase("window inside the block", (6,), (3,), window=4),
    AttentionCase("window over the cache", (3,), (30,), window=8),
    AttentionCase("window of 1", (3,), (5,), window=1),
    AttentionCase("window as long as all", (3,), (5,), window=8),
    AttentionCase("softcap", (5,), (17,), softcap=1.5),
    AttentionCase("softcap and window", (5,), (17,), softcap=0.5, window=6),
    AttentionCase("sinks", (6,), (40,), sinks=True),
    AttentionCase("sinks, one row, empty cache", (1,), (0,), sinks=True),
    AttentionCase("sinks, window", (3,), (30,), window=8, heads=9, kv_heads=3, sinks=True),
    AttentionCase("sinks, softcap", (5,), (17,), softcap=0.5, sinks=True),
    AttentionCase("sinks, ragged, paged, padding", (2, 0, 6), (7, 12, 3), page=4, padding=2, sinks=True),
    AttentionCase("ragged", (3, 1, 5), (4, 9, 0)),
    AttentionCase("ragged, paged", (2, 1, 6), (7, 12, 3), page=4),
    AttentionCase("a request without rows", (2, 0, 3), (4, 6, 1), page=4),
    AttentionCase("padding", (2, 3), (5, 1), padding=4),
    AttentionCase("padding, paged, window", (4, 1), (9, 6), page=4, padding=1, window=5, softcap=2.0),
    AttentionCase("ring, not full yet", (3,), (2,), window=8, ring=4),
    AttentionCase("ring, wraps in the block", (4,), (10,), window=8, ring=4),
    AttentionCase("ring, as many rows as it takes", (5,), (37,), window=8, ring=4),
    AttentionCase("ring, one row", (1,), (36,), window=8, ring=0),
    AttentionCase("ring, prompt longer than the window", (20,), (31,), window=3, ring=19, heads=9, kv_heads=3),
    AttentionCase("ring, long, softcap, sinks", (6,), (400,), window=70, ring=5, softcap=0.5, sinks=True),
    AttentionCase("rings, ragged, padding", (4, 0, 2, 1), (50, 21, 3, 19), window=5, ring=3, padding=2),
    # The drafter: not causal, context appended, the block is not.
    AttentionCase("draft, first", (5,), (0,), (3,), causal=False),
    AttentionCase("draft, long first context", (5,), (0,), (200,), causal=False),
    AttentionCase("draft, one context row", (5,), (31,), (1,), causal=False),
    AttentionCase("draft, no context row", (5,), (31,), (0,), causal=False),
    AttentionCase("draft, block 1", (1,), (12,), (2,), causal=False),
    AttentionCase("draft, block 2", (2,), (12,), (6,), causal=False, heads=9, kv_heads=3),
    AttentionCase("draft, block 7", (7,), (12,), (6,), causal=False, heads=9, kv_heads=3),
    AttentionCase("draft, block longer than context", (7,), (0,), (1,), causal=False, heads=12, kv_heads=2),
    AttentionCase("draft, window", (5,), (20,), (3,), causal=False, window=8),
    AttentionCase("draft, window inside new context", (5,), (20,), (9,), causal=False, window=4),
    AttentionCase("draft, window over all", (4,), (5,), (2,), causal=False, window=50),
    AttentionCase("draft, softcap", (4,), (5,), (2,), causal=False, softcap=1.0, window=3),
    AttentionCase("draft, ring", (5,), (43,), (3,), causal=False, window=8, ring=8),
    AttentionCase("draft, rings, more context than window", (5, 2), (43, 9), (7, 6), causal=False, window=4, ring=12),
    AttentionCase("draft, sinks", (5,), (31,), (2,), causal=False, heads=9, kv_heads=3, sinks=True),
    AttentionCase("draft, sinks, window", (5,), (20,), (3,), causal=False, window=8, sinks=True),
    AttentionCase("draft, ragged, sinks", (3, 3), (6, 0), (2, 5), causal=False, page=4, sinks=True),
    AttentionCase("draft, ragged", (3, 3, 3), (6, 0, 11), (2, 5, 1), causal=False, page=4),
    AttentionCase("draft, ragged, window, padding", (3, 2), (6, 9), (2, 1), causal=False, page=5, window=4, padding=2),
)


@dataclass(frozen=True)
class MarkovCase:
    """One call of MarkovArgmax."""

    name: str
    head: str
    requests: int = 2
    gamma: int = 5
    hidden: int = 12
    rank: int = 6
    vocab: int = 50
    draft_vocab: int | None = None  # None: the whole vocabulary
    confidence: bool = True
    with_markov: bool = True
    temperatures: tuple[float, ...] | None = None  # of the requests; None: no noise either

    def __str__(self) -> str:
        return self.name

    @property
    def attributes(self) -> dict:
        return {"head": self.head, "confidence_with_markov": self.confidence and self.with_markov}

    def inputs(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)

        def draw(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        drafted, rank, hidden = self.draft_vocab or self.vocab, self.rank, self.hidden
        made = {
            "base_logits": draw(self.requests, self.gamma, drafted),
            "anchors": rng.integers(self.vocab, size=self.requests),
            "hidden": draw(self.requests, self.gamma, hidden),
        }
        if self.head != "none":
            made |= {"w1": draw(self.vocab, rank), "w2": draw(drafted, rank)}
        if self.head == "gated":
            made |= {"head_weight": draw(rank, hidden + rank), "head_bias": draw(rank)}
        if self.head == "rnn":
            made |= {"head_weight": draw(3 * rank, 2 * rank + hidden), "head_bias": draw(3 * rank)}
        if self.confidence:
            width = hidden + (rank if self.with_markov else 0)
            made |= {"confidence_weight": draw(width) / 3, "confidence_bias": draw(1)}
        if self.draft_vocab:
            chosen = np.sort(rng.choice(self.vocab, drafted, replace=False))
            made["d2t"] = chosen - np.arange(drafted)
        if self.temperatures is not None:
            made["noise"] = rng.gumbel(size=(self.requests, self.gamma, drafted)).astype(np.float32)
            made["temperature"] = np.array(self.temperatures, np.float32)
            made["noise"][made["temperature"] == 0] = np.nan  # nobody reads it
        return made


def markov_argmax(
    base_logits, anchors, hidden, w1=None, w2=None, head_weight=None, head_bias=None,
    confidence_weight=None, confidence_bias=None, d2t=None, noise=None, temperature=None, *, head,
    confidence_with_markov,
):  # fmt: skip
    """(tokens int64, confidence, corrected logits) in float64, one request and one position after another."""
    requests, gamma, _ = base_logits.shape
    tokens = np.zeros((requests, gamma), np.int64)
    confidence, logits = np.ones((requests, gamma)), base_logits.astype(np.float64).copy()

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    for request in range(requests):
        previous = anchors[request]
        state = None if w1 is None else np.zeros(w1.shape[1])
        for k in range(gamma):
            h = hidden[request, k].astype(np.float64)
            e = embedding = None if w1 is None else w1[previous].astype(np.float64)
            if head == "gated":
                e = sigmoid(head_weight @ np.concatenate((h, embedding)) + head_bias) * embedding
            elif head == "rnn":
                joint = head_weight @ np.concatenate((state, embedding, h)) + head_bias
                gate, candidate, output = np.split(joint, 3)
                state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
                e = np.tanh(output)
            if head != "none":
                logits[request, k] += w2 @ e
            if confidence_weight is not None:
                x = np.concatenate((h, embedding)) if confidence_with_markov else h
                confidence[request, k] = sigmoid(confidence_weight @ x + confidence_bias[0])
            score = logits[request, k]
            if noise is not None and temperature[request] > 0:
                score = score / np.float64(temperature[request]) + noise[request, k]
            chosen = int(np.argmax(score))
            previous = tokens[request, k] = chosen + (0 if d2t is None else d2t[chosen])
    return tokens, confidence, logits


MARKOV_CASES = (
    MarkovCase("vanilla", "vanilla"),
    MarkovCase("gated", "gated"),
    MarkovCase("rnn", "rnn"),
    MarkovCase("none", "none", with_markov=False),
    MarkovCase("none, no confidence", "none", confidence=False),
    MarkovCase("vanilla, no confidence", "vanilla", confidence=False),
    MarkovCase("gated, confidence without markov", "gated", with_markov=False),
    MarkovCase("rnn, reduced vocabulary", "rnn", draft_vocab=17),
    MarkovCase("vanilla, reduced vocabulary", "vanilla", draft_vocab=23),
    MarkovCase("none, reduced vocabulary", "none", draft_vocab=23, with_markov=False),
    MarkovCase("one request, one position", "rnn", requests=1, gamma=1),
    MarkovCase("one request, seven positions", "gated", requests=1, gamma=7),
    MarkovCase("many requests", "vanilla", requests=9, gamma=2),
    MarkovCase("drawn", "vanilla", temperatures=(0.7, 1.5)),
    MarkovCase("drawn, gated", "gated", temperatures=(1.0, 0.4)),
    MarkovCase("drawn, rnn, reduced vocabulary", "rnn", draft_vocab=17, temperatures=(1.0, 2.0)),
    MarkovCase("drawn, none", "none", with_markov=False, temperatures=(1.0, 2.0)),
    MarkovCase("drawn, no confidence", "vanilla", confidence=False, requests=1, temperatures=(0.9,)),
    MarkovCase("drawn and greedy", "rnn", requests=3, temperatures=(0.0, 1.3, 0.0)),
    MarkovCase("greedy beside noise", "vanilla", requests=1, gamma=7, temperatures=(0.0,)),
    MarkovCase("greedy beside noise, many", "none", confidence=False, draft_vocab=23, temperatures=(0.0, 0.0)),
)

"""The host's own work in a round at a large vocabulary: verify, commit and sampling, beside the plain sampler's.

Fake engines answer at once with logits shaped like a language model's (a few likely tokens over a broad bulk), so that
what is left is this project's Python and numpy. Rounds of plain decoding and of every rule take turns in one run.

    python benchmarks/sampling_overhead.py [--vocab 151936] [--draft-len 7] [--top-p 0.9] [--rounds 40]
"""

import argparse
import statistics
import time

import numpy as np

from dspark.manifest import Confidence, Drafter, Markov, Tensor
from dspark.runtime.draft import Drafter as DraftStage
from dspark.runtime.loop import Rules, decode_round
from dspark.runtime.random import Streams
from dspark.runtime.sampling import Sampling
from dspark.runtime.schedule import FullBlock
from dspark.runtime.target import Target
from dspark.runtime.verify import DraftVocabulary, Draws, Judge

LIMIT = 10**9
TAPS = 8
PLAIN = "plain sampler, a token"


class Engine:
    """Gives out the same arrays in every run; counts no time."""

    inputs = {name: Tensor(name, "float32", ("Tc", TAPS)) for name in ("taps", "noise")}
    capacity, most_rows, slots, seconds = LIMIT, None, 0, 0.0

    def __init__(self, outputs: dict[str, np.ndarray]):
        self.outputs = outputs
        self.owners: dict[int, object] = {}

    def run(self, inputs, fetch):
        return {name: self.outputs[name] for name in fetch}

    def keep(self, rows):
        pass


def logits_like_a_models(rows: int, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """fp32 [rows, vocab]: a bulk of standard deviation 2, 40 tokens that reach up to 18, and one at 22."""
    logits = (2 * rng.standard_normal((rows, vocab))).astype(np.float32)
    for row in logits:
        likely = rng.choice(vocab, 41, replace=False)
        row[likely] = np.append(np.linspace(8, 18, 40), 22)
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--draft-len", type=int, default=7)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    size, vocab = args.draft_len, args.vocab
    logits = logits_like_a_models(size + 1, vocab, rng)
    sampling = Sampling(args.temperature, top_p=args.top_p)
    spec = Drafter(size, "anchor-first", (0,), 1, Markov("none", 0), Confidence(False, False), vocab, ())
    taps = np.zeros((size + 1, TAPS), np.float32)
    # Drafts as a perfect drafter's: whatever is judged by its argmax is accepted, so that every row is looked at.
    drafter_outputs = {"draft_tokens": logits[:size].argmax(-1)[None], "draft_logits": logits[None, :size]}

    def setting(rule: str, temperature: float, draft_temperature: float, plain: bool = False):
        chosen = sampling if temperature else Sampling()
        judge = Judge(chosen, rule, Draws(Streams(1)), DraftVocabulary(vocab), [], draft_temperature=draft_temperature)
        target = Target(Engine({"logits": logits, "taps": taps}), LIMIT)  # type: ignore[arg-type]
        drafter = DraftStage(Engine(drafter_outputs), spec, LIMIT)  # type: ignore[arg-type]
        drafter.observe(taps[:1])
        target.length = 1
        rules = Rules(size, FullBlock(), judge, frozenset(), lambda token: False, False)
        counter = iter(range(LIMIT))
        return lambda: decode_round(target, None if plain else drafter, 0, size, rules, next(counter))

    t = args.temperature
    settings = {
        PLAIN: setting("exact", t, 0, plain=True),
        "plain sampler, coupled": setting("coupled", t, 0, plain=True),
        "greedy": setting("exact", 0, 0),
        "exact, argmax drafts": setting("exact", t, 0),
        "exact, drawn drafts": setting("exact", t, t),
        "coupled, argmax drafts": setting("coupled", t, 0),
        "coupled, drawn drafts": setting("coupled", t, t),
    }
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in settings}
    for turn in range(args.rounds + 3):
        for name, run in settings.items():
            started = time.perf_counter()
            done = run()
            total = (time.perf_counter() - started) * 1e3
            if turn >= 3:
                found[name].append((total - done.draft_ms, done.draft_ms, done.accepted + 1))
    print(f"V {vocab:,}, {size} drafts, top-p {args.top_p:g}, temperature {t:g}; ms a round, medians of {args.rounds}")
    print("beyond plain: verify + commit, less what the plain sampler takes for as many tokens as the round returns")
    print(f"{'':26} {'verify + commit':>16} {'beyond plain':>13} {'draft noise':>12} {'tokens':>7}")
    one = statistics.median(row[0] for row in found[PLAIN])
    for name, rows in found.items():
        verify, draft, tokens = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:26} {verify:16.2f} {verify - tokens * one:13.2f} {draft:12.2f} {tokens:7.0f}")


if __name__ == "__main__":
    main()

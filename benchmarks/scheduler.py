"""What the throughput schedulers cost: the host's work in a step, for a batch of requests.

Confidences are random, SPS falls in steps of 64 tokens. The best of many runs, since the machine may be busy.

    python benchmarks/scheduler.py [--requests 256] [--draft-len 7] [--repeats 3000]
"""

import argparse
import time

import numpy as np

from dspark.manifest import Calibration
from dspark.runtime.throughput import SpsTable, Throughput, ThroughputAsync, ThroughputGlobal

BUDGET = 150  # microseconds


def speeds(most: int) -> SpsTable:
    """Constant up to 256 tokens, then time grows in proportion, a tile of 64 tokens at a time."""
    sizes = range(64, most + 64, 64)
    return SpsTable(tuple(sizes), tuple(50 / (1 + max(0, size - 256) / 512) for size in sizes))


def best_of(repeats: int, run) -> float:
    """Microseconds."""
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--draft-len", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3000)
    args = parser.parse_args()
    rng, shape = np.random.default_rng(0), (args.requests, args.draft_len)
    confidence, drafted = rng.beta(6, 1.2, shape).astype(np.float32), np.full(args.requests, args.draft_len)
    requests, table = np.arange(args.requests), speeds(args.requests * (args.draft_len + 1))
    temperatures, shifts = (1.5,) * args.draft_len, (-0.5,) * args.draft_len
    calibration = Calibration(temperatures, rounds=0, prompts=0, temperature=0.0, shifts=shifts)
    print(f"{args.requests} requests, {args.draft_len} drafts; microseconds a step, best of {args.repeats}")
    print(f"{'':20} {'as they are':>12} {'calibrated':>12} {'verified':>10}")
    worst = 0.0
    for kind in (Throughput, ThroughputAsync, ThroughputGlobal):
        found, verified = [], 0.0
        for worth in (None, calibration):
            scheduler = kind(table, worth)
            found.append(best_of(args.repeats, lambda s=scheduler: s.lengths(confidence, drafted, requests)))
            verified = verified or scheduler.lengths(confidence, drafted, requests).mean()
        worst = max(worst, *found)
        print(f"{kind.__name__:20} {found[0]:12.0f} {found[1]:12.0f} {verified:10.2f}")
    print(f"the budget of {BUDGET} microseconds is {'kept' if worst <= BUDGET else 'broken'}")


if __name__ == "__main__":
    main()

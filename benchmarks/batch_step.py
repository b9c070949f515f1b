"""What a step of many requests costs against as many steps of one request, side by side in one run.

    python benchmarks/batch_step.py --bundle engines/demo

A point is REQUESTSxROWS@COMMITTED. For each, prints milliseconds of one step in the batch form and of a step for each
request in the one-request form (medians), tokens per second in both, and their ratio (median of the pairs, and of the
fastest of each). The K/V rows before the step are left as the engine made them: their values do not change the work.
"""

import argparse
import re
import time
from pathlib import Path

import numpy as np

from dspark.runtime.bundle import open_bundle
from dspark.runtime.engines.onnxruntime import OnnxRuntimeEngine

POINTS = ["8x1@200", "8x4@200", "8x8@200", "1x1@200", "1x8@200", "16x1@200", "16x8@200", "32x1@200", "8x1@1000"]
POINTS += ["8x8@1000"]
FETCH = ("logits", "taps")


def inputs_of(places: np.ndarray, rows: int, committed: int) -> dict[str, np.ndarray]:
    """A target's step in which the requests at these places bring as many rows each."""
    count = len(places)
    return {
        "tokens": np.ones(count * rows, np.int64),
        "positions": np.tile(np.arange(committed, committed + rows), count),
        "row_start": np.arange(count + 1, dtype=np.int32) * rows,
        "length": np.full(count, committed, np.int32),
        "pages": places[:, None].astype(np.int32),
        "logit_rows": np.arange(count * rows),
    }


def measure(many: OnnxRuntimeEngine, one: OnnxRuntimeEngine, point: tuple[int, int, int], repeats: int) -> str:
    """The line of one point. The two take turns, so that a slow minute hits both alike."""
    requests, rows, committed = point
    draw, single = np.random.default_rng(0), inputs_of(np.zeros(1), rows, committed)
    times = np.empty((2, repeats + 2))
    for repeat in range(repeats + 2):
        batch = inputs_of(draw.permutation(many.requests)[:requests], rows, committed)
        for i, (engine, inputs, runs) in enumerate(((many, batch, 1), (one, single, requests))):
            began = time.perf_counter()
            for _ in range(runs):
                engine.run(inputs, FETCH)
            times[i, repeat] = time.perf_counter() - began
    times, tokens = times[:, 2:], requests * rows
    batch_s, single_s = np.median(times, axis=1)
    ratio, fastest = np.median(times[1] / times[0]), times[1].min() / times[0].min()
    return (
        f"{requests:3} requests x {rows} rows, {committed:5} committed:"
        f"  one step {batch_s * 1e3:7.1f} ms, {tokens / batch_s:6.0f} tok/s;"
        f"  {requests:2} steps {single_s * 1e3:7.1f} ms, {tokens / single_s:6.0f} tok/s;"
        f"  ratio {ratio:.2f}, of the fastest {fastest:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--points", nargs="+", default=POINTS, metavar="REQUESTSxROWS@COMMITTED")
    parser.add_argument("--capacity", type=int, default=2048, help="cache rows of every request")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    points = [tuple(map(int, re.split("[x@]", point))) for point in args.points]
    bundle, most = open_bundle(args.bundle), max(2, *(requests for requests, _, _ in points))
    one, many = (OnnxRuntimeEngine(bundle, "target", args.capacity, args.threads, requests=n) for n in (1, most))
    for requests, rows, committed in points:
        print(measure(many, one, (requests, rows, committed), args.repeats), flush=True)


if __name__ == "__main__":
    main()

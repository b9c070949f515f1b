"""What a verify step costs at a short and a long context and at two capacities, side by side in one run.

    python benchmarks/step_cost.py --bundle engines/demo

Prints milliseconds per step (median) and ratios. The K/V rows before the step are left as the engine made them: their
values do not change the work.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from dspark.runtime.bundle import open_bundle
from dspark.runtime.engines.onnxruntime import OnnxRuntimeEngine
from dspark.runtime.target import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 6, 8])
    parser.add_argument("--long-rows", type=int, default=6, help="rows of the step measured at every context length")
    parser.add_argument("--contexts", type=int, nargs="+", default=[250, 3500])
    parser.add_argument("--capacities", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    bundle = open_bundle(args.bundle)
    targets = {c: Target(OnnxRuntimeEngine(bundle, "target", c, args.threads), c) for c in args.capacities}
    points = [(rows, args.contexts[0], args.capacities[0]) for rows in args.rows]
    points += [(args.long_rows, context, c) for context in args.contexts for c in args.capacities]
    times: dict[tuple[int, int, int], list[float]] = {point: [] for point in points}
    for repeat in range(args.repeats + 2):
        for point in times:  # in turn, so that a slow minute hits all alike
            rows, context, capacity = point
            target = targets[capacity]
            target.length = context
            began = time.perf_counter()
            target.forward([1] * rows, np.arange(rows), taps=True)
            if repeat >= 2:
                times[point].append(time.perf_counter() - began)
    ms = {point: statistics.median(values) * 1e3 for point, values in times.items()}
    for (rows, context, capacity), value in ms.items():
        print(f"rows {rows:3}  committed {context:5}  capacity {capacity:5}  {value:7.2f} ms")
    short, long = args.contexts[0], args.contexts[-1]
    small, large = args.capacities[0], args.capacities[-1]
    ratios = {
        f"{args.long_rows} rows, {long} committed : {short} committed": ms[args.long_rows, long, small]
        / ms[args.long_rows, short, small],
        f"{args.long_rows} rows, capacity {large} : {small}": ms[args.long_rows, short, large]
        / ms[args.long_rows, short, small],
    }
    print(json.dumps(ratios, indent=2))


if __name__ == "__main__":
    main()

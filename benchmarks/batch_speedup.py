"""How much faster a batch answers than one request at a time does: the same prompts, the same texts.

One at a time runs on the engines for one request, the batch on those for many, by turns in one process. Speculative
decoding has the bundle's throughput scheduler where both engines have a profile (`dspark profile`, alone and with
`--max-batch-size`), else the full block. Prompts are read within the time.

    python benchmarks/batch_speedup.py --bundle engines/demo [--requests 8] [--max-new-tokens 64] [--repeats 2]
"""

import argparse
import statistics
import time
from importlib import resources
from pathlib import Path

from dspark.runtime import load
from dspark.tools.measure import encode_prompts
from dspark.tools.prompts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    one, many = load(args.bundle), load(args.bundle, max_batch_size=args.requests)
    scheduler = "throughput" if one.sps is not None and many.sps is not None else "off"
    file = Path(str(resources.files("dspark.demo") / "prompts" / "heldout.jsonl"))
    each = -(-args.requests // 2)
    prompts = [prompt.tokens for prompt in encode_prompts(read_prompts(file), one, each)][: args.requests]
    options = {"max_new_tokens": args.max_new_tokens, "ignore_eos": True}
    print(f"{args.requests} requests, {args.max_new_tokens} tokens each, scheduler {scheduler}; seconds, by repetition")
    for mode in ("plain", "speculative"):
        alone, batched, same = [], [], True
        for _ in range(args.repeats):
            began = time.perf_counter()
            expected = [one.generate(p, mode=mode, scheduler=scheduler, **options).token_ids for p in prompts]
            alone.append(time.perf_counter() - began)
            began = time.perf_counter()
            found = many.batch(scheduler).generate(prompts, mode=mode, **options)
            batched.append(time.perf_counter() - began)
            same = same and [generation.token_ids for generation in found] == expected
        ratio = statistics.median(a / b for a, b in zip(alone, batched, strict=True))
        times = [" ".join(f"{seconds:.2f}" for seconds in times) for times in (alone, batched)]
        text = "equal" if same else "NOT equal"
        print(f"{mode:12} one at a time {times[0]}   in a batch {times[1]}   ratio {ratio:.2f}   texts {text}")


if __name__ == "__main__":
    main()

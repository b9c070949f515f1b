"""`dspark bench`: speculative and plain decoding in one run, side by side, texts compared."""

import argparse
import json
import sys


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="compare speculative with plain decoding",
        description="Decode prompts speculatively and plainly in turn; compare speed and text. Exit 1 if nothing was "
        "drafted, or if a text differs from the plain one where the target was not undecided.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that dspark-export wrote")
    parser.add_argument(
        "--prompts", metavar="FILE", help='JSON lines {"id", "kind", "prompt"}; default: the demo\'s held-out prompts'
    )
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--confidence-threshold",
        type=float,
        action="append",
        default=[],
        metavar="θ",
        help="besides the full block, also measure this threshold; may be given several times",
    )
    parser.add_argument("--draft-len", type=int, metavar="N", help="drafts per round; default: the bundle's")
    parser.add_argument(
        "--backend",
        default="onnxruntime",
        metavar="NAME",
        help="onnxruntime (default, CPU), tensorrt or tensorrt-rtx",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per core")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from importlib import resources
    from pathlib import Path

    from dspark.errors import DSparkError, UsageError
    from dspark.runtime import load
    from dspark.tools import measure as m
    from dspark.tools.prompts import read_prompts

    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit {args.limit}: must be at least 1")
    decoder = load(args.bundle, backend=args.backend, threads=args.threads)
    file = args.prompts or str(resources.files("dspark.demo") / "prompts" / "heldout.jsonl")
    prompts = m.encode_prompts(read_prompts(Path(file)), decoder, args.limit)
    settings = [m.Setting(m.PLAIN, {"mode": "plain"}), m.Setting("full block", {"draft_len": args.draft_len})]
    for threshold in args.confidence_threshold:
        options = {"draft_len": args.draft_len, "confidence_threshold": threshold}
        settings.append(m.Setting(f"threshold {threshold:g}", options))

    runs: list = []

    def progress(done) -> None:
        runs.append(done)
        count = f"[{len(runs)}/{len(prompts) * len(settings)}]"
        rate = f"{done.generation.stats.tokens_per_second:6.1f} tokens/s"
        print(f"{count} {done.prompt.id:14} {done.setting.name:14} {rate}", file=sys.stderr)

    m.measure(decoder, prompts, settings, args.max_new_tokens, progress)
    report = {
        "bundle": str(args.bundle),
        "prompts": file,
        "max_new_tokens": args.max_new_tokens,
        "backend": args.backend,
        "threads": args.threads,
        **m.report(decoder, runs),
    }
    for warning in report["warnings"]:
        print(f"dspark bench: warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        for line in _lines(report):
            print(line)
    return DSparkError.exit_code if any(not d["near_tie"] for d in report["differences"]) else 0


def _lines(report: dict):
    header = f"{'setting':16} {'kind':8} {'tokens/s':>9} {'ratio':>6} {'tokens/round':>13} {'draft ms':>9}"
    yield f"{header} {'verify ms':>10} {'outside':>8}  acceptance per position"
    for name, kinds in report["settings"].items():
        for kind, f in kinds.items():
            positions = " ".join("-" if a is None else f"{a:.2f}" for a in f["acceptance_per_position"])
            yield (
                f"{name:16} {kind:8} {f['tokens_per_second']:9.1f} {f['ratio_to_plain']:6.2f} "
                f"{_number(f['acceptance_length'], '13.2f')} {_number(f['draft_ms_per_round'], '9.2f')} "
                f"{_number(f['verify_ms_per_round'], '10.2f')} {_number(f['outside_share'], '8.1%')}  {positions}"
            )
    count = len(report["differences"])
    same = f"{count} texts differ from the plain ones" if count else "every text equals the plain one"
    yield f"{same}; ratio: tokens/s over plain decoding's, prefill included"


def _number(value: float | None, form: str) -> str:
    return format("-", ">" + form.split(".")[0]) if value is None else format(value, form)

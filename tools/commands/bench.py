"""`dspark bench`: speculative and plain decoding in one run, side by side, texts compared."""

import argparse
import json
import sys

from dspark.tools.options import THROUGHPUT, add_engine, add_sampling, sampling_options


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
    parser.add_argument(
        "--scheduler",
        choices=THROUGHPUT,
        action="append",
        default=[],
        help="also measure this scheduler (docs/scheduling.md); may be given several times",
    )
    parser.add_argument("--draft-len", type=int, metavar="N", help="drafts per round; default: the bundle's")
    add_sampling(parser)
    parser.add_argument(
        "--sampling",
        choices=("exact", "coupled", "opportunistic"),
        action="append",
        default=[],
        help="at a temperature above 0: rule to measure, may be given several times; default: coupled",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="print for every answer what its rounds saved, and where it first differs from plain decoding",
    )
    add_engine(parser)
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
    sampling = sampling_options(args)
    if sampling.get("temperature"):
        sampling.setdefault("seed", 0)
    settings = _settings(args, sampling)

    runs: list = []

    def progress(done) -> None:
        runs.append(done)
        count = f"[{len(runs)}/{len(prompts) * len(settings)}]"
        rate = f"{done.generation.stats.tokens_per_second:6.1f} tokens/s"
        print(f"{count} {done.prompt.id:14} {done.setting.name:24} {rate}", file=sys.stderr)

    m.measure(decoder, prompts, settings, args.max_new_tokens, progress)
    report = {
        "bundle": str(args.bundle),
        "prompts": file,
        "max_new_tokens": args.max_new_tokens,
        "backend": args.backend,
        "threads": args.threads,
        "sampling": sampling,
        **m.report(decoder, runs),
    }
    for warning in report["warnings"]:
        print(f"dspark bench: warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        for line in _lines(report):
            print(line)
        for line in _comparisons(report) if args.compare else ():
            print(line)
    return DSparkError.exit_code if any(not d["near_tie"] for d in report["differences"]) else 0


def _settings(args: argparse.Namespace, sampling: dict) -> list:
    """Plain decoding first, then every rule with its default, the full block, every threshold and every scheduler."""
    from dspark.errors import UsageError
    from dspark.tools import measure as m

    if args.sampling and not sampling.get("temperature"):
        raise UsageError(f"--sampling {args.sampling[0]}: needs a --temperature above 0")
    if not sampling.get("temperature"):
        rules: dict[str, dict] = {"": {}}  # whose default is the full block
    else:
        rules = {rule: {"sampling": rule} for rule in args.sampling or ["coupled"]}
    plain = {name: value for name, value in sampling.items() if name != "draft_temperature"}
    settings = [m.Setting(m.PLAIN, {"mode": "plain", "sampling": "coupled", **plain})]
    for rule, fields in rules.items():
        options = {"draft_len": args.draft_len, **sampling, **fields}
        schedules: dict[str, dict] = {} if rule in ("", "opportunistic") else {"": {}}
        schedules["full block"] = {"scheduler": "off"}
        schedules |= {f"threshold {t:g}": {"confidence_threshold": t} for t in args.confidence_threshold}
        schedules |= {name: {"scheduler": name} for name in args.scheduler}
        for schedule, more in schedules.items():
            name = f"{rule} {schedule}".strip()
            settings.append(m.Setting(name, {**options, **more}, comparable=rule in ("", "coupled")))
    return settings


def _comparisons(report: dict):
    from dspark.tools.measure import short

    yield f"{'prompt':16} {'setting':24} {'full':>5} {'partial':>8} {'replay':>7} {'saved':>6}  text"
    for c in report["comparisons"]:
        same = {None: "drawn otherwise", True: "equal"}.get(c["output_match"])
        text = same or f"differs at token {c['first_difference']}, gap {short(c['gap'])}"
        yield (
            f"{c['prompt']:16} {c['setting']:24} {c['direct_full_commits']:5} {c['direct_partial_commits']:8}"
            f" {c['replay_fallbacks']:7} {c['net_saved']:6}  {text}"
        )


def _lines(report: dict):
    header = f"{'setting':24} {'kind':8} {'tokens/s':>9} {'ratio':>6} {'tokens/round':>13} {'draft ms':>9}"
    yield f"{header} {'verify ms':>10} {'outside':>8}  acceptance per position"
    for name, kinds in report["settings"].items():
        for kind, f in kinds.items():
            positions = " ".join("-" if a is None else f"{a:.2f}" for a in f["acceptance_per_position"])
            yield (
                f"{name:24} {kind:8} {f['tokens_per_second']:9.1f} {f['ratio_to_plain']:6.2f} "
                f"{_number(f['acceptance_length'], '13.2f')} {_number(f['draft_ms_per_round'], '9.2f')} "
                f"{_number(f['verify_ms_per_round'], '10.2f')} {_number(f['outside_share'], '8.1%')}  {positions}"
            )
    count = len(report["differences"])
    drawn = any(c["output_match"] is None for c in report["comparisons"])
    same = f"{count} texts differ from the plain ones" if count else "every text equals the plain one"
    if drawn:
        same += " where the rule says that it must"
    if "seed" in report["sampling"]:
        same += f"; seed {report['sampling']['seed']}"
    yield f"{same}; ratio: tokens/s over plain decoding's, prefill included"


def _number(value: float | None, form: str) -> str:
    return format("-", ">" + form.split(".")[0]) if value is None else format(value, form)

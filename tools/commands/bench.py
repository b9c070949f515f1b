"""`dspark bench`: speculative and plain decoding in one run, side by side, texts compared."""

import argparse
import json
import sys
from collections.abc import Iterable

from dspark.tools.options import THROUGHPUT, add_engine, add_sampling, sampling_options


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="compare speculative with plain decoding",
        description="Decode prompts speculatively and plainly in turn; compare speed and text. Exit 1 if nothing was "
        "drafted, or if a text differs from the plain one where the target was not undecided. With --concurrency many "
        "requests at once, in a continuous batch.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that dspark-export wrote")
    parser.add_argument(
        "--prompts", metavar="FILE", help='JSON lines {"id", "kind", "prompt"}; default: the demo\'s held-out prompts'
    )
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N prompts of each kind")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default 128; with --concurrency 64")
    parser.add_argument(
        "--confidence-threshold",
        type=float,
        action="append",
        default=[],
        metavar="θ",
        help="besides the full block, also measure this threshold; may be given several times; with --concurrency "
        "the default is 0.4",
    )
    parser.add_argument(
        "--scheduler",
        choices=("none", *THROUGHPUT),
        action="append",
        default=[],
        help="also measure this scheduler (docs/scheduling.md); may be given several times; with --concurrency the "
        "default is throughput, and none leaves it out",
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
    parser.add_argument(
        "--concurrency",
        metavar="N,N,..",
        help="measure with so many requests at once, each number by turns: 1,2,4,8,16,32",
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="of every measurement with --concurrency (default 2)")
    parser.add_argument("--out", metavar="DIR", help="with --concurrency: new folder for concurrency.json and diagrams")
    add_engine(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from dspark.errors import UsageError

    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit {args.limit}: must be at least 1")
    if args.concurrency is not None:
        return _run_concurrent(args)
    for name in ("repeats", "out"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name}: is for --concurrency")
    return _run_one_by_one(args)


def _run_one_by_one(args: argparse.Namespace) -> int:
    from dspark.runtime import load
    from dspark.tools import measure as m

    decoder = load(args.bundle, backend=args.backend, threads=args.threads)
    file, prompts = _prompts(args, decoder)
    max_new_tokens = 128 if args.max_new_tokens is None else args.max_new_tokens
    sampling = _sampling(args)
    settings = _settings(args, sampling, args.confidence_threshold, args.scheduler)

    runs: list = []

    def progress(done) -> None:
        runs.append(done)
        count = f"[{len(runs)}/{len(prompts) * len(settings)}]"
        rate = f"{done.generation.stats.tokens_per_second:6.1f} tokens/s"
        print(f"{count} {done.prompt.id:14} {done.setting.name:24} {rate}", file=sys.stderr)

    m.measure(decoder, prompts, settings, max_new_tokens, progress)
    report = {**_described(args, file, max_new_tokens, sampling), **m.report(decoder, runs)}
    _print(args, report, [*_lines(report), *(_comparisons(report) if args.compare else ())])
    return _exit_code(report)


def _run_concurrent(args: argparse.Namespace) -> int:
    import contextlib
    from pathlib import Path

    from dspark.errors import UsageError
    from dspark.export.bundle import building
    from dspark.runtime import load
    from dspark.tools import concurrency as c
    from dspark.tools import frontier

    if args.compare:
        raise UsageError("--compare: is for one request at a time; drop it or --concurrency")
    try:
        concurrencies = [int(number) for number in args.concurrency.split(",")]
    except ValueError as error:
        raise UsageError(f"--concurrency {args.concurrency!r}: give numbers with commas between them") from error
    repeats = c.REPEATS if args.repeats is None else args.repeats
    c.check(concurrencies, repeats)
    max_new_tokens = c.MAX_NEW_TOKENS if args.max_new_tokens is None else args.max_new_tokens
    sampling, most = _sampling(args), max(concurrencies)
    decoder = load(args.bundle, backend=args.backend, threads=args.threads, max_batch_size=most)
    thresholds, schedulers = args.confidence_threshold, args.scheduler
    if decoder.manifest.drafter.confidence.enabled:
        thresholds, schedulers = thresholds or [c.THRESHOLD], schedulers or ["throughput"]
    if decoder.sps is None and any(name != "none" for name in schedulers):
        raise UsageError(f"{decoder.no_sps}; or leave those schedulers out: --scheduler none")
    file, prompts = _prompts(args, decoder)
    settings = _settings(args, sampling, thresholds, schedulers)

    done: list = []

    def progress(measured) -> None:
        done.append(measured)
        count = f"[{len(done)}/{len(concurrencies) * len(settings) * repeats}]"
        rate = f"{measured.window.tokens_per_second:7.1f} tokens/s"
        print(f"{count} {measured.concurrency:4} at once  {measured.setting.name:24} {rate}", file=sys.stderr)

    with contextlib.ExitStack() as stack:
        aside = stack.enter_context(building(Path(args.out))) if args.out else None
        c.measure(decoder, prompts, concurrencies, settings, max_new_tokens, repeats, progress)
        described = {**_described(args, file, max_new_tokens, sampling), "repeats": repeats, "max_batch_size": most}
        report = {**described, **c.report(decoder, done)}
        if aside is not None:
            (aside / "concurrency.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            try:
                frontier.draw(report["points"], aside)
            except ModuleNotFoundError:
                print(f"dspark bench: {frontier.MISSING}", file=sys.stderr)
    _print(args, report, _points(report))
    return _exit_code(report)


def _prompts(args: argparse.Namespace, decoder) -> tuple[str, list]:
    """(their file, the prompts)"""
    from importlib import resources
    from pathlib import Path

    from dspark.tools.measure import encode_prompts
    from dspark.tools.prompts import read_prompts

    file = args.prompts or str(resources.files("dspark.demo") / "prompts" / "heldout.jsonl")
    return file, encode_prompts(read_prompts(Path(file)), decoder, args.limit)


def _sampling(args: argparse.Namespace) -> dict:
    sampling = sampling_options(args)
    if sampling.get("temperature"):
        sampling.setdefault("seed", 0)
    return sampling


def _described(args: argparse.Namespace, file: str, max_new_tokens: int, sampling: dict) -> dict:
    """What was measured."""
    return {
        "bundle": str(args.bundle),
        "prompts": file,
        "max_new_tokens": max_new_tokens,
        "backend": args.backend,
        "threads": args.threads,
        "sampling": sampling,
    }


def _print(args: argparse.Namespace, report: dict, lines: Iterable[str]) -> None:
    for warning in report["warnings"]:
        print(f"dspark bench: warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        for line in lines:
            print(line)


def _exit_code(report: dict) -> int:
    from dspark.errors import DSparkError

    return DSparkError.exit_code if any(not d["near_tie"] for d in report["differences"]) else 0


def _settings(args: argparse.Namespace, sampling: dict, thresholds: Iterable[float], schedulers: Iterable[str]) -> list:
    """Plain decoding first, then every rule with its default (which a batch has not), the full block, every threshold
    and every scheduler."""
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
        schedules: dict[str, dict] = {} if rule in ("", "opportunistic") or args.concurrency else {"": {}}
        schedules["full block"] = {"scheduler": "off"}
        schedules |= {f"threshold {t:g}": {"confidence_threshold": t} for t in thresholds}
        schedules |= {name: {"scheduler": name} for name in schedulers if name != "none"}
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


def _points(report: dict):
    head = f"{'at once':>7} {'setting':24} {'tokens/s':>9} {'ratio':>6} {'by repeat':>11} {'per user':>9}"
    yield f"{head} {'verified/round':>15} {'tokens/round':>13} {'accepted':>9} {'drafting':>9}"
    for p in report["points"]:
        spread = f"{min(p['ratios']):.2f}..{max(p['ratios']):.2f}"
        yield (
            f"{p['concurrency']:7} {p['setting']:24} {p['tokens_per_second']:9.1f} {p['ratio_to_plain']:6.2f} "
            f"{spread:>11} "
            f"{_number(p['tokens_per_second_per_user'], '9.1f')} {_number(p['verified_per_round'], '15.2f')} "
            f"{_number(p['tokens_per_round'], '13.2f')} {_number(p['accept_rate'], '9.1%')} "
            f"{_number(p['drafting_share'], '9.1%')}"
        )
    count = len(report["differences"])
    same = f"{count} texts differ from the plain ones" if count else "every text that has to equals the plain one"
    yield f"{same}; ratio: tokens/s over plain decoding's with as many requests, prompts read meanwhile included"


def _number(value: float | None, form: str) -> str:
    return format("-", ">" + form.split(".")[0]) if value is None else format(value, form)

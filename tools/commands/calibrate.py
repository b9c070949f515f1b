"""`dspark calibrate`: make a drafter's confidences agree with how often its drafts are accepted."""

import argparse
import json
import sys

from dspark.tools.options import add_engine


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "calibrate",
        help="fit the confidences to what is accepted",
        description="Answer prompts with the full block, and fit a temperature and a shift per draft position so that "
        "the confidences agree with how often drafts are accepted. The bundle keeps them, in the place of older ones. "
        "The report is about prompts that nothing was fitted on.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that dspark-export wrote")
    parser.add_argument("--prompts", required=True, metavar="FILE", help='JSON lines {"id", "kind", "prompt"}')
    parser.add_argument("--limit", type=int, metavar="N", help="use N of the prompts, drawn at random by --seed")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--holdout",
        type=float,
        default=0.3,
        metavar="FRACTION",
        help="of the prompts, to report on and not to fit on (default %(default)s)",
    )
    parser.add_argument(
        "--holdout-prompts", metavar="FILE", help="report on these prompts instead, and fit on all of --prompts"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="above 0: decode by the sampling rule exact at this temperature (default 0: greedily)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice of prompts (default 0)")
    parser.add_argument(
        "--out", metavar="DIR", help="also write calibration.json and a reliability diagram into this new folder"
    )
    add_engine(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    import contextlib
    from pathlib import Path

    from dspark.errors import UsageError
    from dspark.export.bundle import amend_manifest, building, check_writable
    from dspark.manifest import Calibration
    from dspark.runtime import load
    from dspark.tools import calibration, reliability
    from dspark.tools.outcomes import collect, join

    folder = Path(args.bundle)
    decoder = load(folder, backend=args.backend, threads=args.threads)
    if not decoder.manifest.drafter.confidence.enabled:
        raise UsageError(f"bundle {folder}: its drafter has no confidence head, so there is nothing to calibrate")
    fitted, held_out = _prompts(args, decoder)
    total = len(fitted) + len(held_out)

    def progress(prompts: int, rounds: int) -> None:
        print(f"[{prompts}/{total}] {rounds} rounds", file=sys.stderr)

    with contextlib.ExitStack() as stack:
        check_writable(folder)
        aside = stack.enter_context(building(Path(args.out))) if args.out else None
        parts = collect(decoder, [*fitted, *held_out], args.max_new_tokens, args.temperature, progress)
        ours, others = join(parts[: len(fitted)]), join(parts[len(fitted) :])
        _check_rounds(ours, others)
        scaling = calibration.fit(ours)
        report = {
            "bundle": str(folder.absolute()),
            "prompts": args.prompts,
            "holdout_prompts": args.holdout_prompts,
            "max_new_tokens": args.max_new_tokens,
            "temperature": args.temperature,
            "fitted_on": {"prompts": len(fitted), "rounds": len(ours)},
            "held_out": {"prompts": len(held_out), "rounds": len(others)},
            "bins": f"{calibration.BINS} of equal mass",
            "temperatures": scaling.temperatures,
            "shifts": scaling.shifts,
            "positions": calibration.assess(others, scaling),
            "warnings": calibration.doubts(ours, scaling),
        }
        if aside is not None:
            (aside / "calibration.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            try:
                reliability.draw(report["positions"], aside / "reliability.png")
            except ModuleNotFoundError:
                print(f"dspark calibrate: {reliability.MISSING}", file=sys.stderr)
        made = Calibration(scaling.temperatures, len(ours), len(fitted), args.temperature, scaling.shifts)
        amend_manifest(folder, calibration=made)
        print(f"done: the calibration is in {args.bundle}", file=sys.stderr)
    for warning in report["warnings"]:
        print(f"dspark calibrate: warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        for line in _lines(report):
            print(line)
    return 0


def _prompts(args: argparse.Namespace, decoder) -> tuple[list, list]:
    """(to fit on, held out)"""
    from pathlib import Path

    from dspark.errors import UsageError
    from dspark.tools.measure import encode_prompts
    from dspark.tools.outcomes import sample, split
    from dspark.tools.prompts import read_prompts

    if args.limit is not None and args.limit < 1:
        raise UsageError(f"--limit {args.limit}: must be at least 1")
    chosen = sample(read_prompts(Path(args.prompts)), args.limit, args.seed)
    if args.holdout_prompts is None:
        parts = split(chosen, args.holdout, args.seed)
    else:
        parts = chosen, sample(read_prompts(Path(args.holdout_prompts)), args.limit, args.seed)
    fitted, held_out = (encode_prompts(part, decoder, None) for part in parts)
    return fitted, held_out


def _check_rounds(ours, others) -> None:
    from dspark.errors import DSparkError

    for name, outcomes in (("to fit on", ours), ("held out", others)):
        if not outcomes.known.any():
            raise DSparkError(f"the prompts {name} gave no round with a verified draft; raise --max-new-tokens")


def _lines(report: dict):
    head = f"{'draft':>5} {'T':>6} {'shift':>6} {'rounds':>7} {'survived':>9} {'estimated':>15} {'ECE':>15}"
    yield f"{head} {'by chance':>10} {'AUC':>13} {'Brier':>15}"
    for temperature, shift, p in zip(report["temperatures"], report["shifts"], report["positions"], strict=False):
        before, after = p["before"], p["after"]
        yield (
            f"{p['position']:5} {temperature:6.2f} {shift:6.2f} {p['rounds']:7} {p['survived']:9.1%} "
            f"{before['mean']:7.1%} {after['mean']:7.1%} {before['ece']:7.1%} {after['ece']:7.1%} "
            f"{after['ece_by_chance']:10.1%} {_auc(before)} {_auc(after)} {before['brier']:7.4f} {after['brier']:7.4f}"
        )
    fitted, held_out = report["fitted_on"], report["held_out"]
    yield (
        f"fitted on {fitted['rounds']} rounds of {fitted['prompts']} prompts, reported on {held_out['rounds']} rounds "
        f"of {held_out['prompts']} others, before and after; bins: {report['bins']}"
    )


def _auc(figures: dict) -> str:
    return "     -" if figures["auc"] is None else f"{figures['auc']:6.3f}"

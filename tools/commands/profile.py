"""`dspark profile`: how fast this machine runs a bundle's steps, kept in the bundle for its schedulers."""

import argparse
import json
import sys

from dspark.tools.options import add_engine


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure steps per second by tokens per step",
        description="Measure how many steps per second the target runs on this machine at 1 to block size + 1 tokens "
        "per step, and how long the drafter takes by the number of drafts. The bundle keeps the table, in the place of "
        "an older one.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that dspark-export wrote")
    add_engine(parser)
    parser.add_argument("--context", type=int, metavar="N", help="committed tokens before every step (default 512)")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="of every step (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    import contextlib
    import dataclasses
    from datetime import UTC, datetime
    from pathlib import Path

    from dspark.export.bundle import amend_manifest, check_writable
    from dspark.export.progress import Progress
    from dspark.manifest import Sps, Steps
    from dspark.runtime import load
    from dspark.runtime.profile import these_engines, this_machine
    from dspark.tools.speed import default_context, measure_speed

    folder = Path(args.bundle)
    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        progress("loading the bundle")
        decoder = load(folder, backend=args.backend, threads=args.threads)
        check_writable(folder)
        context = default_context(decoder) if args.context is None else args.context
        progress(f"measuring {args.repeats} times, {context} tokens committed")
        steps, drafts = measure_speed(decoder, context, args.repeats)
        sps = Sps(
            table=Steps(tuple(p.size for p in steps), tuple(p.per_second for p in steps)),
            draft_ms=tuple(p.ms for p in drafts),
            context=context,
            repeats=args.repeats,
            machine=this_machine(args.backend),
            engine=these_engines(args.backend, decoder.target_engine, decoder.drafter_engine, args.threads),
            when=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        amend_manifest(folder, sps=sps)
        progress(f"done: the profile is in {args.bundle}")
    if args.json:
        report = {
            "bundle": str(folder.absolute()),
            "points": [
                {"tokens": p.size, "milliseconds": p.ms, "quartiles": [p.low, p.high], "steps_per_second": p.per_second}
                for p in steps
            ],
            "drafts": [{"drafts": p.size, "milliseconds": p.ms, "quartiles": [p.low, p.high]} for p in drafts],
        }
        described = dataclasses.asdict(sps)
        report |= {name: described[name] for name in ("context", "repeats", "machine", "engine", "when")}
        print(json.dumps(report, ensure_ascii=False))
    else:
        for line in _lines(steps, drafts):
            print(line)
    return 0


def _lines(steps, drafts):
    yield f"{'tokens':>6} {'ms':>8} {'quartiles':>17} {'steps/s':>8}   {'drafts':>6} {'ms':>8} {'quartiles':>17}"
    for index, step in enumerate(steps):
        line = f"{step.size:6} {step.ms:8.2f} {step.low:8.2f} {step.high:8.2f} {step.per_second:8.2f}"
        if index < len(drafts):
            draft = drafts[index]
            line += f"   {draft.size:6} {draft.ms:8.2f} {draft.low:8.2f} {draft.high:8.2f}"
        yield line

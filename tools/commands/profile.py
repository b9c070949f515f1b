"""`dspark profile`: how fast this machine runs a bundle's steps, kept in the bundle for its schedulers."""

import argparse
import json
import sys

from dspark.tools.options import add_engine


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure steps per second by tokens per step",
        description="Measure how many steps per second the target runs on this machine by tokens per step, and how "
        "long the drafter takes by the number of drafts, and of requests. The bundle keeps one table for one request "
        "and one for batches, each in the place of an older one.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that dspark-export wrote")
    add_engine(parser)
    parser.add_argument(
        "--max-batch-size",
        type=int,
        default=1,
        metavar="N",
        help="requests at once (default 1); see docs/scheduling.md",
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="committed tokens of a request before every step (default 512; in batches 4096 for all together, if less)",
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="of every step (default 30; in batches 7)")
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
    from dspark.tools.speed import default_context, default_repeats, even, measure_speed

    folder, field = Path(args.bundle), "sps" if args.max_batch_size == 1 else "batch_sps"
    repeats = default_repeats(args.max_batch_size) if args.repeats is None else args.repeats
    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        progress("loading the bundle")
        decoder = load(folder, backend=args.backend, threads=args.threads, max_batch_size=args.max_batch_size)
        check_writable(folder)
        context = default_context(decoder) if args.context is None else args.context
        each = "" if args.max_batch_size == 1 else f" in each of {args.max_batch_size} requests"
        progress(f"measuring {repeats} times, {context} tokens committed{each}")
        speed = measure_speed(decoder, context, repeats, lambda done: progress(f"{done} of {repeats} repetitions"))
        *fewer, table = (
            Steps(tuple(p.size for p in points), tuple(1e3 / ms for ms in even(points)), requests)
            for requests, points in speed.steps.items()
        )
        sps = Sps(
            table=table,
            draft_ms=tuple(p.ms for p in speed.drafts),
            context=context,
            repeats=repeats,
            machine=this_machine(args.backend),
            engine=these_engines(args.backend, decoder.target_engine, decoder.drafter_engine, args.threads),
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            requests_draft_ms=tuple(p.ms for p in speed.batch_drafts),
            fewer=tuple(fewer),
        )
        amend_manifest(folder, **{field: sps})
        progress(f"done: the profile is in {args.bundle}")
    if args.json:
        report = {
            "bundle": str(folder.absolute()),
            "max_batch_size": args.max_batch_size,
            "points": [
                {"requests": steps.requests, **_measured("tokens", p), "steps_per_second": rate}
                for points, steps in zip(speed.steps.values(), (*fewer, table), strict=True)
                for p, rate in zip(points, steps.steps_per_second, strict=True)
            ],
            "drafts": [_measured("drafts", p) for p in speed.drafts],
            "batch_drafts": [_measured("requests", p) for p in speed.batch_drafts],
        }
        described = dataclasses.asdict(sps)
        report |= {name: described[name] for name in ("context", "repeats", "machine", "engine", "when")}
        print(json.dumps(report, ensure_ascii=False))
    else:
        for line in _lines(speed, table):
            print(line)
    return 0


def _measured(size: str, point) -> dict:
    return {size: point.size, "milliseconds": point.ms, "quartiles": [point.low, point.high]}


def _lines(speed, table):
    """Columns side by side, each as long as it has sizes. Of steps, those of the fullest batch, with the evened rates
    of `table`."""
    columns = {"tokens": list(speed.steps.values())[-1], "drafts": speed.drafts, "requests": speed.batch_drafts}
    columns = {name: points for name, points in columns.items() if points}
    rates = {"tokens": f" {'steps/s':>8}"}
    yield "   ".join(f"{name:>8} {'ms':>8} {'quartiles':>17}{rates.get(name, '')}" for name in columns)
    for index in range(max(map(len, columns.values()))):
        cells = []
        for name, points in columns.items():
            cell = ""
            if index < len(points):
                p = points[index]
                cell = f"{p.size:8} {p.ms:8.2f} {p.low:8.2f} {p.high:8.2f}"
                cell += f" {table.steps_per_second[index]:8.2f}" if name in rates else ""
            cells.append(cell.ljust(44 if name in rates else 35))
        yield "   ".join(cells).rstrip()

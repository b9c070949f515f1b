"""The command dspark-export: a drafter checkpoint and its target become a bundle.

Nothing heavy is imported before the arguments are read, so that --help and every wrong option answer at once.
"""

import argparse
import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dspark import __version__
from dspark.command import Parser, run_command
from dspark.errors import DSparkError, UsageError
from dspark.export.demo import DEMO, demo_drafter, demo_target
from dspark.export.progress import Progress
from dspark.export.quiet import import_quietly
from dspark.manifest import MAX_BATCH_SIZE
from dspark.tensorrt import BACKENDS


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="dspark-export",
        description="Export a DSpark drafter and its target model as a bundle that dspark's runtime loads.",
        epilog="Exit codes: 0 success, 1 the export failed (parity, disk), 2 wrong options or unusable input.",
    )
    parser.add_argument(
        "--ckpt", required=True, metavar="DIR|ID|demo", help="drafter checkpoint: a folder, a hub id, or the demo pair"
    )
    parser.add_argument(
        "--target", metavar="DIR|ID|demo", help="target model: a folder, a GGUF file, a hub id, or the demo's"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the bundle to write; must not exist")
    parser.add_argument(
        "--backend",
        default="onnx",
        metavar="NAME",
        help="onnx, or tensorrt or tensorrt-rtx to build engines as well (default: onnx; later: dspark build)",
    )
    parser.add_argument(
        "--dtype", metavar="TYPE", help="number format: of ONNX graphs fp32, of engines bf16 (default), fp16 or fp32"
    )
    parser.add_argument(
        "--max-batch-size",
        type=int,
        default=MAX_BATCH_SIZE,
        metavar="N",
        help=f"requests at once that the runtime makes room for by default (default: {MAX_BATCH_SIZE})",
    )
    parser.add_argument(
        "--max-context-len", type=int, metavar="N", help="tokens a request may hold (default: the target's, max 4096)"
    )
    parser.add_argument("--draft-len", type=int, metavar="N", help="drafts a round (default: the whole block)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Errors are one line on stderr, with --json an object on stdout too."""
    arguments = sys.argv[1:] if argv is None else list(argv)

    def run() -> int:
        args = build_parser().parse_args(arguments)
        report = _run(args)
        if args.json:
            print(json.dumps(report, ensure_ascii=False))
        return 0

    return run_command(run, "", "--json" in arguments, kept="; nothing was kept")


def _run(args: argparse.Namespace) -> dict[str, Any]:
    checkpoint, target = _inputs(args)
    # Whatever a library prints goes to stderr: stdout belongs to --json.
    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        progress("loading libraries")
        build = _import_build()
        options = build.Options(
            checkpoint=checkpoint,
            target=target,
            out=Path(args.out),
            max_batch_size=args.max_batch_size,
            max_context_len=args.max_context_len,
            draft_len=args.draft_len,
            engines=None if args.backend == "onnx" else build.EngineOptions(args.backend, args.dtype or "bf16"),
        )
        manifest = build.export_bundle(options, progress)
        seconds = progress.seconds
        size = sum(entry.size for entry in manifest.files.values())
        progress(f"done: {args.out}, {size / 1e6:.1f} MB")
    return {
        "bundle": args.out,
        "bytes": size,
        "seconds": round(seconds, 1),
        "parity": json.loads((Path(args.out) / manifest.parity).read_text(encoding="utf-8"))["passed"],
        "block_size": manifest.drafter.block_size,
        "draft_len": manifest.profiles.draft_len,
        "max_context_len": manifest.profiles.max_context_len,
        "target": manifest.target.model_type,
    }


def _inputs(args: argparse.Namespace) -> tuple[Path, str]:
    """Check the options that need no model, and find the checkpoint. Returns (checkpoint folder, target)."""
    if args.backend not in ("onnx", *BACKENDS):
        raise UsageError(f"--backend {args.backend}: not known; use onnx, {' or '.join(BACKENDS)}")
    if args.dtype not in (None, "fp32", "fp16", "bf16"):
        raise UsageError(f"--dtype {args.dtype}: not known; use fp32, fp16 or bf16")
    if args.backend == "onnx" and args.dtype in ("fp16", "bf16"):
        raise UsageError(
            f"--dtype {args.dtype}: not supported yet with --backend onnx, whose CPU kernels are fp32; use fp32"
        )
    for option, value in (("--max-batch-size", args.max_batch_size), ("--max-context-len", args.max_context_len)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: must be at least 1")
    if args.ckpt != DEMO and args.target is None:
        raise UsageError("--target is missing; it names the model that the drafter was trained for")
    from dspark.export.locate import locate

    checkpoint = demo_drafter() if args.ckpt == DEMO else locate(args.ckpt, "--ckpt")
    target = demo_target() if args.target in (None, DEMO) else locate(args.target, "--target", suffix=".gguf")
    return checkpoint, str(target)


def _import_build():
    try:
        import_quietly()

        from dspark.export import build
    except ModuleNotFoundError as error:
        raise DSparkError(f"package {error.name!r} is not installed; run `pip install '.[export,cpu]'`") from error
    # The libraries' deprecations, optional parts and own bars are no concern of the user.
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    return build


if __name__ == "__main__":
    sys.exit(main())

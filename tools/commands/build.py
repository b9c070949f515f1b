"""`dspark build`: TensorRT engines of a bundle's graphs."""

import argparse
import json


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "build",
        help="build TensorRT engines into a bundle",
        description="Build TensorRT engines of a bundle's target and drafter and add them to the bundle. TensorRT "
        "needs the GPU that the engines are for; TensorRT-RTX builds anywhere.",
        epilog="Dimensions of --profile: T target rows, L logit rows, G block positions, Tc context rows, R requests, "
        "P pages, C rows of a page, W rows of a windowed layer's, N pages of a request.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that dspark-export wrote")
    parser.add_argument("--backend", required=True, metavar="NAME", help="tensorrt or tensorrt-rtx")
    parser.add_argument(
        "--dtype",
        default="bf16",
        metavar="TYPE",
        help="of weights, activations, caches: bf16 (default), fp16 or fp32",
    )
    parser.add_argument(
        "--profile",
        action="append",
        default=[],
        metavar="DIM=MIN:OPT:MAX",
        help="sizes of one dimension, in the place of those that the bundle's limits give; may be given several times",
    )
    parser.add_argument("--timing-cache", metavar="FILE", help="TensorRT: keep kernel timings here for the next build")
    parser.add_argument(
        "--version-compatible", action="store_true", help="TensorRT: engines that newer versions can load too"
    )
    parser.add_argument(
        "--hardware-compatibility-level",
        default="none",
        metavar="LEVEL",
        help="TensorRT: none, ampere-plus or same-compute-capability (default none: this GPU's kind alone)",
    )
    parser.add_argument(
        "--compute-capability",
        action="append",
        default=[],
        metavar="X.Y",
        help="TensorRT-RTX: GPUs to build for, such as 8.9; may be given several times (default: this machine's GPU, "
        "without one all)",
    )
    parser.add_argument(
        "--unroll-markov",
        action="store_true",
        help="the Markov chain in plain layers instead of its plugin, for blocks of exactly the drafter's size",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    import contextlib
    import dataclasses
    import sys
    from pathlib import Path

    from dspark.errors import DSparkError
    from dspark.export.progress import Progress
    from dspark.manifest import MANIFEST
    from dspark.runtime.bundle import open_bundle

    profile = parse_profile(args.profile)
    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        progress("checking the bundle")
        try:
            from dspark.export.bundle import check_writable
            from dspark.export.engines import build_engines
            from dspark.export.network import Options
        except ModuleNotFoundError as error:
            hint = "pip install '.[tensorrt]', or '.[tensorrt-rtx]'"
            raise DSparkError(f"package {error.name!r} is not installed; run {hint}") from error
        if (Path(args.bundle) / MANIFEST).is_file():
            check_writable(Path(args.bundle))  # before it is opened: what a killed build has left would be refused
        bundle = open_bundle(args.bundle)
        options = Options(
            backend=args.backend,
            dtype=args.dtype,
            profile=profile,
            timing_cache=Path(args.timing_cache) if args.timing_cache else None,
            version_compatible=args.version_compatible,
            hardware_compatibility=args.hardware_compatibility_level,
            compute_capabilities=tuple(dict.fromkeys(args.compute_capability)),
            unroll_markov=args.unroll_markov,
        )
        manifest = build_engines(bundle.folder, options, progress)
        built = [e for e in manifest.engines if (e.backend, e.dtype) == (args.backend, args.dtype)]
        size = sum(manifest.files[engine.file].size for engine in built)
        progress(f"done: {size / 1e6:.1f} MB of engines in {args.bundle}")
    if args.json:
        report = {"bundle": str(bundle.folder), "bytes": size, "seconds": round(progress.seconds, 1)}
        print(json.dumps(report | {"engines": [dataclasses.asdict(e) for e in built]}, ensure_ascii=False))
    return 0


def parse_profile(given: list[str]) -> dict[str, tuple[int, int, int]]:
    """{"T": (1, 6, 512)} from ["T=1:6:512"]; UsageError for anything else."""
    from dspark.errors import UsageError

    profile = {}
    for text in given:
        name, _, sizes = text.partition("=")
        numbers = sizes.split(":")
        if not name or len(numbers) != 3 or not all(n.isascii() and n.isdecimal() and len(n) < 10 for n in numbers):
            raise UsageError(f"--profile {text}: expected DIM=MIN:OPT:MAX, such as T=1:6:512")
        if name in profile:
            raise UsageError(f"--profile {text}: {name} is given twice")
        profile[name] = (int(numbers[0]), int(numbers[1]), int(numbers[2]))
    return profile

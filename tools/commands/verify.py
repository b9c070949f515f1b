"""`dspark verify`: are the graphs and engines of a bundle right on this machine?"""

import argparse
import json
import sys


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="compare a bundle's graphs and engines",
        description="Run a scripted session on the portable graphs and on every backend that the bundle has something "
        "for, and compare all outputs. Exit 1 if one differs by more than its number format explains.",
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that dspark-export wrote")
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="only this one, and fail if it cannot run here: onnxruntime, tensorrt or tensorrt-rtx; may be given "
        "several times (default: all that can run)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per core")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    import contextlib

    from dspark.errors import DSparkError
    from dspark.export.progress import Progress
    from dspark.runtime.bundle import open_bundle
    from dspark.runtime.engines.open import check_threads

    check_threads(args.threads, "--threads")
    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        progress("checking the bundle")
        bundle = open_bundle(args.bundle)
        try:
            import polygraphy  # noqa: F401 - wanted at the end, after minutes with a large model

            from dspark.tools import verify
        except ModuleNotFoundError as error:
            raise DSparkError(f"package {error.name!r} is not installed; run pip install '.[export,cpu]'") from error
        backends = args.backend or verify.backends_of(bundle)
        required = args.backend is not None
        report = verify.verify(bundle, backends, progress, required=required, threads=args.threads)
    if args.json:
        print(json.dumps({"bundle": str(bundle.folder), **report}, ensure_ascii=False))
    else:
        for line in _lines(report):
            print(line)
    return 0 if report["passed"] else DSparkError.exit_code


def _share(output: dict) -> str:
    mean = output["mean_share"]
    return f"mean {'not finite' if mean is None else f'{mean:.2%}'}, allowed {output['share']:.0%}"


def _lines(report: dict):
    for graph in report["graphs"]:
        for name, output in graph["outputs"].items():
            error = output["max_abs_error"]
            shown = "not finite" if error is None else f"{error:.1e}"
            top1 = f", top-1 {output['top1_agreement']:.1%}" if "top1_agreement" in output else ""
            verdict = "ok" if output["passed"] else "FAILED"
            limit = (
                f"each value within {output['atol']:g}, or {output['rtol']:g} of its size"
                if "atol" in output
                else _share(output)
            )
            yield f"{verdict:7} {graph['role']:8} {graph['form']:24} {name:13} off by {shown} ({limit}){top1}"
    for backend, reason in report["skipped"].items():
        yield f"skipped {backend}: {reason}"
    yield f"{'passed' if report['passed'] else 'FAILED'}; reference: {report['reference']}"

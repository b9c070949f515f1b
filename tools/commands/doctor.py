"""`dspark doctor`: what this machine can do.

Nothing heavy is imported: presence is asked of the package finder, the GPU of the driver library itself.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess

from dspark import __version__
from dspark.cuda import query
from dspark.errors import DSparkError

EXPORT_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "polygraphy", "safetensors")
RUNTIME_PACKAGES = ("numpy", "tokenizers", "jinja2", "onnxruntime", "onnxruntime-gpu", "cuda-bindings")
PACKAGES = (*RUNTIME_PACKAGES, *EXPORT_PACKAGES, "gguf", "accelerate")
TENSORRT = {"tensorrt": "TensorRT", "tensorrt_rtx": "TensorRT-RTX", "tensorrt_lean": "TensorRT lean runtime"}


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="show what this machine can do",
        description="Show packages, backends, GPU and tools, and what they allow; with a bundle, whether it runs here.",
    )
    parser.add_argument("bundle", nargs="?", metavar="BUNDLE", help="also check and load this bundle")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    report = collect()
    if args.bundle is not None:
        report["bundle"] = _try_bundle(args.bundle)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        for line in _lines(report):
            print(line)
    return 0 if report.get("bundle", {"runs": True})["runs"] else DSparkError.exit_code


def collect() -> dict:
    """Everything about the machine, as JSON."""
    report: dict = {
        "dspark": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "onnxruntime_providers": _providers(),
        "cuda": _cuda(),
        "tensorrt": {name: importlib.util.find_spec(name) is not None for name in TENSORRT},
        "plugin_library": _plugin_library(),
        "nvcc": _nvcc(),
    }
    report["can"] = _abilities(report)
    return report


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _providers() -> list[str]:
    try:
        import onnxruntime
    except ImportError:
        return []
    return list(onnxruntime.get_available_providers())


def _cuda() -> dict:
    """Driver version and GPUs; {"error": why} where there are none."""
    cuda = query()
    gpus = [{"name": g.name, "sm": g.capability[0] * 10 + g.capability[1], "memory": g.memory} for g in cuda.gpus]
    return {"driver": cuda.driver, "gpus": gpus, "error": cuda.error}


def _plugin_library() -> str | None:
    """The path of the built TensorRT plugin library, None where it is not built."""
    import dspark.plugins

    locate = getattr(dspark.plugins, "plugin_library_path", None)
    try:
        path = locate() if locate else None
    except DSparkError:
        return None
    return str(path) if path else None


def _nvcc() -> str | None:
    """nvcc's release line, None where there is none."""
    tool = shutil.which("nvcc")
    if tool is None:
        return None
    try:
        answer = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    release = [line for line in answer.splitlines() if "release" in line]
    return f"{tool} ({release[0].strip()})" if release else tool


def _abilities(report: dict) -> dict[str, dict]:
    """What can be done here: {ability: {"yes": bool, "why": what is missing, or what serves}}."""
    packages, cuda, tensorrt = report["packages"], report["cuda"], report["tensorrt"]
    missing = [name for name in EXPORT_PACKAGES if packages[name] is None]
    flavours = [label for name, label in TENSORRT.items() if tensorrt[name]]
    gpu = cuda["gpus"][0]["name"] if cuda["gpus"] else None
    # The lean runtime only loads; TensorRT itself times kernels on the GPU, TensorRT-RTX does not.
    builder = "TensorRT-RTX" if tensorrt["tensorrt_rtx"] else "TensorRT" if tensorrt["tensorrt"] else None
    to_build = {
        "pip install '.[tensorrt-rtx]'": builder,
        "make plugins": report["plugin_library"],
        "a GPU": builder != "TensorRT" or gpu,
    }
    to_run = {
        f"a GPU ({cuda['error'] or 'the driver shows none'})": gpu,
        "pip install '.[tensorrt]', or '.[tensorrt-rtx]'": builder and packages["cuda-bindings"],
    }
    lacking, missing_to_run = ([name for name, there in part.items() if not there] for part in (to_build, to_run))
    on_cpu = "CPUExecutionProvider" in report["onnxruntime_providers"]
    answers = {
        "generate on the CPU": (on_cpu, "ONNX Runtime" if on_cpu else "pip install '.[cpu]'"),
        "export checkpoints": (
            not missing,
            f"missing: {', '.join(missing)}; pip install '.[export]'" if missing else "torch and ONNX packages",
        ),
        "compile CUDA": (report["nvcc"] is not None, report["nvcc"] or "no nvcc on PATH"),
        "load TensorRT": (bool(flavours), ", ".join(flavours) or "no TensorRT package is installed"),
        "build TensorRT engines": (not lacking, f"missing: {', '.join(lacking)}" if lacking else str(builder)),
        "generate on a GPU": (
            not missing_to_run,
            f"missing: {', '.join(missing_to_run)}" if missing_to_run else str(gpu),
        ),
    }
    return {ability: {"yes": yes, "why": why} for ability, (yes, why) in answers.items()}


def _try_bundle(folder: str) -> dict:
    """Check and load a bundle. A damaged one raises; one that this machine cannot run is reported."""
    from dspark.runtime import load
    from dspark.runtime.bundle import open_bundle

    bundle = open_bundle(folder)
    try:
        load(folder)
    except DSparkError as error:
        return {"folder": str(bundle.folder), "runs": False, "why": str(error)}
    return {"folder": str(bundle.folder), "runs": True, "why": "engines load on ONNX Runtime, CPU"}


def _lines(report: dict):
    yield f"dspark {report['dspark']}, Python {report['python']}, {report['platform']}, {report['cores']} cores"
    found = [f"{name} {version}" for name, version in report["packages"].items() if version]
    yield f"packages    {', '.join(found)}"
    absent = [name for name, version in report["packages"].items() if not version]
    yield f"absent      {', '.join(absent) or 'none'}"
    yield f"providers   {', '.join(report['onnxruntime_providers']) or 'ONNX Runtime is not installed'}"
    cuda = report["cuda"]
    gpus = [f"{g['name']} (sm_{g['sm']}, {g['memory'] / 2**30:.0f} GiB)" for g in cuda["gpus"]]
    yield f"cuda        {cuda['error'] or 'driver ' + cuda['driver'] + ', ' + (', '.join(gpus) or 'no GPU')}"
    yield f"tensorrt    {', '.join(TENSORRT[n] for n, there in report['tensorrt'].items() if there) or 'none'}"
    yield f"plugins     {report['plugin_library'] or 'not built'}"
    yield f"nvcc        {report['nvcc'] or 'none'}"
    for ability, answer in report["can"].items():
        yield f"{'can   ' if answer['yes'] else 'cannot'}      {ability} ({answer['why']})"
    if "bundle" in report:
        bundle = report["bundle"]
        verdict = "runs here" if bundle["runs"] else "does NOT run here"
        yield f"bundle      {bundle['folder']}: {verdict} ({bundle['why']})"

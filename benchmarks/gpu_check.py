"""What tools/gpu_check.sh runs: the parts of the check, in the order of what matters most."""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from gpu_engines import engine_parts
from gpu_parts import PASSED, TAIL, Command, NotRun, PartFailed, Report, counted, expect, last_line, pytest, python, run

from dspark import cuda
from dspark.errors import DSparkError

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "gpu"
LIBRARY = WORK / "libdspark_device.so"
PLUGINS = WORK / "plugins"
KERNEL_TESTS = [f"tests/plugins/test_{name}.py" for name in ("block_attention", "markov_argmax", "accept")]
# Cases that reach every kernel and every copy between memories: ragged, paged and padded rows, splits, both products.
CHOSEN = "(test_table and (verify or paged or draft or long or vanilla or rnn)) or test_cases or test_head_sizes"
FEW = "(test_table or test_cases) and bf16 and (verify or paged or first or long or vanilla or rnn or drawn)"
SANITIZERS = {
    "memcheck": (60, f"({CHOSEN}) and not fp16"),
    "racecheck": (60, FEW),
    "synccheck": (30, FEW),
}
PACKAGES = ("torch", "numpy", "pytest", "onnxruntime", "tensorrt", "tensorrt-rtx-cu13", "cuda-bindings")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/gpu_check.sh", description="Checks and measures on an NVIDIA GPU.")
    parser.add_argument("--out", type=Path, help="default: docs/measurements/gpu-CARD-DATE.json")
    parser.add_argument("--bundle", type=Path, default=ROOT / "engines" / "demo", help="made if it is missing")
    parser.add_argument("--minutes", type=float, default=7.8, help="of all parts together (default %(default)s)")
    parser.add_argument("--commit", help="where this is no git checkout: what it is a copy of")
    args = parser.parse_args()
    try:
        gpu = cuda.require_gpu("gpu_check")
    except DSparkError as error:
        print(error, file=sys.stderr)
        return 1
    # What lies beside this Python, as cmake and ninja may.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    nvcc = find_nvcc(os.environ)
    if nvcc is None:
        print("gpu_check needs nvcc: not found in PATH, CUDACXX, CUDA_HOME, /usr/local/cuda or this Python's packages;"
              " install it, or name it in CUDACXX", file=sys.stderr)  # fmt: skip
        return 1

    today = datetime.date.today().isoformat()
    card = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    out = args.out or ROOT / "docs" / "measurements" / f"gpu-{card}-{today}.json"
    report = Report(out.absolute(), header(gpu, nvcc, today, args.commit), args.minutes * 60)
    shutil.rmtree(WORK / "logs", ignore_errors=True)
    architecture = "".join(map(str, gpu.capability))

    # The plugins are compiled while the kernels' tests run; not while anything is timed.
    with ThreadPoolExecutor(1) as pool:
        building = pool.submit(
            report.part, "build, plugins", 120, lambda seconds: build_plugins(nvcc, architecture, seconds)
        )
        report.part("build, kernels", 120, lambda seconds: build_kernels(nvcc, architecture, LIBRARY, seconds))
        report.part("tests, kernels", 150, lambda seconds: kernel_tests(report, seconds))
        building.result()
    report.part("measurements", 150, lambda seconds: measurements(report, seconds))
    for name, verdict in report.data["parts"]["measurements"].get("report", {}).get("verdicts", {}).items():
        print(f"  {name}: {verdict['what']}: {verdict.get('worst', verdict.get('why'))}, wanted {verdict['required']}")
    for tool, (limit, chosen) in SANITIZERS.items():
        report.part(f"sanitizer, {tool}", limit, lambda s, t=tool, c=chosen: sanitizer(report, nvcc, t, c, s))
    report.part("tests, plugins", 100, lambda seconds: plugin_tests(report, seconds))
    engine_parts(report, args.bundle.absolute(), WORK, plugin_library(report), cuda.dotted(gpu.capability))
    print(f"written: {report.file}")
    return report.exit_code()


def header(gpu: cuda.Gpu, nvcc: Path, today: str, commit: str | None) -> dict:
    """Of the machine and of what is checked. Whatever cannot be found out is None."""

    def output(*command: str | Path) -> str | None:
        try:
            done = subprocess.run([str(w) for w in command], cwd=ROOT, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    git = ("git", "-c", f"safe.directory={ROOT}")
    changed = output(*git, "status", "--porcelain")
    release = re.search(r"release [\d.]+, V([\d.]+)", output(nvcc, "--version") or "")
    return {
        "date": today,
        "card": gpu.name,
        "compute_capability": cuda.dotted(gpu.capability),
        "memory_bytes": gpu.memory,
        "driver": driver_version() or output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda_of_driver": cuda.query().driver,
        "nvcc": release[1] if release else None,
        "python": platform.python_version(),
        "packages": {package: version(package) for package in PACKAGES},
        "commit": commit or output(*git, "rev-parse", "HEAD"),
        "changed_files": None if changed is None else len(changed.splitlines()),
    }


def driver_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", text)
    return found[1] if found else None


def find_nvcc(environment: Mapping[str, str]) -> Path | None:
    """The compiler: the one that is named, of PATH, of a toolkit, or of NVIDIA's packages for this Python."""
    places: list[str | Path | None] = [environment.get("CUDACXX"), shutil.which("nvcc", path=environment.get("PATH"))]
    places += [f"{environment[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    places += ["/usr/local/cuda/bin/nvcc"]
    for folder in map(Path, sys.path):
        places += sorted(folder.glob("nvidia/cu*/bin/nvcc")) + sorted(folder.glob("nvidia/cuda_nvcc/bin/nvcc"))
    for place in filter(None, places):
        if os.access(place, os.X_OK) and Path(place).is_file():
            return Path(place)
    return None


def build_kernels(nvcc: Path, architecture: str, library: Path, seconds: float) -> dict:
    """The entry points of plugins/tests/host_api.h for this GPU alone."""
    library.parent.mkdir(parents=True, exist_ok=True)
    library.unlink(missing_ok=True)  # what failed to build must not be tested
    # NVIDIA's Python packages have their libraries in lib, where nvcc does not look.
    places = [f"-L{p}" for p in (nvcc.resolve().parents[1] / "lib",) if (p / "libcudart_static.a").is_file()]
    command: Command = [
        nvcc, "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-lineinfo", "-shared", "-cudart", "static", *places,
        "-Xcompiler", "-fPIC,-fvisibility=hidden", f"-I{ROOT / 'plugins' / 'include'}",
        ROOT / "plugins" / "tests" / "device_api.cu", "-o", library,
    ]  # fmt: skip
    expect(command, WORK / "logs" / "build-kernels.log", seconds)
    return {"architecture": f"sm_{architecture}"}


def build_plugins(nvcc: Path, architecture: str, seconds: float) -> dict:
    headers = find_tensorrt_headers(os.environ)
    if headers is None:
        raise NotRun(
            "TensorRT's headers (NvInferRuntime.h) not found: set TENSORRT_ROOT, or let `make plugins` fetch them where"
            " there is a network"
        )
    for tool in ("cmake", "ninja"):
        if shutil.which(tool) is None:
            raise NotRun(f"{tool} not found")
    shutil.rmtree(PLUGINS, ignore_errors=True)
    log = WORK / "logs" / "build-plugins.log"
    settings = [f"-DCMAKE_CUDA_ARCHITECTURES={architecture}-real", f"-DTENSORRT_INCLUDE_DIR={headers}"]
    settings += ["-DDSPARK_TENSORRT=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    expect(["cmake", "-S", ROOT / "plugins", "-B", PLUGINS, "-G", "Ninja", *settings], log, seconds)
    expect(["cmake", "--build", PLUGINS, "--target", "dspark_plugins", "dspark_runner"], log, seconds)
    return {"architecture": f"sm_{architecture}"}


def find_tensorrt_headers(environment: Mapping[str, str]) -> Path | None:
    """The folder of NvInferRuntime.h."""
    named = environment.get("TENSORRT_ROOT")
    roots = [Path(named)] if named else []
    roots += [ROOT / "build" / "tensorrt" / "kernel_lens", Path("/usr"), Path("/usr/local/tensorrt")]
    for root in roots:
        for part in ("", "include", "include/tensorrt", "include/x86_64-linux-gnu", "include/aarch64-linux-gnu"):
            if (root / part / "NvInferRuntime.h").is_file():
                return (root / part).absolute()
    return None


def plugin_library(report: Report) -> Path | None:
    return PLUGINS / "libdspark_plugins.so" if report.status("build, plugins") == PASSED else None


def need(report: Report, part: str) -> None:
    if report.status(part) != PASSED:
        raise NotRun(f"'{part}' did not pass")


def kernel_tests(report: Report, seconds: float) -> dict:
    need(report, "build, kernels")
    environment = {"DSPARK_HOST_LIBRARY": str(LIBRARY)}
    return counted(*run(pytest(*KERNEL_TESTS), WORK / "logs" / "tests-kernels.log", seconds, environment))


def plugin_tests(report: Report, seconds: float) -> dict:
    need(report, "build, plugins")
    environment = {
        "DSPARK_RUNNER": str(PLUGINS / "dspark_runner"),
        "DSPARK_PLUGIN_LIBRARY": str(PLUGINS / "libdspark_plugins.so"),
    }
    command = pytest("tests/plugins/test_runner.py")
    return counted(*run(command, WORK / "logs" / "tests-plugins.log", seconds, environment))


def find_sanitizer(nvcc: Path) -> Path | None:
    toolkits = [nvcc.parents[1], nvcc.resolve().parents[1], Path("/usr/local/cuda")]
    toolkits += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    inside = ("bin", "compute-sanitizer", "extras/compute-sanitizer")
    places = [shutil.which("compute-sanitizer"), *(t / i / "compute-sanitizer" for t in toolkits for i in inside)]
    return next((Path(p) for p in places if p and Path(p).is_file() and os.access(p, os.X_OK)), None)


def sanitizer(report: Report, nvcc: Path, tool: str, chosen: str, seconds: float) -> dict:
    """A subset of the kernels' tests under compute-sanitizer. initcheck is none of the tools: every byte that a kernel
    is given is initialised (with NaN), and the tests find what reads it."""
    need(report, "build, kernels")
    program = find_sanitizer(nvcc)
    if program is None:
        raise PartFailed("compute-sanitizer is not installed: not in PATH, nor in the toolkit of nvcc")
    # Without guards around arrays, so that the first byte behind one is another's.
    environment = {"DSPARK_HOST_LIBRARY": str(LIBRARY), "DSPARK_NO_GUARDS": "1"}
    command: Command = [program, "--tool", tool, "--target-processes", "all", "--error-exitcode", "99"]
    command += pytest("-x", *KERNEL_TESTS, "-k", chosen)
    status, lines = run(command, WORK / "logs" / f"sanitizer-{tool}.log", seconds, environment)
    found = [line.strip("= ") for line in lines if line.startswith("=========")]
    summaries = [line for line in found if "SUMMARY:" in line]
    clean = bool(summaries) and all(re.search(r"SUMMARY: 0 ", line) for line in summaries)
    if not clean:
        why = summaries[-1] if summaries else last_line(found or lines)
        raise PartFailed(f"exit status {status}; {why}", found=found[:40], tail=lines[-TAIL:])
    tests = counted(status, [line for line in lines if not line.startswith("=========")])
    return {"summary": summaries[-1], **tests}


def measurements(report: Report, seconds: float) -> dict:
    """gpu_kernels.py; what it had measured when its time was over counts."""
    need(report, "build, kernels")
    file = WORK / "kernels.json"
    file.unlink(missing_ok=True)
    command = python(ROOT / "benchmarks" / "gpu_kernels.py", "--library", LIBRARY, "--out", file)
    command += ["--seconds", str(max(1.0, seconds - 25))]
    try:
        status, lines = run(command, WORK / "logs" / "measurements.log", seconds)
        wrong = f"exit status {status}: {last_line(lines)}" if status else None
        details: dict = {"tail": lines[-TAIL:]} if status else {}
    except PartFailed as error:
        wrong, details = str(error), error.details
    if file.is_file():
        details["report"] = json.loads(file.read_text())
    if wrong:
        rows = [row for rows in details.get("report", {}).get("kernels", {}).values() for row in rows]
        bad = sum("error" in row or not row["check"]["passed"] for row in rows)
        raise PartFailed(f"{bad} of {len(rows)} configurations are wrong; {wrong}" if bad else wrong, **details)
    return details


if __name__ == "__main__":
    sys.exit(main())

"""The parts of gpu_check.py that need TensorRT or TensorRT-RTX: a bundle built, compared and timed on the card."""

import json
import shutil
from pathlib import Path

from gpu_parts import NOT_RUN, TAIL, NotRun, PartFailed, Report, counted, last_line, pytest, python, run

# pytest's -k for the cases of a backend in the engines' tests.
CASES_OF = {"tensorrt": "not rtx", "tensorrt-rtx": "rtx"}
BACKENDS = tuple(CASES_OF)


def engine_parts(report: Report, bundle: Path, work: Path, library: Path | None, capability: str) -> None:
    """For each backend a part, and one for the engines' own tests. library: of the plugins; None: there is none."""
    environment = {} if library is None else {"DSPARK_PLUGIN_LIBRARY": str(library)}
    logs = work / "logs"

    def available(backend: str, seconds: float) -> str:
        """The version of a backend's package; NotRun with its error."""
        code = f"from dspark.tensorrt import import_tensorrt; print(import_tensorrt({backend!r}).__version__)"
        status, lines = run(python("-c", code), logs / f"import-{backend}.log", seconds)
        if status:
            raise NotRun(last_line(lines).removeprefix("dspark.errors.DSparkError: "))
        if library is None:
            raise NotRun("there is no plugin library: 'build, plugins' did not pass")
        return last_line(lines)

    def backend_part(backend: str, seconds: float) -> dict:
        version = available(backend, seconds)
        copy = _copy(_bundle(bundle, work, report.left()), work / f"bundle-{backend}")
        steps: dict = {"version": version}

        def dspark(command: str, *options: str) -> dict:
            log = logs / f"{backend}-{command}.log"
            # --json: its result is a line of its own, and so is an error.
            words = python("-m", "dspark.tools.cli", command, copy, "--backend", backend, *options, "--json")
            status, lines = run(words, log, min(seconds, report.left()), environment)
            if status == 2:  # what was asked for cannot be had: the card, mostly
                raise NotRun(_message(lines))
            if status:
                raise PartFailed(f"dspark {command}: {_message(lines)}", tail=lines[-TAIL:], **steps)
            return _object(lines)

        only = ("--compute-capability", capability) if backend == "tensorrt-rtx" else ()
        built = dspark("build", *only)
        steps["build"] = {name: built.get(name) for name in ("bytes", "seconds")}
        steps["verify"] = dspark("verify")
        bench = dspark("bench", "--limit", "2", "--max-new-tokens", "96")
        steps["bench"] = {name: value for name, value in bench.items() if name not in ("bundle", "prompts")}
        return steps

    def tests(backend: str, seconds: float) -> dict:
        if report.status(f"engines, {backend}") == NOT_RUN:
            raise NotRun(f"'engines, {backend}' was not run")
        only = CASES_OF[backend]
        command = pytest("-m", "gpu", "tests/runtime/test_tensorrt_gpu.py", "-k", only)
        return counted(*run(command, logs / f"tests-{backend}.log", seconds, environment))

    for backend in BACKENDS:
        report.part(f"engines, {backend}", 200, lambda seconds, b=backend: backend_part(b, seconds))
        report.part(f"tests of engines, {backend}", 120, lambda seconds, b=backend: tests(b, seconds))


def _bundle(bundle: Path, work: Path, seconds: float) -> Path:
    """The bundle, or a demo bundle made now."""
    if (bundle / "manifest.json").is_file():
        return bundle
    made = work / "demo"
    if not (made / "manifest.json").is_file():
        command = python("-m", "dspark.export.cli", "--ckpt", "demo", "--out", made)
        status, lines = run(command, work / "logs" / "export.log", seconds)
        if status:
            raise NotRun(f"{bundle} is no bundle, and the demo's cannot be exported here: {last_line(lines)}")
    return made


def _copy(bundle: Path, to: Path) -> Path:
    """A copy for the engines. No links: onnx refuses files that have two names."""
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(bundle, to))


def _object(lines: list[str]) -> dict:
    for line in reversed(lines):
        if line.startswith("{"):
            return json.loads(line)
    raise PartFailed("no JSON in the output", tail=lines[-TAIL:])


def _message(lines: list[str]) -> str:
    """What went wrong: of the JSON error where there is one."""
    try:
        found = _object(lines).get("error")
    except (PartFailed, ValueError):
        found = None
    if isinstance(found, dict):
        found = found.get("message")
    return str(found) if found else last_line(lines)

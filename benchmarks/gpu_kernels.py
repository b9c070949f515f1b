"""The kernels at Qwen3-4B's sizes: against a copy's bandwidth, and side by side with torch, in one run on one GPU.

    python benchmarks/gpu_kernels.py --library build/gpu/libdspark_device.so --out kernels.json

tools/gpu_check.sh builds the library and runs this. Of every configuration: the bytes that have to be moved at the
least (gpu_shapes.py), the kernel alone and as a CUDA graph, the same in torch, and one comparison of the results. The
level 2 cache is flushed before every timed run. The report is written anew after every configuration. With
`--device cpu` and the library of the host shim, tiny sizes go the same way; those times mean nothing.
"""

import argparse
import ctypes
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_shapes import full_plan, judge, record, tiny_plan
from gpu_timing import Clock, CpuClock, CudaClock, copy_bandwidth

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # the structs of the kernels' calls
import host_memory
from gpu_cases import CASES, Case

SECONDS_EACH = {"cuda": 0.6, "cpu": 0.0}  # of timing, a configuration


class Kernels:
    """The entry points of a library (plugins/tests/host_api.h), with torch's memory and stream."""

    def __init__(self, library: Path, clock: Clock):
        self.c, self.clock = ctypes.CDLL(str(library)), clock
        self.c.dspark_host_status_text.restype = ctypes.c_char_p

    def launcher(self, kernel: str, params: ctypes.Structure, tensors: dict[str, torch.Tensor]) -> Callable[[], None]:
        """A call to be made again and again. It holds its tensors, and a workspace full of NaN."""
        for name, tensor in tensors.items():
            assert hasattr(params, name) and tensor.is_contiguous() and tensor.device.type == self.clock.device, name
            setattr(params, name, tensor.data_ptr())
        size = host_memory.workspace_bytes(self.c, kernel, params)
        workspace = torch.full((max(size, 16),), 255, dtype=torch.uint8, device=self.clock.device)
        function, held = getattr(self.c, f"dspark_host_{kernel}"), (params, tensors, workspace)

        def run() -> None:
            status = function(
                ctypes.byref(held[0]),
                ctypes.c_void_p(held[2].data_ptr()),
                ctypes.c_size_t(size),
                ctypes.c_void_p(self.clock.stream()),
            )
            if status:
                raise RuntimeError(f"{kernel}: {self.c.dspark_host_status_text(status).decode()}")

        return run


def measure(case: Case, kernels: Kernels) -> dict:
    """One configuration: check it, time everything in turn."""
    clock, absent = kernels.clock, {}
    ours = kernels.launcher(case.kernel, case.params(), case.tensors)
    ours()
    clock.finish()
    found = [case.tensors[name].clone() for name in case.outputs]
    check = case.check(lambda more: kernels.launcher(case.kernel, case.params(), case.tensors | more)())
    runs = {"kernel": ours, "kernel, graph": clock.captured(ours)}
    for name, (run, graphs) in case.torch_runs().items():
        try:
            difference = case.compare(run())
            if difference is not None:
                check.setdefault("torch", {})[name] = difference
            if "alone" in graphs:
                runs[name] = run
            if "graph" in graphs:
                runs[f"{name}, graph"] = clock.captured(run)
        except RuntimeError as error:  # no kernel of torch's for it, or out of memory
            absent[name] = str(error).strip().splitlines()[0][:300]
            clock.free_bytes()
    times = clock.microseconds(runs, SECONDS_EACH[clock.device])
    # The same numbers to the last bit after all those runs: a result that moves is a race.
    after = [case.tensors[name] for name in case.outputs]
    check["repeatable"] = all(torch.equal(x, y) for x, y in zip(found, after, strict=True))
    check["passed"] &= check["repeatable"]
    notes = [*case.notes]
    if 0 < case.reread_bytes <= clock.cache_bytes:
        notes.append("what is read in every step fits into the level 2 cache: the floor is not one here")
    # JSON has no NaN.
    check = {name: str(v) if isinstance(v, float) and not math.isfinite(v) else v for name, v in check.items()}
    return record(case.shape, times, check=check, torch_not_run=absent, notes=notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=150.0, help="what is not measured by then is left out")
    args = parser.parse_args()

    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu_kernels: torch {torch.__version__} sees no GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False  # torch's fp32 is what results are compared with
    end = time.monotonic() + args.seconds
    clock = CudaClock() if args.device == "cuda" else CpuClock()
    plan = full_plan() if args.device == "cuda" else tiny_plan()
    kernels = Kernels(args.library, clock)
    report: dict = {
        "method": "CUDA events, medians, kernel and torch in turn, level 2 cache flushed before every run; a kernel's "
        "ratio is floor time at the copy's bandwidth over the time of its CUDA graph",
        "torch": torch.__version__,
        "cuda_of_torch": torch.version.cuda,
        "level_2_cache_bytes": clock.cache_bytes,
        "multiprocessors": clock.multiprocessors,
        "copies": [],
        "kernels": {kernel: [] for kernel in plan},
        "not_run": [],
    }

    def save() -> None:
        aside = args.out.with_suffix(".part")
        aside.write_text(json.dumps(judge(report), indent=1) + "\n")
        aside.rename(args.out)

    failed = False
    copied = 1 << 30 if args.device == "cuda" else 1 << 12
    for kernel, shapes in plan.items():
        report["copies"].append(copy_bandwidth(clock, copied))
        for shape in shapes:
            row: dict = {"shape": vars(shape)}
            if time.monotonic() > end:
                report["not_run"].append({"kernel": kernel, **row, "why": "no time left"})
                continue
            if shape.memory_bytes() > clock.free_bytes():
                report["not_run"].append({"kernel": kernel, **row, "why": "does not fit into the free memory"})
                continue
            try:
                row = measure(CASES[kernel](shape, clock), kernels)
            except Exception as error:  # noqa: BLE001 - the next configuration may work, and what is measured stays
                row["error"] = f"{type(error).__name__}: {error}"[:500]
            report["kernels"][kernel].append(row)
            save()
            failed |= "error" in row or not row["check"]["passed"]
            print(_line(kernel, row), flush=True)
    report["copies"].append(copy_bandwidth(clock, copied))
    save()
    for name, verdict in report["verdicts"].items():
        print(f"{name}: {verdict['what']}: {verdict.get('worst', verdict.get('why'))} (wanted {verdict['required']})")
    return int(failed)


def _line(kernel: str, row: dict) -> str:
    shape = " ".join(f"{name}={value}" for name, value in row["shape"].items())
    if "error" in row:
        return f"{kernel:16} {shape}: {row['error']}"
    medians = ", ".join(f"{name} {time['median_us']:.1f}" for name, time in row["times"].items())
    right = "" if row["check"]["passed"] else f" WRONG {row['check']}"
    return f"{kernel:16} {shape}: {row.get('ratio', 0):.2f} of the floor; us: {medians}{right}"


if __name__ == "__main__":
    sys.exit(main())

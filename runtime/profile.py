"""Which machine and engines a bundle's profile of steps per second was measured on, and whether they are these."""

import os
import platform
from pathlib import Path

from dspark.cuda import require_gpu
from dspark.manifest import Machine, Measured, Sps
from dspark.runtime.engines.base import Engine
from dspark.tensorrt import BACKENDS as ON_GPU

_CPUINFO = Path("/proc/cpuinfo")


def this_machine(backend: str) -> Machine:
    """What engines of `backend` run on here."""
    if backend in ON_GPU:
        return Machine(require_gpu(f"backend {backend}").name, None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(_cpu(), cores)


def _cpu() -> str:
    """The model's name where the system tells it, else the kind of processor."""
    try:
        for line in _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, name = line.partition(":")
            if key.strip() == "model name" and name.strip():
                return name.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def these_engines(backend: str, target: Engine, drafter: Engine, threads: int | None) -> Measured:
    """threads: as for `load`."""
    files = {"target": target.sha256, "drafter": drafter.sha256}
    return Measured(backend, target.version, files, None if backend in ON_GPU else threads)


def command(folder: str | Path, engines: Measured, requests: int = 1) -> str:
    """The command line that profiles these engines here, for so many requests at once."""
    options = [] if engines.backend == "onnxruntime" else [f"--backend {engines.backend}"]
    options += [] if engines.threads is None else [f"--threads {engines.threads}"]
    options += [] if requests == 1 else [f"--max-batch-size {requests}"]
    return " ".join(["dspark profile", str(folder), *options])


def misfit(sps: Sps | None, machine: Machine, engines: Measured, requests: int = 1) -> str | None:
    """Why a profile says nothing about these engines on this machine, with so many requests; None where it does."""
    if sps is None:
        return f"has no profile of its steps per second{'' if requests == 1 else ' in batches'}"
    if sps.machine != machine:
        return f"its profile is of {_place(sps.machine)}, this is {_place(machine)}"
    was, now = sps.engine, engines
    if was.backend != now.backend:
        return f"its profile is of {was.backend}, not of {now.backend}"
    if was.version != now.version:
        return f"its profile is of {was.backend} {was.version}, {now.version} is installed"
    if was.threads != now.threads:
        return f"its profile is of {_threads(was)}, not of {_threads(now)}"
    if was.files != now.files:
        return "its profile is of other graphs or engines than it has now"
    if requests > max(1, len(sps.requests_draft_ms)):
        return f"its profile is of up to {len(sps.requests_draft_ms)} requests at once, not of {requests}"
    if requests > sps.table.tokens[-1]:
        return f"its profile ends at steps of {sps.table.tokens[-1]} tokens, {requests} requests take more"
    return None


def _place(machine: Machine) -> str:
    return machine.name if machine.cores is None else f"{machine.name} with {machine.cores} cores"


def _threads(engines: Measured) -> str:
    return "the default number of threads" if engines.threads is None else f"{engines.threads} threads"

"""The engines of a bundle by backend."""

from collections.abc import Sequence

from dspark.errors import UsageError
from dspark.manifest import CHUNK
from dspark.runtime.bundle import Bundle
from dspark.runtime.engines.base import Engine
from dspark.runtime.engines.onnxruntime import OnnxRuntimeEngine, form_of
from dspark.tensorrt import BACKENDS as TENSORRT

ONNXRUNTIME = "onnxruntime"
BACKENDS = (ONNXRUNTIME, *TENSORRT)
MOST_THREADS = 1024


def check_threads(threads: int | None, name: str = "threads") -> None:
    """UsageError for a number of threads that ONNX Runtime cannot take."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"{name} {threads}: must be from 1 to {MOST_THREADS}")


def open_engines(
    bundle: Bundle, roles: Sequence[str], backend: str, limit: int, threads: int | None = None, requests: int = 1
) -> list[Engine]:
    """The engine of every role, with caches for `requests` requests of `limit` tokens.

    threads: of ONNX Runtime, per run; None: one per core. UsageError: no such backend, or it does not run so many
    requests at once; DSparkError: it is not there, or the bundle has nothing for it.
    """
    if backend not in BACKENDS:
        raise UsageError(f"backend {backend!r}: not known; choose one of {', '.join(BACKENDS)}")
    if requests > 1 and backend != ONNXRUNTIME:
        raise UsageError(
            f"backend {backend}: a bundle's engines run one request at a time, not {requests}; use backend"
            f" {ONNXRUNTIME}, or one request"
        )
    # A step may write rows beyond those that are committed after it; they need room too.
    block_size = bundle.manifest.drafter.block_size
    ring_slack = max(CHUNK, block_size + 1)
    if backend == ONNXRUNTIME:
        slack = {role: bundle.manifest.graph(role, form_of(requests)).cache_slack * block_size for role in roles}
        return [OnnxRuntimeEngine(bundle, role, limit + slack[role], threads, ring_slack, requests) for role in roles]
    from dspark.runtime.engines.tensorrt import TensorRTEngine

    engines: list[TensorRTEngine] = []
    for role in roles:
        device = engines[0].device if engines else None  # one stream: they hand rows to each other
        engines.append(TensorRTEngine(bundle, role, limit + block_size, backend, device))
    return list(engines)

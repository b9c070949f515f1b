"""Bundle to tokens: `decoder = load("engines/"); decoder.generate("...")`. No torch."""

from dspark.errors import DSparkError, UsageError
from dspark.runtime.batch import Batch, QueueFull, Request
from dspark.runtime.decoder import Decoder, load, load_drafter
from dspark.runtime.draft import Draft, Drafter
from dspark.runtime.loop import Round
from dspark.runtime.metrics import Stats
from dspark.runtime.request import Chunk, Generation, Options
from dspark.runtime.serving import AsyncBatch
from dspark.runtime.session import Session

__all__ = [
    "AsyncBatch",
    "Batch",
    "Chunk",
    "DSparkError",
    "Decoder",
    "Draft",
    "Drafter",
    "Generation",
    "Options",
    "QueueFull",
    "Request",
    "Round",
    "Session",
    "Stats",
    "UsageError",
    "load",
    "load_drafter",
]

"""Bundle to tokens: `decoder = load("engines/"); decoder.generate("...")`. No torch."""

from dspark.runtime.decoder import Decoder, load, load_drafter
from dspark.runtime.draft import Draft, Drafter
from dspark.runtime.loop import Round
from dspark.runtime.metrics import Stats
from dspark.runtime.session import Chunk, Generation, Options, Session

__all__ = [
    "Chunk",
    "Decoder",
    "Draft",
    "Drafter",
    "Generation",
    "Options",
    "Round",
    "Session",
    "Stats",
    "load",
    "load_drafter",
]

"""Drafter checkpoints: one file per dialect, each giving a DrafterConfig and canonical tensors."""

from .checkpoint import EMBEDDING, HEAD, Checkpoint
from .detect import load_checkpoint

__all__ = ["EMBEDDING", "HEAD", "Checkpoint", "load_checkpoint"]

"""What every dialect loader returns."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.export.config import DrafterConfig

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A drafter as its checkpoint describes it, in canonical form.

    `tensors` are named as the parameters of `dspark.export.modules.Drafter`, memory-mapped in the checkpoint's dtype;
    EMBEDDING and HEAD are absent where the drafter uses the target's. `ignored` tensors carry no information.
    """

    dialect: str
    folder: Path
    config: DrafterConfig
    tensors: dict[str, "Tensor"]
    ignored: tuple[str, ...]
    files: tuple[Path, ...]  # everything that was read


def canonical_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a drafter of this config is made of, EMBEDDING and HEAD included, with its shape."""
    import torch

    from dspark.export.modules import Drafter

    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}

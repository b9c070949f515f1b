"""Which dialect a checkpoint speaks, told from its config alone; never guessed."""

from pathlib import Path
from typing import Any

from dspark.errors import UsageError

from . import deepspec
from .checkpoint import Checkpoint
from .files import CONFIG, Keys, read_json

# Recognised so that the message can say what the file is. None of them may be read as DeepSpec: their tap ids and
# block layouts mean other things, and a wrong guess costs acceptance without any error.
SPECULATORS = "speculators"
MODEL_OPTIMIZER = "Model-Optimizer"
ZLAB = "z-lab DFlash"
DEEPSEEK_V4 = "DeepSeek-V4 built-in"
GEMMA4 = "DeepSpec for Gemma4"


def dialect_of(raw: dict[str, Any]) -> str | None:
    """The dialect's name for a config.json, or None for one that no rule recognises."""
    architectures = raw.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if "speculators_model_type" in raw:
        return SPECULATORS
    if "dspark_block_size" in raw:
        return DEEPSEEK_V4
    if "Qwen3DSparkModel" in names:
        return deepspec.NAME
    if "Gemma4DSparkModel" in names:
        return GEMMA4
    nested = raw.get("dflash_config")
    if "DFlashDraftModel" in names and isinstance(nested, dict):
        return MODEL_OPTIMIZER if "projector_type" in nested else ZLAB
    return None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read the drafter checkpoint in `folder`: its config is checked, its tensors are mapped, none is loaded.

    Raises UsageError: unknown or unsupported dialect, a key or tensor that is missing, wrong or left over.
    """
    file = folder / CONFIG
    raw = read_json(file)
    dialect = dialect_of(raw)
    if dialect == deepspec.NAME:
        return deepspec.load(folder, Keys(file, raw))
    if dialect is not None:
        raise UsageError(f"{file}: a {dialect} checkpoint, not supported yet; supported: {deepspec.NAME} (Qwen3 kind)")
    found = f"architectures {raw['architectures']!r}" if "architectures" in raw else "no 'architectures' key"
    raise UsageError(
        f"{file}: not a drafter of a known dialect ({found}); supported: {deepspec.NAME}, architectures"
        " ['Qwen3DSparkModel']"
    )

"""A target's folder before transformers loads it: what is too large would be allocated before anyone compares it with
the tensors. A key that is not written down means what transformers takes for the family: published configs rely on it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from dspark.errors import UsageError
from dspark.export.checkpoints.files import CONFIG, INDEX, LARGEST, WEIGHTS, Keys, TensorFiles, read_json
from dspark.export.checkpoints.rope import check_rope

_EPS = {"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"}


def check_folder(folder: Path) -> None:
    """Raises UsageError naming the file and the key or the tensor; what transformers itself refuses it raises."""
    keys = Keys(folder / CONFIG, read_json(folder / CONFIG))
    # Weights in another format are transformers' to check.
    stored = TensorFiles(folder).shapes if (folder / WEIGHTS).exists() or (folder / INDEX).exists() else None
    for raw in (keys.raw, *(part for part in keys.raw.values() if isinstance(part, dict))):
        for key, value in raw.items():
            if type(value) is int and abs(value) > LARGEST:
                raise keys.fail(key, f"expected at most {LARGEST}, found {value}")
        part = Keys(keys.file, raw)
        for key in _EPS & raw.keys():
            part.number(key)
        if "max_position_embeddings" in raw:
            part.integer("max_position_embeddings")
        layers = raw.get("num_hidden_layers")
        if stored is not None and type(layers) is int and layers > len(stored):
            raise keys.fail("num_hidden_layers", f"{layers} layers, but the files hold only {len(stored)} tensors")
        check_ropes(raw, keys.fail)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):  # shapes without memory
        described = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    for name, tensor in described.items():
        found = None if stored is None else stored.get(name)
        if found is not None and found != tuple(tensor.shape):
            raise UsageError(
                f"{folder}: tensor {name!r} has shape {list(found)}, expected {list(tensor.shape)} by {CONFIG}"
            )


def check_ropes(raw: dict[str, Any], fail: Callable[[str, str], UsageError]) -> None:
    """`check_rope` on a transformers config, as JSON, in every spelling: also one rope_parameters per kind of layer."""
    check_rope(raw, fail)
    for source in ("rope_scaling", "rope_parameters"):
        rope = raw.get(source)
        if rope is not None and not isinstance(rope, dict):
            raise fail(source, f"expected an object, found {rope!r}")
        for part in (rope, *rope.values()) if rope else ():
            if isinstance(part, dict):
                check_rope(part, fail)

"""Drafter and target together: do they fit, and the drafter module with what it borrows from the target."""

import torch
from torch import Tensor

from dspark.errors import UsageError
from dspark.export.checkpoints import EMBEDDING, HEAD, Checkpoint
from dspark.export.modules import Drafter
from dspark.export.target import Target

_ROWS_AT_ONCE = 4096  # of a tensor compared or converted: what bounds the extra memory


def check_pair(checkpoint: Checkpoint, target: Target) -> None:
    """Raises UsageError naming the first size in which the two differ."""
    config = checkpoint.config
    sizes = {
        "hidden_size": (config.hidden_size, target.hidden_size),
        "vocab_size": (config.vocab_size, target.vocab_size),
        "num_target_layers": (config.num_target_layers, target.layers),
    }
    for name, (ours, theirs) in sizes.items():
        if ours != theirs:
            raise UsageError(
                f"{checkpoint.folder}: the drafter was made for a target with {name} {ours}, this target has {theirs};"
                " give the target it was trained on"
            )


def assemble(checkpoint: Checkpoint, target: Target) -> Drafter:
    """The drafter in fp32. Embedding and head are the target's own tensors wherever they hold the same values.

    Raises UsageError where drafter and target do not belong together.
    """
    check_pair(checkpoint, target)
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    with torch.device("meta"):  # no memory for weights that are replaced at once
        drafter = Drafter(config)
    state = {name: _convert(tensor) for name, tensor in tensors.items() if name not in (EMBEDDING, HEAD)}
    state[EMBEDDING] = _own_or_shared(tensors.get(EMBEDDING), target.embed_tokens)
    if HEAD in tensors or not config.reduced_vocab:
        state[HEAD] = _own_or_shared(tensors.get(HEAD), target.lm_head)
    else:
        state[HEAD] = target.lm_head[torch.arange(config.draft_vocab_size) + state["d2t"]]
    drafter.load_state_dict(state, assign=True)
    return drafter.eval().requires_grad_(False)


def _convert(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor.long()


def _own_or_shared(own: Tensor | None, targets: Tensor) -> Tensor:
    """The target's tensor if the checkpoint has none or an equal one (a frozen copy, as DeepSpec stores it)."""
    if own is None or (own.shape == targets.shape and _equal(own, targets)):
        return targets
    return _convert(own)


def _equal(a: Tensor, b: Tensor) -> bool:
    parts = zip(a.split(_ROWS_AT_ONCE), b.split(_ROWS_AT_ONCE), strict=True)
    return all(torch.equal(x.float(), y.float()) for x, y in parts)

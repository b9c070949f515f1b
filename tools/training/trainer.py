"""The training loop: frozen target, AdamW, resumable from its last checkpoint."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dspark.errors import DSparkError
from dspark.export.modules import Drafter

from .batches import Recipe, Sampler
from .blocks import losses, simulate
from .progress import Pace


def acceptance(drafter: Drafter, sampler: Sampler, lm_head: Tensor, limit: int | None = None) -> dict[str, dict]:
    """What `simulate` returns, by kind of text, over the first `limit` texts of each kind (None: all)."""
    kinds = sorted({text.kind for text in sampler.texts})
    return {k: simulate(drafter, sampler, [t for t in sampler.texts if t.kind == k][:limit], lm_head) for k in kinds}


def frozen_head(drafter: Drafter) -> Tensor:
    """The head as training and simulation multiply by it: bf16 [Vd, H], without gradient."""
    return drafter.lm_head.weight.detach().to(torch.bfloat16)


def train(
    drafter: Drafter,
    sampler: Sampler,
    recipe: Recipe,
    checkpoint: Path,
    evaluate: Callable[[], dict] | None = None,
    *,
    every: int = 250,
    log: Callable[[str], None] = print,
) -> None:
    """Train all but the target's embedding and head; write `checkpoint` every `every` steps and resume from it.

    Runs on the drafter's device. The checkpoint is {"model", "optimizer", "step"}; a resumed run gives the weights of
    an uninterrupted one, bit for bit on a CPU. DSparkError where the loss is not finite.
    """
    for part in (drafter.embed_tokens, drafter.lm_head):
        part.requires_grad_(False)
    device = drafter.lm_head.weight.device
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        drafter.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        log(f"resumed at step {first}")
    lm_head = frozen_head(drafter)
    pace, running = Pace(first), None
    for step in range(first, recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        batch = sampler.batch(step).to(device)
        loss, distance, _ = losses(drafter, batch, lm_head, recipe.objective)
        if not torch.isfinite(loss):
            raise DSparkError(f"training: the loss is {loss.item()} at step {step}; lower the learning rate")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        first_position = float(distance.view(-1, drafter.config.block_size)[:, 0].mean())
        running = first_position if running is None else 0.98 * running + 0.02 * first_position
        done = step + 1
        if done % 50 == 0:
            figures = f"loss {loss.item():.4f}  L1@1 {running:.4f}"
            log(f"step {done}/{recipe.steps}  {figures}  {pace.text(done, recipe.steps)}")
        if done % every == 0 or done == recipe.steps:
            state = {"model": drafter.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            aside = checkpoint.with_suffix(".tmp")
            torch.save(state, aside)
            os.replace(aside, checkpoint)
            if evaluate is not None:
                log(json.dumps({"step": done} | evaluate()))

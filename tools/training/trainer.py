"""The training loop: random anchors in every text, frozen target, AdamW, resumable from its last checkpoint."""

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from dspark.export.config import DrafterConfig
from dspark.export.modules import Drafter

from .features import Features, Text
from .loss import DistributionLoss, Targets, confidence_loss


@dataclass(frozen=True)
class Recipe:
    """Sizes are per step: `texts` texts with `anchors` random anchors each, every anchor a block of gamma positions."""

    steps: int = 5000
    texts: int = 8
    anchors: int = 32
    learning_rate: float = 1e-3
    warmup: int = 100
    cooldown: float = 0.3  # the last share of the steps, over which the rate falls to 0
    decay: float = 4.0  # of the position weights exp(-(k - 1) / decay)
    seed: int = 0
    max_context: int = 512

    def rate(self, step: int) -> float:
        cooldown = max(1, int(self.steps * self.cooldown))
        return self.learning_rate * min((step + 1) / self.warmup, max(0, self.steps - step) / cooldown, 1.0)


@dataclass(frozen=True)
class Batch:
    """B texts, A anchors each, S context rows, gamma = block positions; N = B * A * gamma."""

    taps: Tensor  # bf16 [B, S, m*H]
    anchors: Tensor  # int64 [B, A]
    tokens: Tensor  # int64 [B, A, gamma]: the block's inputs, anchor first
    previous: Tensor  # int64 [B, A, gamma]: the text's own tokens at the block's positions
    targets: Targets


class Sampler:
    """Draws batches from stored features; the draw of a step depends only on (seed, step)."""

    def __init__(self, features: Features, config: DrafterConfig, recipe: Recipe):
        self.features, self.config, self.recipe = features, config, recipe
        self.texts = [t for t in features.texts if t.length - t.prompt >= 2]
        self.to_draft = torch.full((config.vocab_size,), config.draft_vocab_size, dtype=torch.int64)
        self.weights = torch.exp(-torch.arange(config.block_size) / recipe.decay)

    def set_vocabulary(self, d2t: Tensor | None) -> None:
        index = torch.arange(self.config.draft_vocab_size)
        self.to_draft[index if d2t is None else index + d2t] = index

    def anchors_of(self, text: Text, generator: torch.Generator) -> Tensor:
        first, last = text.prompt, min(text.length, self.recipe.max_context) - 2
        return torch.randint(first, max(first, last) + 1, (self.recipe.anchors,), generator=generator)

    def batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + step)
        picks = torch.randint(len(self.texts), (self.recipe.texts,), generator=generator)
        texts = [self.texts[i] for i in picks]
        return self.collate(texts, torch.stack([self.anchors_of(t, generator) for t in texts]))

    def collate(self, texts: list[Text], anchors: Tensor) -> Batch:
        gamma, f = self.config.block_size, self.features
        context = int(anchors.max())
        rows = torch.arange(context)
        starts = torch.tensor([t.start for t in texts])
        ends = torch.tensor([t.start + t.length for t in texts])
        taps = f.taps[torch.minimum(starts[:, None] + rows, ends[:, None] - 1)]
        at = starts[:, None, None] + anchors[:, :, None] + torch.arange(gamma)  # row of each block position
        valid = at + 1 < ends[:, None, None]
        at = torch.minimum(at, ends[:, None, None] - 1)
        previous = f.tokens[at].long()
        tokens = torch.full_like(previous, self.config.mask_token_id)
        tokens[..., 0] = previous[..., 0]
        following = f.tokens[torch.minimum(at + 1, ends[:, None, None] - 1)].long()
        weight = (self.weights * valid).flatten()
        targets = Targets(
            ids=self.to_draft[f.top_ids[at].long()].flatten(0, 2),
            probs=f.top_probs[at].float().flatten(0, 2),
            label=self.to_draft[following].flatten(),
            weight=weight / weight.sum(),
        )
        return Batch(taps, anchors, tokens, previous, targets)


def dense_attend(anchors: Tensor, gamma: int, windows: tuple[int, ...]):
    """Block attention for training: block a of a text sees context rows before its anchor, and its own rows.

    anchors [B, A]; q, k, v [B, A*gamma, heads, D]; context [B, S, heads, D].
    """
    batch, count = anchors.shape

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        heads, dim, groups = q.shape[-2], q.shape[-1], q.shape[-2] // k.shape[-2]
        context = context_k.shape[1]
        column = torch.arange(context)
        seen = column < anchors[..., None]
        if windows and windows[layer]:
            seen &= column >= anchors[..., None] - windows[layer]

        def grouped(x: Tensor) -> Tensor:  # [B, T, Hkv, D] -> [B, Hkv, T, D]
            return x.transpose(1, 2)

        kv = k.shape[-2]
        queries = q.unflatten(-2, (kv, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G*T, D]
        scale = dim**-0.5
        outer = (queries @ grouped(context_k).transpose(-1, -2)) * scale
        outer = outer.view(batch, kv, groups, count, gamma, context)
        outer = outer.masked_fill(~seen[:, None, None, :, None, :], -torch.inf)
        blocks = queries.view(batch, kv, groups, count, gamma, dim)
        own_k, own_v = (grouped(x).view(batch, kv, 1, count, gamma, dim) for x in (k, v))
        inner = (blocks @ own_k.transpose(-1, -2)) * scale
        p = torch.cat((outer, inner), dim=-1).float().softmax(-1).to(q.dtype)
        mixed = p[..., :context].reshape(batch, kv, -1, context) @ grouped(context_v)
        mixed = mixed.view(batch, kv, groups, count, gamma, dim) + p[..., context:] @ own_v
        return mixed.permute(0, 3, 4, 1, 2, 5).reshape(batch, count * gamma, heads, dim)

    return attend


def block_states(drafter: Drafter, batch: Batch) -> Tensor:
    """Hidden states [B*A, gamma, H] of every block of a batch."""
    b, a, gamma = batch.tokens.shape
    positions = (batch.anchors[..., None] + torch.arange(gamma)).flatten(1)
    context_positions = torch.arange(batch.taps.shape[1]).expand(b, -1)
    attend = dense_attend(batch.anchors, gamma, drafter.config.windows)
    hidden = drafter.hidden(batch.tokens.flatten(1), batch.taps, positions, context_positions, attend)
    return hidden.view(b * a, gamma, -1)


def losses(drafter: Drafter, batch: Batch, lm_head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, L1 distance [N], confidence logits [N] or empty) of a batch."""
    gamma = batch.tokens.shape[-1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = block_states(drafter, batch)
        previous = batch.previous.view(-1, gamma)
        x, w2, markov = hidden.flatten(0, 1), None, drafter.markov_head
        if markov is not None:
            e = markov.teacher_forced(previous, hidden)
            x = torch.cat((x, e.flatten(0, 1).to(x.dtype)), dim=-1)
            w2 = markov.markov_w2.weight
        loss, distance = DistributionLoss.apply(x.to(lm_head.dtype), lm_head, w2, batch.targets)
    logits = torch.empty(0)
    if drafter.confidence_head is not None:
        embedding = None if markov is None else markov.markov_w1(previous)
        logits = drafter.confidence_head.logit(hidden.float(), embedding).flatten()
        loss = loss + confidence_loss(logits, distance, batch.targets.weight)
    return loss, distance, logits


@torch.no_grad()
def simulate(drafter: Drafter, sampler: Sampler, texts: list[Text], lm_head: Tensor) -> dict:
    """Greedy decoding of stored greedy texts: accepted drafts per round, walking from anchor to anchor.

    Returns {"rounds", "accepted", "acceptance_length", "per_position": acceptance given that all before were accepted}.
    """
    gamma = drafter.config.block_size
    reached, kept = torch.zeros(gamma), torch.zeros(gamma)
    rounds = accepted = emitted = 0
    for text in texts:
        anchors = torch.arange(text.prompt, text.length - 1)
        batch = sampler.collate([text], anchors[None])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = block_states(drafter, batch)
            base = (hidden.to(lm_head.dtype) @ lm_head.T).float()
        previous = batch.tokens[0, :, 0]
        state = None if drafter.markov_head is None else drafter.markov_head.start(hidden)
        drafts = []
        for k in range(gamma):
            logits = base[:, k]
            if drafter.markov_head is not None:
                embedding = drafter.markov_head.markov_w1(previous)
                state, e = drafter.markov_head.step(state, embedding, hidden[:, k].float())
                logits = logits + drafter.markov_head.markov_w2(e.float())
            index = logits.argmax(-1)
            previous = index if drafter.d2t is None else index + drafter.d2t[index]
            drafts.append(previous)
        tokens = sampler.features.tokens[text.start : text.start + text.length].long()
        follow = torch.stack([tokens[(anchors + 1 + k).clamp(max=text.length - 1)] for k in range(gamma)])
        inside = torch.stack([anchors + 1 + k < text.length for k in range(gamma)])
        right = ((torch.stack(drafts) == follow) & inside).int().cumprod(0).sum(0)
        at = 0
        while at < len(anchors):
            n = int(right[at])
            limit = min(gamma, len(anchors) - at)
            reached[: min(n + 1, limit)] += 1
            kept[:n] += 1
            step = min(n + 1, len(anchors) - at)
            rounds, accepted, emitted, at = rounds + 1, accepted + n, emitted + step, at + n + 1
    rates = [round(float(k / r), 4) if r else 0.0 for k, r in zip(kept, reached, strict=True)]
    return {"rounds": rounds, "accepted": accepted, "acceptance_length": emitted / max(1, rounds), "per_position": rates}


def initialise(drafter: Drafter, target: dict[str, Tensor], d2t: Tensor | None) -> None:
    """Start from the target: its embedding and head, its last layers, the last tap as the context."""
    config = drafter.config
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(target["embed_tokens"])
        head = target["lm_head"]
        if d2t is not None:
            drafter.d2t.copy_(d2t)
            head = head[torch.arange(config.draft_vocab_size) + d2t]
        drafter.lm_head.weight.copy_(head)
        drafter.norm.weight.copy_(target["norm"])
        h = config.hidden_size
        torch.nn.init.normal_(drafter.fc.weight, std=0.02 / math.sqrt(config.num_taps))
        drafter.fc.weight[:, -h:] += torch.eye(h)
        if drafter.markov_head is not None:
            # W1 as the embedding's leading directions: tokens alike start alike, the rare ones too.
            centred = target["embed_tokens"] - target["embed_tokens"].mean(0)
            _, _, directions = torch.linalg.svd(centred.T @ centred)
            w1 = centred @ directions[: config.markov_rank].T
            drafter.markov_head.markov_w1.weight.copy_(w1 / w1.std())
            torch.nn.init.zeros_(drafter.markov_head.markov_w2.weight)
        if drafter.confidence_head is not None:
            torch.nn.init.zeros_(drafter.confidence_head.proj.weight)
            torch.nn.init.zeros_(drafter.confidence_head.proj.bias)
        for name, value in target["layers"].items():
            parameter = dict(drafter.named_parameters()).get(name)
            if parameter is not None and parameter.shape == value.shape:
                parameter.copy_(value)


def train(
    drafter: Drafter, sampler: Sampler, recipe: Recipe, checkpoint: Path, evaluate=None, *, every: int = 250, log=print
) -> None:
    """Train all but the target's embedding and head; write `checkpoint` every `every` steps and resume from it."""
    for part in (drafter.embed_tokens, drafter.lm_head):
        part.requires_grad_(False)
    lm_head = drafter.lm_head.weight.detach().to(torch.bfloat16)
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        drafter.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        log(f"resumed at step {first}")
    began, running = time.monotonic(), None
    for step in range(first, recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        batch = sampler.batch(step)
        loss, distance, _ = losses(drafter, batch, lm_head)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()} at step {step}; lower the learning rate and resume")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        first_position = float(distance.view(-1, drafter.config.block_size)[:, 0].mean())
        running = first_position if running is None else 0.98 * running + 0.02 * first_position
        done = step + 1
        if done % 50 == 0:
            pace = (time.monotonic() - began) / (done - first)
            log(f"step {done}/{recipe.steps}  loss {loss.item():.4f}  L1@1 {running:.4f}  {pace:.2f} s/step")
        if done % every == 0 or done == recipe.steps:
            state = {"model": drafter.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            aside = checkpoint.with_suffix(".tmp")
            torch.save(state, aside)
            os.replace(aside, checkpoint)
            if evaluate is not None:
                log(json.dumps({"step": done} | evaluate()))

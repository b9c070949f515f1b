"""`dspark train` from prompts to checkpoint: three parts, each resumed where an interrupted run stopped."""

import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from dspark.errors import UsageError
from dspark.export.bundle import building
from dspark.export.config import DrafterConfig
from dspark.export.demo import DEMO, demo_target
from dspark.export.modules import Drafter
from dspark.export.target import load_target
from dspark.tools.prompts import read_prompts

from .batches import Recipe, Sampler
from .checkpoint import save_drafter
from .features import Features, write_features
from .progress import progress
from .responses import read_responses, write_responses
from .start import (
    choose_vocabulary,
    continue_from,
    default_taps,
    drafter_config,
    initialise,
    read_start,
    target_weights,
)
from .trainer import acceptance, frozen_head, train

EVALUATED = 25  # held-out texts of a kind that a training looks at on its way; the end looks at all

Log = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What to train from what. None: the default that fits the target."""

    target: str  # folder, hub id, GGUF file or "demo"
    prompts: Path
    heldout: Path | None
    out: Path
    work: Path  # responses, features and training checkpoints; runs with the same target and prompts share them
    recipe: Recipe
    layers: int = 2
    block_size: int = 7
    target_layer_ids: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    mask_token_id: int | None = None
    markov_head: str = "vanilla"
    markov_rank: int = 64
    max_new_tokens: int = 192
    start_from: Path | None = None  # a checkpoint folder of the same target


def run_training(job: Job, log: Log) -> dict:
    """Train and write `job.out`. Returns {"out", "steps", "heldout": {kind: what simulate returns}, "seconds", ...}."""
    if job.out.exists():
        raise UsageError(f"{job.out}: exists already; name another --out, or remove it")
    sets = {"train": job.prompts} | ({"heldout": job.heldout} if job.heldout else {})
    prompts = {name: read_prompts(file) for name, file in sets.items()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = _Stopwatch()
    log(f"loading the target {job.target}")
    model, tokenizer = load(job.target, torch.bfloat16)
    config = configure(job, model.config, tokenizer)
    start = read_start(job.start_from, config) if job.start_from else None
    claim(job)
    model.to(device)
    for name in sets:
        write_responses(
            model,
            tokenizer,
            prompts[name],
            job.work / f"{name}.jsonl",
            max_new_tokens=job.max_new_tokens,
            progress=progress(log, f"{name}: responses"),
        )
    clock.lap("responses")
    features = {name: features_of(job.work, name, model, config, log) for name in sets}
    clock.lap("features")
    del model

    log("making the drafter from the target")
    if start is None:
        d2t = choose_vocabulary(features["train"].tokens, config.draft_vocab_size, config.vocab_size)
    else:
        d2t = start.tensors.get("d2t")
    drafter = new_drafter(job, config, d2t)
    if start is not None:
        continue_from(drafter, start)
    drafter.to(device)
    samplers = {name: sampler_of(part, config, job.recipe, d2t) for name, part in features.items()}
    lm_head = frozen_head(drafter)

    def evaluate(limit: int | None = EVALUATED) -> dict:
        return acceptance(drafter, samplers["heldout"], lm_head, limit) if "heldout" in samplers else {}

    tokens = len(features["train"].tokens)
    checkpoint = job.work / f"training-{job.markov_head}-{fingerprint(config, job.recipe, tokens, job.start_from)}.pt"
    log(f"training on {tokens} tokens")
    train(drafter, samplers["train"], job.recipe, checkpoint, evaluate, log=log)
    if "heldout" in samplers:
        log("simulated decoding of all held-out texts")
    heldout = evaluate(None)
    clock.lap("training")
    with building(job.out) as aside:
        save_drafter(drafter, aside)
    return {
        "out": str(job.out),
        "device": device.type,
        "steps": job.recipe.steps,
        "tokens": tokens,
        "parameters": sum(p.numel() for p in drafter.parameters() if p.requires_grad),
        "heldout": heldout,
        "seconds": clock.laps,
    }


def load(target: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer) of a target, on the CPU in `dtype`, with transformers' own attention."""
    found = load_target(demo_target() if target == DEMO else target, dtype)
    found.model.set_attn_implementation("sdpa")
    with tempfile.TemporaryDirectory() as folder:
        for name, data in found.files.items():
            (Path(folder) / name).write_bytes(data)
        return found.model, AutoTokenizer.from_pretrained(folder)


def configure(job: Job, target: Any, tokenizer: Any) -> DrafterConfig:
    """The drafter's configuration for the target's transformers config; UsageError where an option does not fit."""
    mask = tokenizer.mask_token_id if job.mask_token_id is None else job.mask_token_id
    if mask is None:
        raise UsageError(f"{job.target}: the tokenizer has no mask token; give --mask-token-id an id that no text uses")
    return drafter_config(
        target,
        layers=job.layers,
        block_size=job.block_size,
        target_layer_ids=job.target_layer_ids or default_taps(target.num_hidden_layers),
        mask_token_id=mask,
        draft_vocab_size=job.draft_vocab_size or target.vocab_size,
        markov_head_type=job.markov_head,
        markov_rank=job.markov_rank,
    )


def claim(job: Job) -> None:
    """Make the work folder, or check that it was made for the same target and length of responses."""
    job.work.mkdir(parents=True, exist_ok=True)
    file = job.work / "work.json"
    made_for = {"target": job.target, "max_new_tokens": job.max_new_tokens}
    if not file.exists():
        file.write_text(json.dumps(made_for, indent=2) + "\n", encoding="utf-8")
    found = json.loads(file.read_text(encoding="utf-8"))
    if found != made_for:
        raise UsageError(f"{file}: made for {found}, this run wants {made_for}; give another --work folder")


def features_of(work: Path, name: str, model: Any, config: DrafterConfig, log: Log) -> Features:
    """The stored features of `name`.jsonl, written first where there are none."""
    folder, responses = work / name, read_responses(work / f"{name}.jsonl")
    if not folder.exists() or len(Features(folder).texts) != len(responses):  # none yet, or prompts were added
        show = progress(log, f"{name}: features")
        write_features(model, responses, config.target_layer_ids, folder, progress=show)
    features = Features(folder)
    if features.target_layer_ids != config.target_layer_ids:
        taps = ",".join(map(str, features.target_layer_ids))
        raise UsageError(f"{folder}: holds features of taps {taps}; give --taps {taps}, or another --work folder")
    return features


def new_drafter(job: Job, config: DrafterConfig, d2t: torch.Tensor | None) -> Drafter:
    """A drafter that starts from the target; what is random comes from the recipe's seed."""
    model, _ = load(job.target, torch.float32)
    torch.manual_seed(job.recipe.seed)
    drafter = Drafter(config)
    initialise(drafter, target_weights(model, config.num_hidden_layers), d2t)
    return drafter


def sampler_of(features: Features, config: DrafterConfig, recipe: Recipe, d2t: torch.Tensor | None) -> Sampler:
    sampler = Sampler(features, config, recipe)
    sampler.set_vocabulary(d2t)
    return sampler


def fingerprint(config: DrafterConfig, recipe: Recipe, tokens: int, start_from: Path | None) -> str:
    """8 hex digits that tell drafters, recipes, amounts of data and starts apart: only the same training resumes."""
    parts = [dataclasses.asdict(config), dataclasses.asdict(recipe), tokens, str(start_from or "")]
    all_of_it = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(all_of_it.encode()).hexdigest()[:8]


class _Stopwatch:
    """Seconds of consecutive parts."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = round(now - self.last, 1)
        self.last = now

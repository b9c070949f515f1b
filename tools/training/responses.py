"""The training's texts: the target's own greedy answers to prompts, one JSON line each, appended batch by batch."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from dspark.errors import UsageError
from dspark.tools.prompts import Prompt


def read_responses(file: Path) -> list[dict]:
    """The responses of a file: {"id", "kind", "prompt": [ids], "response": [ids]} each; [] where there is no file.

    A last line that an interrupted write left incomplete is cut off the file.
    """
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        file.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]


def encode(tokenizer: Any, prompt: str | list[int]) -> list[int]:
    """A user's turn in the tokenizer's chat template, or the plain text where it has none; token ids as they are."""
    if isinstance(prompt, list):
        return prompt
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    turn = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)


def write_responses(
    model: Any,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    file: Path,
    *,
    max_new_tokens: int,
    batch_size: int = 128,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Append the target's greedy responses to those of `prompts` that `file` does not answer yet.

    A response ends after the target's stop token or after `max_new_tokens`. Prompts of like length go together.
    `progress(prompts done, prompts)` is called per batch. UsageError where the file answers other prompts.
    """
    wanted = {p.id: (p, encode(tokenizer, p.prompt)) for p in prompts}
    for name, (p, ids) in wanted.items():
        if not ids:
            raise UsageError(f"{p.where}: prompt {name!r} is empty; leave it out")
        for token in ids:
            if not 0 <= token < model.config.vocab_size:
                size = model.config.vocab_size
                raise UsageError(f"{p.where}: prompt {name!r}: token {token}, but the target has ids 0 to {size - 1}")
    done = {r["id"]: r["prompt"] for r in read_responses(file)}
    if any(name not in wanted or wanted[name][1] != ids for name, ids in done.items()):
        raise UsageError(f"{file}: holds responses to other prompts; give another --work folder, or remove the file")
    todo = sorted((row for name, row in wanted.items() if name not in done), key=lambda row: len(row[1]))
    stop = model.generation_config.eos_token_id
    stops = {stop} if isinstance(stop, int) else set(stop or ())
    if progress:
        progress(len(done), len(wanted))
    with open(file, "ab") as out:
        for at in range(0, len(todo), batch_size):
            batch = todo[at : at + batch_size]
            answers = generate(model, [ids for _, ids in batch], max_new_tokens, stops)
            rows = (
                {"id": p.id, "kind": p.kind, "prompt": ids, "response": answer}
                for (p, ids), answer in zip(batch, answers, strict=True)
            )
            # One write a batch, so that an interruption hardly ever leaves a part of one.
            out.write("".join(json.dumps(row) + "\n" for row in rows).encode())
            out.flush()
            if progress:
                progress(len(done) + at + len(batch), len(wanted))


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]], max_new_tokens: int, stops: set[int]) -> list[list[int]]:
    """Greedy continuations of left-padded prompts, each cut after its first stop token."""
    width = max(map(len, prompts))
    pad = min(stops, default=0)
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    rows = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=pad,
    )[:, width:].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]

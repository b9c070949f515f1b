"""Prompts on disk: JSON lines {"prompt", "id", "kind"}."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from dspark.errors import UsageError


@dataclass(frozen=True)
class Prompt:
    id: str
    kind: str  # figures are reported by kind
    prompt: str | list[int]  # text, or token ids
    where: str = field(default="", compare=False)  # file and line, for errors


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file. `id` is the line's number and `kind` "text" where a line has none.

    UsageError names the file and the line that is wrong.
    """
    try:
        # Not splitlines: a text may hold other characters that end a line for Python, and JSON takes them as they are.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read ({error}); name a file of JSON lines with prompts") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row["prompt"]
            if not isinstance(prompt, str) and not all(type(token) is int for token in prompt):
                raise TypeError("prompt is neither text nor token ids")
            if not prompt:
                raise ValueError("the prompt is empty")
            where = f"{file}: line {number}"
            prompts.append(Prompt(str(row.get("id", number)), str(row.get("kind", "text")), prompt, where))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UsageError(f'{file}: line {number}: expected {{"prompt", "id", "kind"}} ({error})') from error
    if not prompts:
        raise UsageError(f"{file}: holds no prompt")
    if len({p.id for p in prompts}) < len(prompts):
        raise UsageError(f"{file}: two prompts have the same id; results are told apart by it")
    return prompts

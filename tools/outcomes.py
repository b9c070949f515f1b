"""What `dspark calibrate` fits on: real rounds of the full block, with what became of every draft, prompt by prompt."""

import random
from collections.abc import Callable, Sequence

import numpy as np

from dspark.errors import UsageError
from dspark.runtime import Decoder
from dspark.runtime.loop import Round
from dspark.tools.calibration import Outcomes
from dspark.tools.measure import Prompt


def collect(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    temperature: float = 0.0,
    progress: Callable[[int, int], None] = lambda prompts, rounds: None,
) -> list[Outcomes]:
    """Answer every prompt and return its rounds' outcomes. Greedy, or by the rule `exact` at a temperature above 0.

    progress: called after each prompt with the numbers of prompts and rounds so far.
    """
    options: dict = {"max_new_tokens": max_new_tokens, "draft_len": decoder.manifest.drafter.block_size}
    options |= {"scheduler": "off", "read_confidence": True}
    found: list[Outcomes] = []
    for number, prompt in enumerate(prompts):
        if temperature != 0:
            options |= {"temperature": temperature, "sampling": "exact", "seed": 0, "request": number}
        rounds: list[Round] = []
        decoder.generate(prompt.tokens, on_round=rounds.append, **options)
        found.append(outcomes(rounds, decoder.manifest.drafter.block_size))
        progress(len(found), sum(map(len, found)))
    return found


def outcomes(rounds: Sequence[Round], block_size: int) -> Outcomes:
    """Of the rounds that drafted a whole block.

    The outcome of a draft is known where it was verified. If an accepted draft ended the text, nobody judged the ones
    behind it, though they may have been shown to the target.
    """
    drafted = [done for done in rounds if len(done.drafts) == block_size and done.confidences is not None]
    known = [r.accepted if len(r.emitted) == r.accepted else r.verified for r in drafted]
    confidence = np.array([r.confidences for r in drafted], np.float64).reshape(len(drafted), block_size)
    return Outcomes(confidence, np.array(known, int), np.array([r.accepted for r in drafted], int))


def join(parts: Sequence[Outcomes]) -> Outcomes:
    """All rounds of several prompts."""
    names = ("confidence", "known", "accepted")
    return Outcomes(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def sample(prompts: Sequence, limit: int | None, seed: int) -> list:
    """At most `limit` of the prompts, drawn at random, in their order."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[i] for i in sorted(random.Random(seed).sample(range(len(prompts)), limit))]


def split(prompts: Sequence, fraction: float, seed: int) -> tuple[list, list]:
    """(to fit on, held out): a random `fraction` of the prompts is held out, at least one of either kind.

    UsageError: the fraction is not between 0 and 1, or there is one prompt alone.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"--holdout {fraction:g}: must lie between 0 and 1")
    if len(prompts) < 2:
        raise UsageError("--holdout: at least two prompts are needed, one to fit on and one to hold out")
    count = min(max(1, round(fraction * len(prompts))), len(prompts) - 1)
    out = set(random.Random(seed).sample(range(len(prompts)), count))
    return [p for i, p in enumerate(prompts) if i not in out], [p for i, p in enumerate(prompts) if i in out]

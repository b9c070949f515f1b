"""What `dspark bench` measures: the same prompts under several settings, side by side, with the texts compared."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark.errors import DSparkError, UsageError
from dspark.runtime import Decoder, Generation
from dspark.runtime.random import COUPLED, Streams
from dspark.runtime.sampling import Penalties, Sampling, law_of
from dspark.tools import prompts as disk

PLAIN = "plain"
USELESS = "the target accepted no draft at all: the drafter does not fit the target, or is untrained"
NEAR_TIE = 1e-4  # argmax gap below which batched and single-row forwards may round to different tokens


@dataclass(frozen=True)
class Prompt:
    id: str
    kind: str
    tokens: list[int]


@dataclass(frozen=True)
class Setting:
    """One way to generate: a name and `Options` fields. comparable: its text has to be the plain one."""

    name: str
    options: dict = field(default_factory=dict)
    comparable: bool = True


@dataclass(frozen=True)
class Run:
    prompt: Prompt
    setting: Setting
    generation: Generation


@dataclass(frozen=True)
class Difference:
    """A text that is not the plain one. A near-tie is rounding; anything else is a fault."""

    prompt: str
    setting: str
    position: int  # of the first token that differs, in the answer
    gap: float | None  # between the two largest logits there; None: there is no second
    near_tie: bool


def encode_prompts(prompts: Sequence[disk.Prompt], decoder: Decoder, per_kind: int | None) -> list[Prompt]:
    """Token ids of the prompts; text goes through the chat template if there is one. per_kind: so many of each kind.

    UsageError names the line and the id of a prompt that cannot be run.
    """
    chat = decoder.tokenizer is not None and decoder.tokenizer.has_chat_template
    counts: dict[str, int] = {}
    encoded: list[Prompt] = []
    for row in prompts:
        counts[row.kind] = counts.get(row.kind, 0) + 1
        if per_kind is None or counts[row.kind] <= per_kind:
            as_chat = chat and isinstance(row.prompt, str)
            prompt = [{"role": "user", "content": row.prompt}] if as_chat else row.prompt
            try:
                tokens = decoder.encode(prompt)
            except UsageError as error:
                raise UsageError(f"{row.where}: id {row.id!r}: {error}") from error
            if not 1 <= len(tokens) <= decoder.context_limit:
                raise UsageError(
                    f"{row.where}: id {row.id!r}: the prompt makes {len(tokens)} tokens, this bundle takes 1 to"
                    f" {decoder.context_limit}; change it or leave it out"
                )
            encoded.append(Prompt(row.id, row.kind, tokens))
    return encoded


def measure(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    max_new_tokens: int,
    progress: Callable[[Run], None] | None = None,
) -> list[Run]:
    """Run every prompt under every setting. Settings alternate prompt by prompt, and who goes first changes, so that a
    slower or faster minute of the machine falls on all of them alike."""
    for setting in settings:  # first runs allocate and touch memory
        decoder.generate(prompts[0].tokens, max_new_tokens=min(8, max_new_tokens), **setting.options)
    runs = []
    for number, prompt in enumerate(prompts):
        for index in range(len(settings)):
            setting = settings[(number + index) % len(settings)]
            generation = decoder.generate(prompt.tokens, max_new_tokens=max_new_tokens, **setting.options)
            runs.append(Run(prompt, setting, generation))
            if progress is not None:
                progress(runs[-1])
    return runs


def compare(decoder: Decoder, runs: Sequence[Run]) -> list[Difference]:
    """Every text that has to be the plain one of the same prompt against it."""
    plain = {run.prompt.id: run for run in runs if run.setting.name == PLAIN}
    differences = []
    for run in runs:
        ours, reference = run.generation.token_ids, plain[run.prompt.id].generation.token_ids
        if ours == reference or not run.setting.comparable:
            continue
        shorter = min(len(ours), len(reference))
        position = next((i for i in range(shorter) if ours[i] != reference[i]), shorter)
        tokens = [*run.prompt.tokens, *reference[:position]]
        options = plain[run.prompt.id].setting.options
        gap = _gap(decoder.session().next_logits(tokens), tokens, len(run.prompt.tokens), options)
        # What tokens race by at a low temperature are logits magnified by it, rounding included.
        near_tie = gap is not None and gap < NEAR_TIE * max(1, 1 / (options.get("temperature") or 1))
        differences.append(Difference(run.prompt.id, run.setting.name, position, gap, near_tie))
    return differences


def _gap(logits: np.ndarray, tokens: Sequence[int], prompt: int, options: dict) -> float | None:
    """How far the chosen token after `tokens` is ahead of the second: in logits, or in what they race by at a
    temperature above 0. None: there is no second. prompt: how many of the tokens are not the answer's."""
    sampling = Sampling(**{f.name: options[f.name] for f in dataclasses.fields(Sampling) if f.name in options})
    scores = logits
    if Penalties.wanted(sampling):
        scores = Penalties(sampling, tokens[:prompt])(tokens, logits.copy())
    if sampling.temperature:
        law = law_of(scores, sampling)
        noise = Streams(options["seed"]).gumbel(COUPLED, len(tokens), len(logits))
        with np.errstate(divide="ignore"):
            scores = np.log(law.p) + noise[law.tokens]
    scores = np.sort(scores[np.isfinite(scores)])[-2:]
    return float(scores[1] - scores[0]) if len(scores) == 2 else None


def described(difference: Difference) -> str:
    d, reason = difference, "a near-tie" if difference.near_tie else "NOT a near-tie: a fault"
    return f"{d.prompt}, {d.setting}: differs from plain at token {d.position}, gap {short(d.gap)}, {reason}"


def short(gap: float | None) -> str:
    return "none" if gap is None else f"{gap:.2g}"


def comparisons(runs: Sequence[Run], differences: Sequence[Difference]) -> list[dict]:
    """Every speculative run: how its rounds were committed, what they saved, and where its text first differs."""
    found = {(d.prompt, d.setting): d for d in differences}
    rows = []
    for run in runs:
        if run.setting.name == PLAIN:
            continue
        stats, difference = run.generation.stats, found.get((run.prompt.id, run.setting.name))
        rows.append(
            {
                "prompt": run.prompt.id,
                "setting": run.setting.name,
                "direct_full_commits": stats.direct_full_commits,
                "direct_partial_commits": stats.direct_partial_commits,
                "replay_fallbacks": stats.replay_fallbacks,
                "net_saved": stats.net_saved,
                "output_match": difference is None if run.setting.comparable else None,
                "first_difference": None if difference is None else difference.position,
                "gap": None if difference is None else difference.gap,
            }
        )
    return rows


def report(decoder: Decoder, runs: Sequence[Run]) -> dict:
    """The measurement as JSON: {"settings": {name: {kind or "all": figures}}, "differences": [...], "warnings": [...]}.

    DSparkError when nothing was drafted: such a run would compare plain decoding with itself.
    """
    drafting = [run.generation.stats for run in runs if run.setting.name != PLAIN]
    if not sum(stats.drafted for stats in drafting):
        raise DSparkError("bench: nothing was drafted, so there is nothing to compare; raise --max-new-tokens")
    warnings = []
    if not sum(stats.accepted for stats in drafting):
        warnings.append(USELESS)
    differences = compare(decoder, runs)
    warnings += map(described, differences)
    names = dict.fromkeys(run.setting.name for run in runs)
    kinds = ["all", *dict.fromkeys(run.prompt.kind for run in runs)]
    settings: dict[str, dict] = {}
    for name in names:
        settings[name] = {}
        for kind in kinds:
            chosen = [r for r in runs if r.setting.name == name and kind in ("all", r.prompt.kind)]
            settings[name][kind] = _figures(chosen)
    for name in names:
        for kind, figures in settings[name].items():
            plain = settings[PLAIN][kind]
            figures["ratio_to_plain"] = figures["tokens_per_second"] / plain["tokens_per_second"]
            decode, reference = figures["decode_tokens_per_second"], plain["decode_tokens_per_second"]
            figures["decode_ratio_to_plain"] = decode / reference if decode and reference else None
    return {
        "settings": settings,
        "differences": [dataclasses.asdict(d) for d in differences],
        "comparisons": comparisons(runs, differences),
        "warnings": warnings,
    }


def _figures(runs: Sequence[Run]) -> dict:
    """Sums over prompts first, quotients after: a long answer weighs more than a short one."""
    stats = [run.generation.stats for run in runs]

    def total(name: str) -> float:
        return sum(getattr(s, name) for s in stats)

    def per_position(name: str) -> list[int]:
        width = max(len(getattr(s, name)) for s in stats)
        return [sum(getattr(s, name)[k] for s in stats if k < len(getattr(s, name))) for k in range(width)]

    rounds, verified, emitted = total("rounds"), total("verified"), total("emitted")
    accepted_at, verified_at = per_position("accepted_per_position"), per_position("verified_per_position")
    decode_ms = sum(s.decode_ms for s in stats if s.rounds)
    decoded = emitted - len(stats)  # the prefill gives each answer its first token
    return {
        "prompts": len(runs),
        "tokens": emitted,
        "rounds": rounds,
        "drafted": total("drafted"),
        "verified": verified,
        "accepted": total("accepted"),
        "acceptance_length": decoded / rounds if rounds else None,
        "accept_rate": total("accepted") / verified if verified else None,
        "verified_per_round": verified / rounds if rounds else None,
        # Of the rounds in which draft k was verified, how many accepted it (and so all before it).
        "acceptance_per_position": [a / v if v else None for a, v in zip(accepted_at, verified_at, strict=True)],
        "tokens_per_second": emitted / total("total_ms") * 1e3,
        "decode_tokens_per_second": decoded / decode_ms * 1e3 if decoded else None,
        "prefill_ms": total("prefill_ms") / len(stats),
        "draft_ms_per_round": total("draft_ms") / rounds if rounds else None,
        "verify_ms_per_round": total("verify_ms") / rounds if rounds else None,
        "outside_share": 1 - total("engine_ms") / decode_ms if decoded else None,
    }

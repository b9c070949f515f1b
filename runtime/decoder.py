"""The front door: `load` a bundle, get a `Decoder`."""

from collections.abc import Iterator, Sequence
from numbers import Real
from pathlib import Path

import numpy as np

from dspark.errors import UsageError
from dspark.manifest import Manifest
from dspark.runtime import profile
from dspark.runtime.batch import PREFILL, QUEUE, Batch
from dspark.runtime.bundle import Bundle, open_bundle, read_draft_tokens
from dspark.runtime.draft import Drafter
from dspark.runtime.engines.base import NOISE, Engine
from dspark.runtime.engines.open import ONNXRUNTIME, check_threads, open_engines
from dspark.runtime.request import Chunk, Generation, OnRound, Prompt, check_number
from dspark.runtime.schedule import make_scheduler
from dspark.runtime.session import Session
from dspark.runtime.throughput import SpsTable
from dspark.runtime.tokens import Tokenizer, load_tokenizer
from dspark.runtime.verify import DraftVocabulary

MOST_REQUESTS = 1024


def load(
    folder: str | Path,
    *,
    backend: str = ONNXRUNTIME,
    threads: int | None = None,
    max_context_len: int | None = None,
    max_batch_size: int | None = 1,
) -> "Decoder":
    """Open a bundle and load its engines.

    backend: onnxruntime (on the CPU), or tensorrt or tensorrt-rtx where the bundle has engines for them. threads: per
    engine run on the CPU; None: one per core. max_context_len: a smaller context limit than the bundle's, in tokens.
    max_batch_size: requests at once, for `Decoder.batch`; with more than 1 other graphs of the bundle are used, and
    each request has caches of its own; None: as many as the bundle was exported for. UsageError when the bundle is
    damaged or an option is out of range; DSparkError when the backend is missing.
    """
    bundle, limit = _open(folder, threads, max_context_len)
    if max_batch_size is None:
        max_batch_size = bundle.manifest.profiles.max_batch_size
    check_number("max batch size", max_batch_size)
    if not 1 <= max_batch_size <= MOST_REQUESTS:
        raise UsageError(f"max batch size {max_batch_size}: must be from 1 to {MOST_REQUESTS}")
    target, drafter = open_engines(bundle, ("target", "drafter"), backend, limit, threads, max_batch_size)
    tokenizer, draft_tokens = load_tokenizer(bundle), read_draft_tokens(bundle)
    decoder = Decoder(bundle.manifest, target, drafter, tokenizer, limit, draft_tokens)
    sps = bundle.manifest.sps if max_batch_size == 1 else bundle.manifest.batch_sps
    engines = profile.these_engines(backend, target, drafter, threads)
    why = profile.misfit(sps, profile.this_machine(backend), engines, max_batch_size)
    if sps is not None and why is None:
        alone = sps.draft_ms[bundle.manifest.profiles.draft_len - 1]
        seconds = tuple(ms / 1e3 for ms in sps.requests_draft_ms or (alone,))
        fewer = tuple(SpsTable(t.tokens, t.steps_per_second, requests=t.requests) for t in sps.fewer)
        decoder.sps = SpsTable(sps.table.tokens, sps.table.steps_per_second, seconds, sps.table.requests, fewer)
    command = profile.command(folder, engines, max_batch_size)
    decoder.no_sps = why and f"bundle {folder}: {why}; make one: {command}"
    return decoder


def load_drafter(
    folder: str | Path,
    *,
    backend: str = ONNXRUNTIME,
    threads: int | None = None,
    max_context_len: int | None = None,
) -> Drafter:
    """The drafter of a bundle alone, for one request of a service that runs its target elsewhere. As for `load`."""
    bundle, limit = _open(folder, threads, max_context_len)
    (engine,) = open_engines(bundle, ("drafter",), backend, limit, threads)
    return Drafter(engine, bundle.manifest.drafter, limit)


def _open(folder: str | Path, threads: int | None, max_context_len: int | None) -> tuple[Bundle, int]:
    """The checked bundle and the context limit."""
    bundle = open_bundle(folder)
    most = bundle.manifest.profiles.max_context_len
    limit = most if max_context_len is None else max_context_len
    if not 1 <= limit <= most:
        raise UsageError(f"context limit {limit}: this bundle takes 1 to {most}")
    check_threads(threads)
    return bundle, limit


class Decoder:
    """A target and a drafter engine with what a request needs to know about them. Not for two threads at once."""

    def __init__(
        self,
        manifest: Manifest,
        target: Engine,
        drafter: Engine,
        tokenizer: Tokenizer | None,
        context_limit: int,
        draft_tokens: np.ndarray | None = None,
    ):
        """draft_tokens int64 [Vd]: the token of every draft index; None: they are the same, or nobody knows."""
        self.manifest = manifest
        self.target_engine = target
        self.drafter_engine = drafter
        self.tokenizer = tokenizer
        self.context_limit = context_limit
        self.stops = frozenset(manifest.target.stop_token_ids)
        size, known = manifest.drafter.draft_vocab_size, manifest.target.vocab_size
        self.vocabulary = DraftVocabulary(size) if draft_tokens is None else DraftVocabulary.of(draft_tokens, known)
        # Drawn drafts need noise as an input of the drafter, and their tokens' indices to look up q.
        self.can_draw = NOISE in drafter.inputs and (draft_tokens is not None or size == known)
        self.sps: SpsTable | None = None  # the profile of the target engine; None: not measured
        self.no_sps: str | None = None  # why there is none for these engines on this machine, and what to do
        self.calibration = manifest.calibration  # of the confidences; None: they are taken as they are
        self.owner: Session | Batch | None = None  # whose state the engines' caches hold

    def batch(
        self,
        scheduler: str | None = None,
        *,
        confidence_threshold: float | None = None,
        draft_len: int | None = None,
        max_queue: int = QUEUE,
        prefill: int = PREFILL,
    ) -> Batch:
        """Many requests at once, on engines loaded with `max_batch_size`; see `Batch` for the other arguments.

        scheduler: one of SCHEDULERS, for all requests together; None: `throughput` where the bundle has a profile of
        these engines and the drafter has confidences, else `threshold` with a threshold, else as for a request.
        """
        if confidence_threshold is not None:
            check_number("confidence threshold", confidence_threshold, Real)
        has_confidence = self.manifest.drafter.confidence.enabled
        if scheduler is None and confidence_threshold is None and has_confidence and self.sps is not None:
            scheduler = "throughput"
        chosen = make_scheduler(
            scheduler, confidence_threshold, has_confidence, "coupled", self.sps, self.calibration, self.no_sps
        )
        return Batch(self, chosen, draft_len=draft_len, max_queue=max_queue, prefill=prefill)

    def session(self) -> Session:
        """A new conversation."""
        return Session(self)

    def generate(self, prompt: Prompt, *, on_round: OnRound | None = None, **options) -> Generation:
        """Answer one prompt; see `Session.generate` and `Session.stream` for the arguments."""
        return self.session().generate(prompt, on_round=on_round, **options)

    def stream(self, prompt: Prompt, **options) -> Iterator[Chunk]:
        """Answer one prompt in pieces; see `Session.stream`."""
        return self.session().stream(prompt, **options)

    def encode(self, prompt: Prompt, *, first: bool = True) -> list[int]:
        """Token ids of a prompt.

        prompt: text (with the tokenizer's own special tokens where it is the `first` of a conversation), chat messages
        [{"role", "content"}] through the model's template, or token ids. UsageError for ids out of range, whoever gave
        them, and for text where the bundle has no tokenizer.
        """
        if isinstance(prompt, str):
            # An empty text stays empty, even where the tokenizer would put a begin-of-text token in front.
            return self._checked(self._tokenizer().encode(prompt, add_special_tokens=first)) if prompt else []
        if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes):
            raise UsageError(f"prompt: {type(prompt).__name__}: give text, token ids or chat messages")
        messages = [item for item in prompt if isinstance(item, dict)]
        if messages and len(messages) < len(prompt):
            raise UsageError("prompt: chat messages beside something else; give text, token ids or messages alone")
        if messages:
            return self._checked(self._tokenizer().encode_chat(messages))
        for token in prompt:
            check_number("prompt: token", token)
        return self._checked([int(token) for token in prompt], given=True)  # type: ignore[arg-type]

    def check_room(self, size: int) -> None:
        """UsageError where a prompt of `size` tokens is empty, or more than the context limit."""
        if not size:
            raise UsageError("the prompt is empty: give at least one token")
        if size > self.context_limit:
            raise UsageError(
                f"the prompt makes {size} tokens, the context limit of this bundle is {self.context_limit}: shorten it"
            )

    def _checked(self, ids: list[int], given: bool = False) -> list[int]:
        size = self.manifest.target.vocab_size
        for index, token in enumerate(ids):
            if not 0 <= token < size:
                where = "" if given else f" by the tokenizer in {self._tokenizer().where}, which is another model's"
                raise UsageError(f"prompt: token {token} at index {index}{where}: the vocabulary has 0 to {size - 1}")
        return ids

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UsageError("this bundle has no tokenizer: give token ids instead of text")
        return self.tokenizer

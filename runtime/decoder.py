"""The front door: `load` a bundle, get a `Decoder`."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dspark.errors import UsageError
from dspark.manifest import Manifest
from dspark.runtime import profile
from dspark.runtime.bundle import Bundle, open_bundle, read_draft_tokens
from dspark.runtime.draft import Drafter
from dspark.runtime.engines.base import NOISE, Engine
from dspark.runtime.engines.open import ONNXRUNTIME, check_threads, open_engines
from dspark.runtime.session import Chunk, Generation, OnRound, Prompt, Session
from dspark.runtime.throughput import SpsTable
from dspark.runtime.tokens import Tokenizer, load_tokenizer
from dspark.runtime.verify import DraftVocabulary


def load(
    folder: str | Path,
    *,
    backend: str = ONNXRUNTIME,
    threads: int | None = None,
    max_context_len: int | None = None,
) -> "Decoder":
    """Open a bundle and load its engines.

    backend: onnxruntime (on the CPU), or tensorrt or tensorrt-rtx where the bundle has engines for them. threads: per
    engine run on the CPU; None: one per core. max_context_len: a smaller context limit than the bundle's, in tokens.
    UsageError when the bundle is damaged or an option is out of range; DSparkError when the backend is missing.
    """
    bundle, limit = _open(folder, threads, max_context_len)
    target, drafter = open_engines(bundle, ("target", "drafter"), backend, limit, threads)
    tokenizer, draft_tokens = load_tokenizer(bundle), read_draft_tokens(bundle)
    decoder = Decoder(bundle.manifest, target, drafter, tokenizer, limit, draft_tokens)
    sps, engines = bundle.manifest.sps, profile.these_engines(backend, target, drafter, threads)
    why = profile.misfit(sps, profile.this_machine(backend), engines)
    if sps is not None and why is None:
        decoder.sps = SpsTable(sps.table.tokens, sps.table.steps_per_second)
    decoder.no_sps = why and f"bundle {folder}: {why}; make one: {profile.command(folder, engines)}"
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
        calibration = manifest.calibration  # temperatures of the confidences, by position
        self.calibration: tuple[float, ...] | None = None if calibration is None else calibration.temperatures
        self.owner: Session | None = None  # whose state the engines' caches hold

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
        messages = [item for item in prompt if isinstance(item, dict)]
        if messages:
            return self._checked(self._tokenizer().encode_chat(messages))
        return self._checked([int(token) for token in prompt], given=True)  # type: ignore[arg-type]

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

"""Open a bundle: nothing in it is used before its manifest, its paths, its sizes and its hashes are checked."""

import hashlib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dspark.errors import UsageError
from dspark.manifest import DRAFT_TOKENS, MANIFEST, FileEntry, Manifest, read_manifest
from dspark.runtime.throughput import MOST_TOKENS

INT32 = 2**31


@dataclass(frozen=True)
class Bundle:
    """A checked bundle. `folder` is absolute, so that a later change of the working directory does not matter."""

    folder: Path
    manifest: Manifest

    def path(self, name: str) -> Path:
        """The absolute path of a file that the manifest lists; KeyError for any other."""
        if name not in self.manifest.files:
            raise KeyError(name)
        return self.folder / name

    def has(self, name: str) -> bool:
        return name in self.manifest.files


def open_bundle(folder: str | Path) -> Bundle:
    """Read and check the bundle in `folder`; UsageError, naming the file or the key, if anything is wrong with it."""
    folder = Path(folder).absolute()
    if (folder / MANIFEST).is_symlink():
        raise UsageError(f"{folder / MANIFEST}: is a link; a bundle holds plain files only")
    manifest = read_manifest(folder)
    _check_values(manifest, str(folder / MANIFEST))
    for name, entry in manifest.files.items():
        _check_file(folder, name, entry)
    for file in folder.rglob("*"):
        # A graph's weights or a template that nobody hashed would be used unchecked.
        # Hidden ones are not part of a bundle: a build in progress puts its files into a hidden folder.
        name = file.relative_to(folder).as_posix()
        hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and name != MANIFEST and name not in manifest.files and not hidden:
            raise UsageError(f"{file}: is not in the manifest; remove it, or export the bundle again")
    return Bundle(folder, manifest)


def read_draft_tokens(bundle: Bundle) -> np.ndarray | None:
    """The token of every draft index, int64 [Vd]; None where they are the same, and in bundles of older versions.

    UsageError where the file is not that.
    """
    if not bundle.has(DRAFT_TOKENS):
        return None
    file, size = bundle.path(DRAFT_TOKENS), bundle.manifest.drafter.draft_vocab_size
    try:
        tokens = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise UsageError(f"{file}: cannot be read ({error}); export the bundle again") from error
    vocab_size = bundle.manifest.target.vocab_size
    if (
        not isinstance(tokens, np.ndarray)
        or tokens.dtype != np.int64
        or tokens.shape != (size,)
        or len(np.unique(tokens)) != size
    ):
        raise UsageError(f"{file}: is not {size} different int64 tokens; export the bundle again")
    if not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise UsageError(f"{file}: has tokens outside the vocabulary of {vocab_size}; export the bundle again")
    return tokens


def _check_file(folder: Path, name: str, entry: FileEntry) -> None:
    file = folder / name
    for part in [file, *file.parents]:
        if part == folder:
            break
        if part.is_symlink():
            raise UsageError(f"{part}: is a link; a bundle holds plain files only")
    if not file.is_file():
        raise UsageError(f"{file}: missing, though the manifest lists it; copy or export the bundle again")
    try:
        size = file.stat().st_size
        if size != entry.size:
            raise UsageError(f"{file}: {size} bytes, the manifest says {entry.size}; copy or export the bundle again")
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}); check the bundle's permissions") from error
    if digest != entry.sha256:
        raise UsageError(f"{file}: SHA-256 differs from the manifest's; the file was changed: export the bundle again")


def _check_values(manifest: Manifest, where: str) -> None:
    """The relations between fields that the stages rely on; a parser of single fields cannot see them."""
    drafter, target, profiles = manifest.drafter, manifest.target, manifest.profiles
    block, taps = drafter.block_size, drafter.target_layer_ids
    sizes = (target.hidden_size, target.vocab_size, target.layers, target.max_position_embeddings)
    caches = [(pair.kv_heads, pair.head_dim) for graph in manifest.io for pair in graph.caches]
    states = [state for graph in manifest.io for state in graph.states]
    claims = {
        f"drafter.layout is anchor-first (found {drafter.layout!r})": drafter.layout == "anchor-first",
        # The graphs count rows in int32.
        "1 <= target's hidden_size, vocab_size, layers, max_position_embeddings < 2**31": _within(sizes, 1, INT32),
        "1 <= drafter.block_size < profiles.max_context_len <= target.max_position_embeddings": (
            1 <= block < profiles.max_context_len <= target.max_position_embeddings
        ),
        "1 <= profiles.draft_len <= drafter.block_size": 1 <= profiles.draft_len <= block,
        "1 <= profiles.max_batch_size < 2**31": 1 <= profiles.max_batch_size < INT32,
        "0 <= drafter.mask_token_id < target.vocab_size": 0 <= drafter.mask_token_id < target.vocab_size,
        "1 <= drafter.draft_vocab_size <= target.vocab_size": 1 <= drafter.draft_vocab_size <= target.vocab_size,
        "0 <= drafter.markov.rank < 2**31": 0 <= drafter.markov.rank < INT32,
        "0 <= drafter.windows < 2**31": _within(drafter.windows, 0, INT32),
        "-1 <= drafter.target_layer_ids < target.layers": _within(taps, -1, target.layers),
        "0 <= target.stop_token_ids < target.vocab_size": _within(target.stop_token_ids, 0, target.vocab_size),
        "0 <= io's cache_slack <= 1024": _within([graph.cache_slack for graph in manifest.io], 0, 1025),
        "0 <= window of io's caches < 2**31": _within(
            [pair.window for graph in manifest.io for pair in graph.caches], 0, INT32
        ),
        "kind of io's states is recurrent": all(state.kind == "recurrent" for state in states),
        "float32 or float16: dtype of io's states": all(state.dtype in ("float32", "float16") for state in states),
        "1 <= slots, shape of io's states < 2**31": all(_within((s.slots, *s.shape), 1, INT32) for s in states),
        "1 <= kv_heads, head_dim of io's caches < 2**31": all(_within(pair, 1, INT32) for pair in caches),
        "0 <= sizes in io's shapes < 2**31": all(
            _within([size for size in tensor.shape if isinstance(size, int)], 0, INT32)
            for graph in manifest.io
            for tensor in (*graph.inputs, *graph.outputs)
        ),
        "0 <= files' size": all(entry.size >= 0 for entry in (*manifest.files.values(), *manifest.source.values())),
        "1 <= onnx.opset, onnx.ir < 2**31": _within((manifest.onnx.opset, manifest.onnx.ir), 1, INT32),
    }
    for claim, holds in claims.items():
        if not holds:
            raise UsageError(f"{where}: does not hold: {claim}; export the bundle again with this version")
    for field, command, claim, holds in _measured(manifest):
        if not holds:
            raise UsageError(f"{where}: does not hold: {claim}; put null for {field} and run dspark {command} again")


def _measured(manifest: Manifest) -> Iterator[tuple[str, str, str, bool]]:
    """(field, the command that writes it, what has to hold, whether it does) of what was measured after the export."""
    drafter, calibration = manifest.drafter, manifest.calibration
    if calibration is not None:
        wanted = "the drafter has a confidence head, and calibration.temperatures are block_size finite numbers above 0"
        right = _positive(calibration.temperatures, drafter.block_size) and drafter.confidence.enabled
        yield "calibration", "calibrate", wanted, right
        wanted = "calibration.shifts are block_size finite numbers, or none"
        shifts = calibration.shifts
        right = len(shifts) in (0, drafter.block_size) and all(abs(shift) < float("inf") for shift in shifts)
        yield "calibration", "calibrate", wanted, right
    for name, sps in (("sps", manifest.sps), ("batch_sps", manifest.batch_sps)):
        if sps is None:
            continue
        counts = [0, *(steps.requests for steps in (*sps.fewer, sps.table))]
        wanted = f"{name}: the requests of fewer and table rise, from 1"
        yield name, "profile", wanted, all(a < b for a, b in zip(counts, counts[1:], strict=False))
        for at, table in (("table", sps.table), *((f"fewer[{i}]", steps) for i, steps in enumerate(sps.fewer))):
            tokens = table.tokens
            rising = all(a < b for a, b in zip((0, *tokens), (*tokens, MOST_TOKENS + 1), strict=True))
            wanted = f"{name}.{at}.tokens are one number or more, rising, from 1 to {MOST_TOKENS}"
            yield name, "profile", wanted, bool(tokens) and rising
            wanted = f"{name}.{at}.steps_per_second are finite numbers above 0, one for each of tokens"
            yield name, "profile", wanted, _positive(table.steps_per_second, len(tokens))
            wanted = f"{name}.{at}: the largest step has a token for each of its requests"
            yield name, "profile", wanted, table.requests <= tokens[-1]
        wanted = f"{name}.draft_ms are block_size finite numbers above 0"
        yield name, "profile", wanted, _positive(sps.draft_ms, drafter.block_size)
        wanted, more = f"{name}.requests_draft_ms are finite numbers above 0", sps.requests_draft_ms
        yield name, "profile", wanted, _positive(more, len(more))
        wanted = f"1 <= {name}.context < profiles.max_context_len"
        yield name, "profile", wanted, 1 <= sps.context < manifest.profiles.max_context_len


def _positive(values: Sequence[float], count: int) -> bool:
    return len(values) == count and all(0 < value < float("inf") for value in values)


def _within(values: Iterable[int], least: int, end: int) -> bool:
    return all(least <= value < end for value in values)

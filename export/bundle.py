"""Writing a bundle: built aside, hashed, described by its manifest, and renamed into place when it is whole."""

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from dspark import __version__
from dspark.errors import DSparkError, UsageError
from dspark.manifest import DRAFT_TOKENS, MANIFEST, FileEntry, Manifest, read_manifest

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# Their versions decide what the graphs look like.
_TOOLS = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir")
ADDED = ("engines", "plugins")  # folders that are filled after the export
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def building(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` to build in; it becomes `out` on success and vanishes on any failure.

    Missing parents of `out` are made, and go again with a failure. Raises UsageError: `out` exists, or its parent
    cannot be written to. DSparkError: the disk is full.
    """
    if os.path.lexists(out):
        raise UsageError(f"--out {out}: exists already; remove it or choose another folder")
    parent = out.absolute().parent
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    # Not tempfile: its folders are readable by their owner alone, and the bundle would stay so.
    aside = parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    try:
        with _vanishing(aside, f"--out {out}"):
            aside.mkdir(parents=True)
            yield aside
            aside.rename(out)
    finally:
        for folder in made:
            with suppress(OSError):  # the bundle is in it
                folder.rmdir()


@contextmanager
def adding(folder: Path) -> Iterator[Path]:
    """A temporary folder inside of the bundle `folder` for what will be added to it; it vanishes in any case.

    One process at a time may add to a bundle: UsageError while another one does. What one that was killed has left is
    removed. Readers of a bundle pass over names that begin with a dot. Other errors as in `building`.
    """
    aside = folder.absolute() / f".{secrets.token_hex(4)}.partial"
    with _vanishing(aside, f"bundle {folder}"), _locked(folder):
        _tidy(folder)
        aside.mkdir()
        yield aside


def check_writable(folder: Path) -> None:
    """Find out now what `adding` would refuse, before anything long begins; clears away what a killed one has left."""
    with adding(folder):
        pass


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a bundle's folder; the system lets go of it when the process ends, however that happens."""
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"bundle {folder}: another command is adding to it; wait until it has ended") from None
        yield
    finally:
        os.close(held)


def _tidy(folder: Path) -> None:
    """Remove what a killed process has left: temporary files, and engines and plugins that no manifest came to name."""
    for rest in folder.glob(".*.partial"):
        if rest.is_dir():
            shutil.rmtree(rest, ignore_errors=True)
        else:
            rest.unlink(missing_ok=True)
    named = read_manifest(folder).files
    found = (file for part in ADDED for file in (folder / part).rglob("*") if file.is_file())
    _remove(folder, [name for file in found if (name := file.relative_to(folder).as_posix()) not in named])


@contextmanager
def _vanishing(aside: Path, where: str) -> Iterator[None]:
    """Remove what is left of the folder `aside` in the end; errors of the disk name `where`."""
    try:
        yield
    except Exception as error:
        known = _disk_error(error, aside, where)
        if known is None:
            raise
        raise known from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def replace_files(folder: Path, old: Manifest, new: Manifest, files: dict[str, Path]) -> None:
    """Turn the bundle `folder` from `old` into `new`, whose added `files` lie in a folder of `adding`.

    The manifest changes in one step, when all that it names is there; what only the old one names goes after that.
    """
    added = [name for name in files if name not in old.files]
    aside = folder / f".{MANIFEST}.{secrets.token_hex(4)}.partial"
    try:
        for name, file in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            file.replace(folder / name)
        aside.write_text(new.to_json(), encoding="utf-8")
        aside.replace(folder / MANIFEST)
    except BaseException:
        if aside.exists():  # a signal may come when the new manifest is in place: then what it names has to stay
            _remove(folder, added)
            aside.unlink()
        raise
    _remove(folder, [name for name in old.files if name not in new.files])


def amend_manifest(folder: Path, **fields: Any) -> Manifest:
    """Change fields of the manifest that no file belongs to; returns the new one. Errors as in `building`.

    The manifest is read anew: a measurement takes minutes, and engines may have been built in the meantime.
    """
    with adding(folder):  # says what is wrong with a folder that cannot be written to
        old = read_manifest(folder)
        new = dataclasses.replace(old, **fields)
        replace_files(folder, old, new, {})
    return new


def _remove(folder: Path, names: list[str]) -> None:
    """Remove files of a bundle, and the folders that they leave empty."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
        for parent in (folder / name).parents:
            if parent == folder or not parent.is_dir() or any(parent.iterdir()):
                break
            parent.rmdir()


def _disk_error(error: BaseException | None, aside: Path, where: str) -> DSparkError | None:
    """What the disk has to do with an error, which a library may have wrapped or only quoted."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _NO_SPACE) or os.strerror(errno.ENOSPC) in str(error):
            return DSparkError(f"{where}: no space left on the disk; nothing was kept, free some and run again")
        if isinstance(error, OSError) and error.filename:
            file = Path(str(error.filename))
            if file == aside or aside in file.parents or file in aside.parents:
                return UsageError(f"{where}: cannot be written ({error.strerror}); choose another folder")
        error = error.__cause__ or error.__context__
    return None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def file_entry(file: Path) -> FileEntry:
    """Size and SHA-256 of a file, read in pieces."""
    with file.open("rb") as stream:
        return FileEntry(hashlib.file_digest(stream, "sha256").hexdigest(), file.stat().st_size)


def write_target_files(files: dict[str, bytes], folder: Path) -> None:
    """Tokenizer, generation config and chat template, unchanged.

    A chat template that lies inside tokenizer_config.json is put beside it as well, where the runtime looks for it.
    """
    for name, content in files.items():
        _check_readable(name, content)
        (folder / name).write_bytes(content)
    if CHAT_TEMPLATE not in files and TOKENIZER_CONFIG in files:
        template = json.loads(files[TOKENIZER_CONFIG]).get("chat_template")
        if isinstance(template, list):  # named templates
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        if isinstance(template, str):
            (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")


def write_draft_tokens(d2t: np.ndarray, folder: Path) -> None:
    """d2t int64 [Vd], offsets. Whoever draws drafts has to look up a token's probability by its draft index."""
    np.save(folder / DRAFT_TOKENS, np.arange(len(d2t)) + d2t)


def _check_readable(name: str, content: bytes) -> None:
    """What the runtime could not read is refused now, not when the bundle is used."""
    try:
        if name == "tokenizer.json":
            tokenizers.Tokenizer.from_buffer(content)
        elif name.endswith(".json"):
            if not isinstance(json.loads(content), dict):
                raise ValueError("not a JSON object")
        elif name.endswith(".jinja"):
            content.decode("utf-8")
    except Exception as error:  # tokenizers raises plain Exception
        raise UsageError(f"target: {name} cannot be read ({error}); repair the target's folder") from error


def write_manifest(manifest: Manifest, folder: Path) -> None:
    (folder / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")


def entries(folder: Path) -> dict[str, FileEntry]:
    """Every file in the folder but the manifest, by its path with forward slashes."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST)
    return {file.relative_to(folder).as_posix(): file_entry(file) for file in files}


def tool() -> dict[str, str]:
    """What built the bundle. No time in it, so that equal inputs give equal bytes, unless SOURCE_DATE_EPOCH fixes one.

    Raises UsageError: SOURCE_DATE_EPOCH is not a number of seconds.
    """
    versions = {"name": "dspark", "version": __version__, **{name: metadata.version(name) for name in _TOOLS}}
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is None:
        return versions
    try:
        return versions | {"created": datetime.fromtimestamp(int(epoch), UTC).isoformat()}
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(f"SOURCE_DATE_EPOCH={epoch!r}: expected seconds since 1970, such as 1767225600") from error

"""Open a bundle: nothing in it is used before its manifest, its paths, its sizes and its hashes are checked."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from dspark.errors import UsageError
from dspark.manifest import MANIFEST, FileEntry, Manifest, read_manifest


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
        name = file.relative_to(folder).as_posix()
        if file.is_file() and name != MANIFEST and name not in manifest.files and not file.name.startswith("."):
            raise UsageError(f"{file}: is not in the manifest; remove it, or export the bundle again")
    return Bundle(folder, manifest)


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
    claims = {
        f"drafter.layout is anchor-first (found {drafter.layout!r})": drafter.layout == "anchor-first",
        "drafter.block_size >= 1": drafter.block_size >= 1,
        "1 <= profiles.draft_len <= drafter.block_size": 1 <= profiles.draft_len <= drafter.block_size,
        "0 <= drafter.mask_token_id < target.vocab_size": 0 <= drafter.mask_token_id < target.vocab_size,
        "1 <= drafter.draft_vocab_size <= target.vocab_size": 1 <= drafter.draft_vocab_size <= target.vocab_size,
        "profiles.max_context_len >= 1": profiles.max_context_len >= 1,
        "target.stop_token_ids < target.vocab_size": all(0 <= i < target.vocab_size for i in target.stop_token_ids),
    }
    for claim, holds in claims.items():
        if not holds:
            raise UsageError(f"{where}: does not hold: {claim}; export the bundle again with this version")

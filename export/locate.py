"""Where a model named on the command line lies: a local folder (or file), or a hub id fetched to the local cache."""

import re
from pathlib import Path

from dspark.errors import UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What a transformers model can be loaded from; other weight formats would only be downloaded for nothing.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def locate(name: str, option: str, *, suffix: str = "") -> Path:
    """The folder that `name` stands for: itself if it is a folder, otherwise the hub repository of that id.

    With `suffix` (".gguf") a single file that ends so is taken too. `option` ("--ckpt") names the culprit in errors.

    Raises UsageError: nothing of that name on this disk, and no hub repository of that id within reach.
    """
    path = Path(name).expanduser()
    if path.is_dir() or (suffix and path.is_file() and path.suffix.lower() == suffix):
        return path
    if path.exists():
        expected = "a folder" + (f" or a {suffix} file" if suffix else "")
        raise UsageError(f"{option} {name}: this is a file, expected {expected} or a hub id")
    if not _HUB_ID.fullmatch(name):
        raise UsageError(f"{option} {name}: no such folder; give one with config.json, or a hub id like owner/name")
    return _fetch(name, option)


def _fetch(name: str, option: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_WANTED))
    except GatedRepoError as error:
        raise UsageError(f"{option} {name}: the hub wants a login for this model; run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise UsageError(f"{option} {name}: no such folder and no such model on the hub; check the name") from error
    except Exception as error:  # the hub client raises its own, its HTTP library's and the system's errors
        raise UsageError(
            f"{option} {name}: no such folder here, and the hub does not supply it ({type(error).__name__}); check the"
            " name, or give a local folder"
        ) from error

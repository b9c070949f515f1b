"""What is wrong with an input has to be one line that names it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.errors import UsageError


def refuse(load: Callable[[Path], object], folder: Path, *parts: object) -> None:
    """Loading `folder` fails with one line that has its name and all of `parts`."""
    with pytest.raises(UsageError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in (folder, *parts):
        assert str(part) in message, f"{part!r} is not in: {message}"

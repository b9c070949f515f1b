"""JSON objects from disk: whatever is wrong with a file is one line that names it."""

import json
from pathlib import Path
from typing import Any

from dspark.errors import UsageError

DEEPEST = 64  # levels of nesting; nothing that we read has ten


def read_object(file: Path, advice: str, *, constants: bool = False) -> dict[str, Any]:
    """The JSON object in `file`. constants: NaN and Infinity, which JSON does not have, are taken all the same.

    UsageError ending in `advice` where there is no such file, no such object, or one nested beyond reason.
    """
    try:
        text = file.read_text(encoding="utf-8")
        value = json.loads(text, parse_constant=None if constants else _refuse)
        _check_depth(value)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file; {advice}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read as JSON ({error}); {advice}") from error
    except RecursionError as error:
        raise UsageError(f"{file}: cannot be read as JSON (nested too deeply); {advice}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{file}: expected a JSON object, found {type(value).__name__}; {advice}")
    return value


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        inner = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list)]
        level = [x for part in inner for x in part]
    if any(isinstance(x, dict | list) for x in level):
        raise RecursionError

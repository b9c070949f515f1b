"""The files of a checkpoint folder: config.json with checked keys, and safetensors read without loading them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.errors import UsageError
from dspark.reading import read_object

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"[^/\\]+\.safetensors")  # in the index's own folder
Shape = tuple[int, ...]


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; UsageError where there is none."""
    # Configs of other layers' kinds hold Infinity; what we use of them is checked key by key.
    advice = f"get it again; a checkpoint is a folder with {CONFIG} and {WEIGHTS}"
    return read_object(file, advice, constants=True)


LARGEST = 2**31 - 1  # of an integer in a config: what the graphs' int32 inputs can count


class Keys:
    """A config's keys, each asked for with its type. Every error names the file and the key."""

    def __init__(self, file: Path, raw: dict[str, Any]):
        self.file = file
        self.raw = raw

    def fail(self, key: str, problem: str) -> UsageError:
        return UsageError(f"{self.file}: key {key!r}: {problem}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.raw.get(key) is not None

    def need(self, key: str) -> Any:
        if key not in self.raw:
            raise UsageError(f"{self.file}: key {key!r} is missing; add what the model was trained with")
        return self.raw[key]

    def integer(self, key: str, minimum: int = 1) -> int:
        value = self.need(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fail(key, f"expected an integer, found {value!r}")
        if not minimum <= value <= LARGEST:
            raise self.fail(key, f"expected {minimum} to {LARGEST}, found {value}")
        return value

    def number(self, key: str) -> float:
        value = self.need(key)
        if type(value) not in (int, float) or not 0 < value <= LARGEST:
            raise self.fail(key, f"expected a number above 0, found {value!r}")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.need(key)
        if not isinstance(value, bool):
            raise self.fail(key, f"expected true or false, found {value!r}")
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.need(key)
        if value not in choices:
            raise self.fail(key, f"{value!r} is not known; expected one of {', '.join(choices)}")
        return value

    def items(self, key: str, kind: type) -> tuple:
        value = self.need(key)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.fail(key, f"expected a list of {kind.__name__}, found {value!r}")
        return tuple(value)


class TensorFiles:
    """The tensors of one safetensors file, or of the shards that an index names; each can be taken once.

    Headers are checked on opening; tensors stay memory-mapped in their own dtype until somebody converts them.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.index: Path | None = None
        self._handles: dict[str, Any] = {}  # tensor name -> open file
        self._shapes: dict[str, Shape] = {}
        if (folder / WEIGHTS).exists():
            self.files = [folder / WEIGHTS]
            self._open(folder / WEIGHTS)
        elif (folder / INDEX).exists():
            self.index = folder / INDEX
            self.files = self._open_shards(self.index)
        else:
            raise UsageError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there; only safetensors weights are read")

    def _open_shards(self, index: Path) -> list[Path]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise UsageError(f"{index}: key 'weight_map' is missing or no map of tensor names to files")
        files = []
        for shard in sorted(set(weight_map.values())):
            if not _SHARD.fullmatch(shard):
                raise UsageError(f"{index}: shard {shard!r} is not a plain file name; the index is damaged or hostile")
            file = self.folder / shard
            if not file.exists():
                raise UsageError(f"{index}: shard {shard!r} is named there but missing in {self.folder}; get it again")
            for name in self._open(file):
                if weight_map.get(name) != shard:
                    raise UsageError(f"{file}: tensor {name!r} is not listed for this shard in {index.name}")
            files.append(file)
        for name, shard in weight_map.items():
            if name not in self._shapes:
                raise UsageError(f"{index}: tensor {name!r} is listed for shard {shard!r}, which does not hold it")
        return files

    def _open(self, file: Path) -> list[str]:
        from safetensors import SafetensorError, safe_open

        try:
            handle = safe_open(file, framework="pt")
            names = list(handle.keys())
            shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{file}: no valid safetensors file ({error}); it is damaged or cut short") from error
        self._handles |= dict.fromkeys(names, handle)
        self._shapes |= shapes
        return names

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Of every tensor that was not taken."""
        return self._shapes

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def take(self, name: str, shape: Shape, dtypes: tuple[str, ...] = ("F32", "F16", "BF16")) -> "Tensor":
        """Tensor `name`, which must have this shape and one of these dtypes (safetensors' names); taken once."""
        if name not in self._shapes:
            raise UsageError(f"{self.folder}: tensor {name!r} {list(shape)} is missing in {self._where()}")
        found = self._shapes.pop(name)
        handle = self._handles.pop(name)
        if found != shape:
            raise UsageError(f"{self.folder}: tensor {name!r} has shape {list(found)}, expected {list(shape)}")
        dtype = handle.get_slice(name).get_dtype()
        if dtype not in dtypes:
            raise UsageError(f"{self.folder}: tensor {name!r} has dtype {dtype}, expected {' or '.join(dtypes)}")
        return handle.get_tensor(name)

    def finish(self, ignored: tuple[str, ...]) -> tuple[str, ...]:
        """The names left over that end in one of `ignored`; any other tensor left over is an error that names it."""
        for name, shape in sorted(self._shapes.items()):
            if not name.endswith(ignored):
                raise UsageError(
                    f"{self.folder}: tensor {name!r} {list(shape)} has no place in the drafter that {CONFIG} describes"
                )
        return tuple(sorted(self._shapes))

    def _where(self) -> str:
        return self.index.name if self.index else self.files[0].name

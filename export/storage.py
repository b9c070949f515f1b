"""Weights on disk: streamed one by one from where they lie, shared by address, laid out the same way every time."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

ALIGNMENT = 64  # a cache line; no more, so that weights of one layer adjoin and a lowering can read several as one
INLINE = 1024  # bytes; what is smaller stays in the .onnx file, where shape arithmetic can see it


class WeightFile:
    """Writes one .data file. `shared` holds tensors of other files in the same folder, by storage address."""

    def __init__(self, path: Path, shared: dict[int, ir.ExternalTensor]):
        self.path, self.shared = path, shared
        self.stored: dict[int, ir.ExternalTensor] = {}

    def __enter__(self) -> "WeightFile":
        self._file = self.path.open("wb")
        return self

    def __exit__(self, *_exception) -> None:
        self._file.close()

    def keep(self, value: ir.Value) -> ir.TensorProtocol:
        """Store an initializer (unless it is stored or tiny) and return what stands for it in the graph."""
        tensor = value.const_value
        assert tensor is not None
        address = _address(tensor)
        known = self.shared.get(address) or self.stored.get(address) if address else None
        if known is not None and known.shape == tensor.shape:
            return _reference(known, tensor.name)
        if tensor.nbytes < INLINE:
            # A plain copy: the bytes must not depend on what kind of object held them.
            return ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=tensor.name)
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        offset = self._file.tell()
        # As bytes: the buffer protocol knows no bf16.
        self._file.write(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data)
        external = ir.ExternalTensor(
            self.path.name, offset, tensor.nbytes, tensor.dtype,
            shape=tensor.shape, name=str(tensor.name), base_dir=self.path.parent,
        )  # fmt: skip
        if address:
            self.stored[address] = external
        return external


def _address(tensor: ir.TensorProtocol) -> int | None:
    """Where a torch tensor's storage begins, when the tensor is all of it; None for other tensors."""
    raw = getattr(tensor, "raw", None)
    return raw.data_ptr() if isinstance(raw, torch.Tensor) and raw.is_contiguous() else None


def _reference(known: ir.ExternalTensor, name: str | None) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        known.location, known.offset, known.length, known.dtype,
        shape=known.shape, name=str(name), base_dir=known.base_dir,
    )  # fmt: skip

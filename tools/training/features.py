"""What the frozen target says about a text: taps, its next-token distribution, and the text itself, stored on disk.

One row per token. Row i holds the tapped hidden states of token i and, in the response, the K most probable next
tokens after it; the rest of the distribution is left out (its mass is not given to anyone). Files are memory maps, so
training reads only what it draws and several trainings can share one copy.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

TOP_K = 48


@dataclass(frozen=True)
class Text:
    """One text: token rows [start, start + length), of which the first `prompt` are the prompt."""

    kind: str
    start: int
    length: int
    prompt: int


class Features:
    """Memory-mapped rows: tokens int32 [N], taps bf16 [N, m*H], top_ids int32 [N, K], top_probs fp16 [N, K]."""

    def __init__(self, folder: Path):
        self.folder = folder
        meta = json.loads((folder / "features.json").read_text(encoding="utf-8"))
        self.target_layer_ids = tuple(meta["target_layer_ids"])
        self.texts: list[Text] = [Text(**row) for row in meta["texts"]]
        rows, width = meta["rows"], meta["tap_width"]

        def mapped(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
            size = int(np.prod(shape))
            return torch.from_file(str(folder / name), shared=False, size=size, dtype=dtype).view(shape)

        self.tokens = mapped("tokens.bin", torch.int32, rows)
        self.taps = mapped("taps.bin", torch.bfloat16, rows, width)
        self.top_ids = mapped("top_ids.bin", torch.int32, rows, TOP_K)
        self.top_probs = mapped("top_probs.bin", torch.float16, rows, TOP_K)


def tapped_states(model: Any, target_layer_ids: Sequence[int], **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Taps [B, S, m*H] (outputs of the named layers, -1 = embeddings) and the final normed states [B, S, H]."""
    out = model.model(**inputs, output_hidden_states=True, use_cache=False)
    return torch.cat([out.hidden_states[i + 1] for i in target_layer_ids], dim=-1), out.last_hidden_state


def write_features(
    model: Any,
    responses: Iterable[dict],
    target_layer_ids: Sequence[int],
    folder: Path,
    *,
    batch_tokens: int = 4096,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Run the target over prompt + response texts and store what it says (see the module's docstring).

    `responses` yields {"kind": str, "prompt": [ids], "response": [ids]}. The folder is written aside and renamed, so
    one that exists is whole; one that existed before is replaced. `progress(texts done, texts)` is called per batch.
    """
    texts = [(r["kind"], r["prompt"] + r["response"], len(r["prompt"])) for r in responses]
    texts.sort(key=lambda t: len(t[1]))
    head = model.get_output_embeddings()
    rows_of_texts: list[dict] = []
    rows = tap_width = 0
    with (
        _aside(folder) as aside,
        open(aside / "tokens.bin", "wb") as tokens_file,
        open(aside / "taps.bin", "wb") as taps_file,
        open(aside / "top_ids.bin", "wb") as ids_file,
        open(aside / "top_probs.bin", "wb") as probs_file,
        torch.inference_mode(),
    ):
        at = 0
        if progress:
            progress(0, len(texts))
        while at < len(texts):
            batch = [texts[at]]
            while at + len(batch) < len(texts) and (len(batch) + 1) * len(texts[at + len(batch)][1]) <= batch_tokens:
                batch.append(texts[at + len(batch)])
            at += len(batch)
            width = max(len(ids) for _, ids, _ in batch)
            padded = torch.zeros(len(batch), width, dtype=torch.int64)
            for row, (_, ids, _) in enumerate(batch):
                padded[row, : len(ids)] = torch.tensor(ids)
            # Right padding under a causal mask: the rows kept never see a padded one.
            taps, final = tapped_states(model, target_layer_ids, input_ids=padded.to(model.device))
            tap_width = taps.shape[-1]
            for row, (kind, ids, prompt) in enumerate(batch):
                n = len(ids)
                # Only the response is predicted; the prompt's rows stay empty.
                logits = head(final[row, prompt:n])
                top = logits.topk(TOP_K, dim=-1)
                total = (logits.float() - top.values[:, :1].float()).exp_().sum(-1, keepdim=True)
                ids_rows = torch.zeros(n, TOP_K, dtype=torch.int32)
                probs_rows = torch.zeros(n, TOP_K, dtype=torch.float16)
                ids_rows[prompt:] = top.indices.to(torch.int32)
                probs_rows[prompt:] = ((top.values.float() - top.values[:, :1].float()).exp() / total).to(torch.float16)
                tokens_file.write(np.asarray(ids, dtype=np.int32).tobytes())
                taps_file.write(taps[row, :n].to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().tobytes())
                ids_file.write(ids_rows.numpy().tobytes())
                probs_file.write(probs_rows.numpy().tobytes())
                rows_of_texts.append({"kind": kind, "start": rows, "length": n, "prompt": prompt})
                rows += n
            if progress:
                progress(at, len(texts))
        meta = {"rows": rows, "tap_width": tap_width, "target_layer_ids": list(target_layer_ids)}
        (aside / "features.json").write_text(json.dumps(meta | {"texts": rows_of_texts}), encoding="utf-8")


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A folder to write in. It becomes `folder`, replacing what is there, when all is written, and goes when not."""
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        if folder.exists():
            shutil.rmtree(folder)
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)

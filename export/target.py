"""The target: any decoder-only transformers model, its attention replaced by the `dspark::block_attention` op.

Recurrent layers, where it has some, are hybrid.py's.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from dspark.errors import UsageError
from dspark.export.hybrid import LayerState, StateProbe, recurrent_layers, replacing, unknown_convolutions
from dspark.export.locate import locate
from dspark.export.modules.ops import block_attention
from dspark.export.modules.recurrent import causal_conv, gated_delta
from dspark.export.target_config import check_folder, check_ropes

ATTENTION = "dspark"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True)
class LayerCache:
    """What one layer's attention needs of its caches [P, kv_heads, C, head_dim]. window: in tokens, 0 for none."""

    kv_heads: int
    head_dim: int
    window: int


@dataclass
class Step:
    """The op's inputs that transformers' own code knows nothing of, and the caches that come back, by layer."""

    row_start: Tensor
    length: Tensor
    pages: Tensor
    key_caches: Mapping[int, Tensor]
    value_caches: Mapping[int, Tensor]
    conv_states: Mapping[int, Tensor] = field(default_factory=dict)
    delta_states: Mapping[int, Tensor] = field(default_factory=dict)
    slots: int = 1  # of how many of the last rows the states come back
    updated: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    convolved: dict[int, Tensor] = field(default_factory=dict)
    remembered: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attributes: dict[str, Any]) -> Tensor:
        caches = self.key_caches[layer], self.value_caches[layer]
        out, *updated = block_attention(q, k, v, *caches, self.row_start, self.length, self.pages, **attributes)
        self.updated[layer] = (updated[0], updated[1])
        return out

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        state, slots = self.conv_states[layer], self.slots
        out, self.convolved[layer] = causal_conv(x, weight, state, self.row_start, self.length, bias, slots=slots)
        return out

    def remember(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        state, slots = self.delta_states[layer], self.slots
        out, self.remembered[layer] = gated_delta(q, k, v, g, beta, state, self.row_start, self.length, slots=slots)
        return out


@dataclass
class Probe(StateProbe):
    """Stands in for a step to learn the caches' shapes: every row attends to itself alone, so the result is v."""

    caches: dict[int, LayerCache] = field(default_factory=dict)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attributes: dict[str, Any]) -> Tensor:
        if k.shape != v.shape:
            raise UsageError(
                f"target: layer {layer} has keys of {k.shape[2]} and values of {v.shape[2]}; not supported"
            )
        self.caches[layer] = LayerCache(k.shape[1], k.shape[2], attributes["window"])
        return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


_current: ContextVar[Step | Probe] = ContextVar("step")


def _window(module: nn.Module, sliding_window: int | None) -> int:
    """A layer's window in tokens, 0 for none: by the config's layer types, or by what the layer itself passes."""
    config, layer = module.config, module.layer_idx
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[layer] not in ("full_attention", "sliding_attention"):
        raise UsageError(
            f"target: layer {layer} is of type {kinds[layer]!r}; only full and sliding attention are supported"
        )
    if kinds and kinds[layer] == "full_attention":
        return 0
    return (sliding_window or getattr(config, "sliding_window", None) if kinds else sliding_window) or 0


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: q [1, Hq, T, D] and k, v [1, Hkv, T, D] after RoPE -> [1, T, Hq, D]."""
    if s_aux is not None:
        raise UsageError(f"target: layer {module.layer_idx} has attention sinks, which are not supported")
    attributes = {
        "causal": True,
        "window": _window(module, sliding_window),
        "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": softcap or 0.0,
    }
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    return _current.get().attend(layer, q, k, v, attributes)[None], None


class TargetModule(nn.Module):
    """The target's graph: flattened rows of any number of requests in, logits, taps and updated caches out."""

    def __init__(self, model: transformers.PreTrainedModel, target_layer_ids: Sequence[int], slots: int = 1):
        """slots: of how many of the last rows recurrent layers give their state."""
        super().__init__()
        self.model = model
        self.target_layer_ids = tuple(target_layer_ids)
        self.slots = slots
        self.recurrent = recurrent_layers(decoder_layers(model))
        self.attention = [i for i in range(len(decoder_layers(model))) if i not in self.recurrent]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        row_start: Tensor,
        length: Tensor,
        pages: Tensor,
        logit_rows: Tensor,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        conv_states: Sequence[Tensor] = (),
        delta_states: Sequence[Tensor] = (),
    ) -> tuple[Any, ...]:
        """tokens, positions int64 [T]; row_start int32 [R+1]; length int32 [R]; pages int32 [R, N]; logit_rows int64
        [L]; caches [P, Hkv, C, D] per layer, [P, Hkv, W, D] of those with a window -> logits fp32 [L, V], taps fp32
        [T, m*H], key caches, value caches with the new rows. With recurrent layers also their states of every request,
        conv [R, K-1, C] and delta [R, Hv, Dk, Dv] -> those after each of the last S = min(T, slots) rows, [R, S, ...].
        """

        def by_layer(layers: Iterable[int], values: Sequence[Tensor]) -> dict[int, Tensor]:
            return dict(zip(layers, values, strict=True))

        caches = by_layer(self.attention, key_caches), by_layer(self.attention, value_caches)
        states = by_layer(self.recurrent, conv_states), by_layer(self.recurrent, delta_states)
        step = Step(row_start, length, pages, *caches, *states, slots=self.slots)
        logits, taps = self.run(step, tokens, positions, logit_rows)
        updated = [step.updated[layer] for layer in self.attention]
        after = [[made[layer] for layer in self.recurrent] for made in (step.convolved, step.remembered)]
        return logits, taps, [k for k, _ in updated], [v for _, v in updated], *(after if self.recurrent else ())

    def run(self, step: Step | Probe, tokens: Tensor, positions: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        taps: dict[int, Tensor] = {}
        hooks = [self._tap(i, taps) for i in set(self.target_layer_ids)]
        outer = _current.set(step)
        try:
            with replacing(self.recurrent, step):
                out = self.model(
                    input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
                )
        finally:
            _current.reset(outer)
            for hook in hooks:
                hook.remove()
        tapped = torch.cat([taps[i][0] for i in self.target_layer_ids], dim=-1)
        return out.logits[0].float(), tapped.float()

    def _tap(self, layer: int, taps: dict[int, Tensor]):
        """Catch the input of layer i + 1: the output of layer i, or for -1 the embeddings as the family scales them."""

        def keep(_module, args, kwargs) -> None:
            taps[layer] = args[0] if args else kwargs["hidden_states"]

        return decoder_layers(self.model)[layer + 1].register_forward_pre_hook(keep, with_kwargs=True)


def decoder_layers(model: transformers.PreTrainedModel) -> nn.ModuleList:
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UsageError(
            f"target: {type(model).__name__} has no list of decoder layers; only decoder-only models are supported"
        )
    return layers


@dataclass
class Target:
    """A loaded target. `files` are the tokenizer, generation config and chat template as the bundle carries them."""

    model: transformers.PreTrainedModel
    caches: tuple[LayerCache, ...]  # of the layers that attend
    states: tuple[LayerState, ...]  # of the layers that are recurrent
    stop_token_ids: tuple[int, ...]
    sources: dict[str, Path]  # file name -> what was read, for the manifest's hashes
    files: dict[str, bytes]
    stored: dict = field(default_factory=dict)  # storage address -> where export_target put that tensor

    @property
    def config(self) -> transformers.PreTrainedConfig:
        return self.model.config.get_text_config()

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.lm_head.shape[0]

    @property
    def layers(self) -> int:
        return len(self.caches) + len(self.states)

    @property
    def embed_tokens(self) -> Tensor:
        table: Any = self.model.get_input_embeddings()
        return table.weight

    @property
    def lm_head(self) -> Tensor:
        head: Any = self.model.get_output_embeddings()
        return head.weight

    def module(self, target_layer_ids: Sequence[int], slots: int = 1) -> TargetModule:
        """The torch module whose forward is the exported graph, and parity's reference."""
        return TargetModule(self.model, target_layer_ids, slots).eval()


def load_target(source: str | Path, dtype: torch.dtype = torch.float32) -> Target:
    """Load a decoder-only model from a local folder, a GGUF file (or a folder with just one), or a hub id.

    Raises UsageError, in one line, when there is no such model or when its attention cannot be replaced.
    """
    folder, gguf = _resolve(source)
    transformers.AttentionInterface.register(ATTENTION, _attention)
    options: dict[str, Any] = {"gguf_file": gguf} if gguf else {}
    from_pretrained: Any = transformers.AutoModelForCausalLM.from_pretrained  # typed as giving a model alone
    try:
        if gguf is None:
            check_folder(folder)
        model, loaded = from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=ATTENTION,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
        _check_loaded(source, loaded)
        check_ropes(model.config.get_text_config().to_dict(), lambda key, problem: _wrong_key(source, key, problem))
        caches, states = _probe(model.eval().requires_grad_(False))
    except UsageError:
        raise
    except Exception as error:  # a config's every fault has another class
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UsageError(
            f"target {source}: transformers cannot run it as a causal language model ({reason})"
        ) from error
    if gguf:
        sources, files = {gguf: folder / gguf}, _built_files(folder, gguf, model)
    else:
        names = [
            *TOKENIZER_FILES,
            "config.json",
            *(f.name for pattern in WEIGHTS for f in sorted(folder.glob(pattern))),
        ]
        sources = {name: folder / name for name in names if (folder / name).is_file()}
        files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if name in sources}
        if "tokenizer.json" not in files and "tokenizer_config.json" in files:
            files |= _built_files(folder, None, model)
    return Target(model, caches, states, _stop_token_ids(model), sources, files)


def _wrong_key(source: str | Path, key: str, problem: str) -> UsageError:
    return UsageError(f"target {source}: key {key!r}: {problem}")


def _check_loaded(source: str | Path, loaded: dict[str, Any]) -> None:
    """transformers goes on with random values in the place of tensors that are missing or misshapen, and without those
    that the model it made has no place for; we do not. (Tables of RoPE and a tied head it knows to be superfluous.)"""
    for name in sorted(loaded["missing_keys"]):
        raise UsageError(f"target {source}: tensor {name!r} is missing; get the model again")
    for name, found, expected in sorted(loaded["mismatched_keys"]):
        raise UsageError(f"target {source}: tensor {name!r} has shape {list(found)}, expected {list(expected)}")
    for name in sorted(loaded["unexpected_keys"]):
        raise UsageError(
            f"target {source}: tensor {name!r} has no place in the model that its config describes; repair the config,"
            " or remove the tensor"
        )


def _resolve(source: str | Path) -> tuple[Path, str | None]:
    """(folder, name of the GGUF file in it or None)."""
    path = locate(str(source), "--target", suffix=".gguf")
    if path.is_file():
        return path.parent, path.name
    ggufs = sorted(f.name for f in path.glob("*.gguf"))
    if (path / "config.json").is_file() or not ggufs:
        return path, None
    if len(ggufs) > 1:
        raise UsageError(
            f"--target {source}: holds {len(ggufs)} GGUF files; name one of them, such as {path / ggufs[0]}"
        )
    return path, ggufs[0]


def _built_files(folder: Path, gguf: str | None, model: transformers.PreTrainedModel) -> dict[str, bytes]:
    """The tokenizer as transformers builds it where the source has none in its own files (GGUF, sentencepiece)."""
    options = {"gguf_file": gguf} if gguf else {}
    with tempfile.TemporaryDirectory() as scratch:
        transformers.AutoTokenizer.from_pretrained(folder, **options).save_pretrained(scratch)
        model.generation_config.save_pretrained(scratch)
        return {f.name: f.read_bytes() for f in sorted(Path(scratch).iterdir()) if f.name in TOKENIZER_FILES}


def _stop_token_ids(model: transformers.PreTrainedModel) -> tuple[int, ...]:
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    stops = [] if ids is None else ids if isinstance(ids, list | tuple) else [ids]
    size = model.get_output_embeddings().weight.shape[0]
    for stop in stops:
        if isinstance(stop, bool) or not isinstance(stop, int) or not 0 <= stop < size:
            raise UsageError(
                f"target: eos_token_id {stop!r} is no token; ids go from 0 to {size - 1}: repair its config"
            )
    return tuple(stops)


def _probe(model: transformers.PreTrainedModel) -> tuple[tuple[LayerCache, ...], tuple[LayerState, ...]]:
    """Run two tokens to see that every layer comes to our ops, and what they need to remember for it."""
    probe, rows = Probe(), torch.arange(2)
    with torch.no_grad():
        TargetModule(model, (-1,)).run(probe, rows, rows, rows)
    states, layers = probe.states(), decoder_layers(model)
    recurrent, unknown = {state.layer for state in states}, unknown_convolutions(layers)
    missing = [i for i in range(len(layers)) if (i in probe.caches) == (i in recurrent) or i in unknown]
    if missing:
        raise UsageError(
            f"target: layer {missing[0]} of {type(model).__name__} is no attention that can be replaced; not supported"
        )
    return tuple(probe.caches[i] for i in sorted(probe.caches)), states

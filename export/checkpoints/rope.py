"""RoPE settings in their three spellings: rope_theta with rope_scaling, or rope_parameters. One meaning."""

from collections.abc import Callable, Mapping
from typing import Any

from dspark.errors import UsageError

from .files import Keys

# rope type -> the parameters that it cannot do without. Types whose frequencies depend on the running length
# (dynamic, longrope) would need a table per length in the graph; they are refused.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# parameter -> what it has to be above. Null stands for the usual value, where a parameter has one.
_ABOVE = {"rope_theta": 1, "factor": 0, "original_max_position_embeddings": 0, "partial_rotary_factor": 0}
_ABOVE |= {"low_freq_factor": 0, "high_freq_factor": 0, "beta_slow": 0, "beta_fast": 0, "attention_factor": 0}
_ABOVE |= {"mscale": 0, "mscale_all_dim": 0}
_MOST = {"partial_rotary_factor": 1}
_LARGEST = 1e30  # beyond any model's, and still a number in fp32
# (smaller, its usual value, larger, its usual value): where they meet nothing is left to blend over.
_ORDERED = (("low_freq_factor", 1, "high_freq_factor", 4), ("beta_slow", 1, "beta_fast", 32))


def read_rope(keys: Keys) -> dict[str, Any]:
    """transformers' rope_parameters: {"rope_type": ..., "rope_theta": ..., ...}.

    Raises UsageError naming file and key: no rope_theta, contradicting spellings, a type that is not supported.
    """
    found: dict[str, Any] = {}
    for source in ("rope_scaling", "rope_parameters"):
        if not keys.has(source):
            continue
        if not isinstance(keys.raw[source], dict):
            raise keys.fail(source, f"expected an object, found {keys.raw[source]!r}")
        part = dict(keys.raw[source])
        if "type" in part:  # the spelling before transformers 4.43
            part.setdefault("rope_type", part.pop("type"))
        _merge(keys, source, found, part)
    top_level = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    _merge(keys, "rope_theta", found, {key: keys.raw[key] for key in top_level if keys.has(key)})
    if found.get("rope_theta") is None:
        raise keys.fail("rope_theta", "is missing, at the top level and in rope_parameters")
    kind = found.setdefault("rope_type", "default")
    if not isinstance(kind, str) or kind not in _NEEDED:
        raise keys.fail("rope_type", f"{kind!r} is not supported; supported: {', '.join(_NEEDED)}")
    for name in _NEEDED[kind]:
        if found.get(name) is None:
            raise keys.fail(name, f"is missing; rope_type {kind!r} needs it")
    check_rope(found, keys.fail)
    found["rope_theta"] = float(found["rope_theta"])
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise keys.fail("partial_rotary_factor", "only 1.0 is supported for drafters of the Qwen3 kind")
    return found


def check_rope(rope: Mapping[str, Any], fail: Callable[[str, str], UsageError]) -> None:
    """Raises fail(key, problem) for a value in transformers' rope_parameters that no rotation can be computed from."""
    for name, above in _ABOVE.items():
        value, most = rope.get(name), _MOST.get(name, _LARGEST)
        if value is not None and not (type(value) in (int, float) and above < value <= most):
            raise fail(name, f"expected a number above {above} and up to {most:g}, found {value!r}")
    for smaller, low, larger, high in _ORDERED:
        first, second = rope.get(smaller) or low, rope.get(larger) or high
        if (smaller in rope or larger in rope) and not first < second:
            raise fail(larger, f"expected more than {smaller}, which is {first}; found {second}")


def _merge(keys: Keys, source: str, found: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if name in found and found[name] != value:
            raise keys.fail(source, f"{name} {value!r} contradicts {found[name]!r} elsewhere in the file")
        found[name] = value

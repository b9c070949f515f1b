"""RoPE settings in their three spellings: rope_theta with rope_scaling, or rope_parameters. One meaning."""

from typing import Any

from .files import Keys

# rope type -> the parameters that it cannot do without. Types whose frequencies depend on the running length
# (dynamic, longrope) would need a table per length in the graph; they are refused.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


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
    if "rope_theta" not in found:
        raise keys.fail("rope_theta", "is missing, at the top level and in rope_parameters")
    theta = found["rope_theta"]
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise keys.fail("rope_theta", f"expected a number above 0, found {theta!r}")
    found["rope_theta"] = float(theta)
    kind = found.setdefault("rope_type", "default")
    if kind not in _NEEDED:
        raise keys.fail("rope_type", f"{kind!r} is not supported; supported: {', '.join(_NEEDED)}")
    for name in _NEEDED[kind]:
        if name not in found:
            raise keys.fail(name, f"is missing; rope_type {kind!r} needs it")
    if found.get("partial_rotary_factor", 1.0) != 1.0:
        raise keys.fail("partial_rotary_factor", "only 1.0 is supported for drafters of the Qwen3 kind")
    return found


def _merge(keys: Keys, source: str, found: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if name in found and found[name] != value:
            raise keys.fail(source, f"{name} {value!r} contradicts {found[name]!r} elsewhere in the file")
        found[name] = value

"""How large each dimension of a graph may be: TensorRT's optimisation profile, by dimension and not by input."""

from collections.abc import Mapping

from dspark.errors import UsageError
from dspark.manifest import CHUNK, Graph, Manifest, ring_rows, sized

Sizes = tuple[int, int, int]  # smallest, usual, largest


def plan(manifest: Manifest, role: str, wanted: Mapping[str, Sizes], fixed_block: bool = False) -> dict[str, Sizes]:
    """The sizes of every dimension of a role's portable graph: those `wanted`, else what the bundle's limits ask for.

    An engine runs one request at a time, whatever max_batch_size the bundle has. fixed_block: blocks have the drafter's
    block size and no other. UsageError, naming the input, for sizes that are no
    range or that the runtime would leave.
    """
    graph = manifest.graph(role, "portable")
    block = manifest.drafter.block_size
    rows, most = manifest.profiles.draft_len + 1, block + 1
    # The block's own rows are written behind the committed ones.
    capacity = manifest.profiles.max_context_len + block
    sizes: dict[str, Sizes] = {"R": (1, 1, 1), "P": (1, 1, 1), "N": (1, 1, 1)}
    sizes["C"] = (block + 1, capacity, capacity)
    if role == "target":
        sizes |= {"T": (1, rows, max(CHUNK, most)), "L": (1, rows, most)}
    else:
        draft_len = block if fixed_block else manifest.profiles.draft_len
        sizes |= {"G": (block if fixed_block else 1, draft_len, block), "Tc": (1, rows, max(CHUNK, most))}
    rings = {}
    if graph.window:
        ring = ring_rows(graph, capacity, max(CHUNK, block + 1))
        sizes["W"] = (block + 1, ring, ring)
        ring, context = (wanted.get(name, sizes[name])[-1] for name in ("W", "C"))
        columns = max(1, -(-context // max(1, ring)))  # a request's page is named as often as its rows go around
        sizes["N"] = (1, columns, columns)
        rings = {"W": ring_rows(graph, capacity, block + 1)}
    # A long prompt comes in pieces of CHUNK rows.
    piece = max(most, min(CHUNK, manifest.profiles.max_context_len))
    needed = {name: largest for name, (_, _, largest) in sizes.items()} | {"T": piece, "Tc": piece} | rings
    for name in sizes:
        if name not in wanted:
            continue
        chosen = smallest, _, largest = wanted[name]
        where = f"--profile {name}={':'.join(map(str, chosen))}: input {_input_with(graph, name)!r}"
        if not 1 <= smallest <= chosen[1] <= largest:
            raise UsageError(f"{where} needs 1 <= smallest <= usual <= largest")
        if largest < needed[name]:
            raise UsageError(f"{where} gets up to {needed[name]}; the largest size must be at least that")
        if name in ("R", "P", "N", "C", "W") and smallest > sizes[name][0]:
            raise UsageError(f"{where} gets as few as {sizes[name][0]}; the smallest size must be at most that")
        if name == "G" and (largest > block or (fixed_block and smallest < block)):
            only = f"of exactly {block}" if fixed_block else f"of 1 to {block}"
            raise UsageError(f"{where} has blocks {only} positions with this drafter")
        sizes[name] = chosen
    return sizes


def input_shapes(graph: Graph, sizes: Mapping[str, Sizes]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """For every input of the graph, caches included, its smallest, usual and largest shape."""
    at = [{name: of_three[i] for name, of_three in sizes.items()} for i in range(3)]
    return {name: tuple(sized(shape, one) for one in at) for name, shape in _shapes(graph).items()}


def _shapes(graph: Graph) -> dict[str, tuple[int | str, ...]]:
    caches = {p.input: ("P", p.kv_heads, "W" if p.window else "C", p.head_dim) for p in graph.caches}
    return {tensor.name: tensor.shape for tensor in graph.inputs} | caches


def _input_with(graph: Graph, dimension: str) -> str:
    # Where all caches are rings, what is left of C is how many rows the pages have to reach.
    return next((name for name, shape in _shapes(graph).items() if dimension in shape), "pages")

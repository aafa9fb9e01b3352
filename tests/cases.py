"""What the tests move: memories, caches in every layout, index lists, and the calls made of them.

A cache is a strided tensor, so a case is a shape, the order in which its dimensions lie in memory, and the holes
between them. The named layouts of the field are such orders with a name. Every tensor lies inside a larger storage, so
that a byte written beside it is seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

GUARD = 64  # bytes of storage before and behind every cache; torch's allocators align storages to at least as much

# The caches that each operator takes, in order. A move has one list for both its source and its destination.
CACHES = {
    "transfer_kv_per_layer": ("src_k", "dst_k", "src_v", "dst_v"),
    "transfer_kv_per_layer_mla": ("src", "dst"),
    "transfer_kv_all_layer": ("src_k", "dst_k", "src_v", "dst_v"),
    "transfer_kv_all_layer_mla": ("src", "dst"),
    "move_kv": ("k", "v"),
    "move_kv_mla": ("caches",),
}
TRANSFERS = [op for op in CACHES if op.startswith("transfer")]
MOVES = [op for op in CACHES if op.startswith("move")]


def is_mla(op: str) -> bool:
    return op.endswith("_mla")


def takes_lists(op: str) -> bool:
    return "per_layer" not in op


# ---- memory ---------------------------------------------------------------------------------------------------------


def empty(nbytes: int, memory: str) -> torch.Tensor:
    """Bytes in "cpu" (pageable), "pinned" or "cuda:N" memory."""
    if memory == "pinned":
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8, device=memory)


def dense(shape, dtype=torch.bfloat16, memory="cpu", align=GUARD) -> torch.Tensor:
    """A contiguous tensor at an address that is a multiple of `align`, and of nothing larger while `align` < 64."""
    nbytes = math.prod(shape) * dtype.itemsize
    start = GUARD + align
    return empty(start + nbytes + GUARD, memory)[start : start + nbytes].view(dtype).view(shape)


def strided(shape, dtype=torch.bfloat16, memory="cpu", order=None, holes=None, align=GUARD) -> torch.Tensor:
    """A tensor whose dimensions, but for the last, lie in memory in `order`, outermost first; `holes[i]` elements are
    left free behind each entry of dimension `order[i]`. The last dimension is innermost and contiguous."""
    order = list(range(len(shape) - 1)) if order is None else order
    holes = [0] * len(order) if holes is None else holes
    strides = [1] * len(shape)
    extent = shape[-1]
    for dim, hole in zip(reversed(order), reversed(holes), strict=True):
        strides[dim] = extent + hole
        extent = shape[dim] * strides[dim]
    flat = dense((extent,), dtype, memory, align)
    return flat.as_strided(shape, strides, flat.storage_offset())


# ---- layouts --------------------------------------------------------------------------------------------------------


@dataclass
class Cache:
    """K and V of all layers, one plane a layer (or one a head group and layer), and as a stack where there is one."""

    k: list
    v: list
    k_stack: torch.Tensor | None = None
    v_stack: torch.Tensor | None = None
    groups: int = 1

    def split_heads(self, groups: int) -> Cache:
        """The same cache as planes of one head group, in the order in which a page-unified pool lists them."""
        if self.groups == groups:
            return self

        def split(planes):
            heads = planes[0].shape[2] // groups
            return [plane[:, :, g * heads : (g + 1) * heads] for g in range(groups) for plane in planes]

        return Cache(split(self.k), split(self.v), groups=groups)


# Stacks [layers, pages, page_size, heads, head_dim] of one K or V pool; `pool` allocates a contiguous tensor.
STACKS = {
    "layer_first": lambda pool, n, p, s, h, d: pool(n, p * s, h, d).unflatten(1, (p, s)),
    "layer_first_tokens": lambda pool, n, p, s, h, d: pool(n, p * s, h, d).unsqueeze(2),
    "page_first": lambda pool, n, p, s, h, d: pool(p, s, n, h, d).permute(2, 0, 1, 3, 4),
    "page_first_direct": lambda pool, n, p, s, h, d: pool(p, n, s, h, d).permute(1, 0, 2, 3, 4),
    "page_head": lambda pool, n, p, s, h, d: pool(p, h, s, n, d).permute(3, 0, 2, 1, 4),
}
LAYOUTS = [*STACKS, "vllm_nhd", "vllm_hnd", "page_unified"]
LATENT_LAYOUTS = ["layer_first", "page_first", "page_first_direct"]
GROUPS = 2  # head groups of a page-unified pool


def kv_cache(layout, memory, layers, pages, page_size, heads, head_dim, dtype=torch.bfloat16) -> Cache:
    def pool(*shape):
        return dense(shape, dtype, memory)

    if layout in STACKS:
        k, v = (STACKS[layout](pool, layers, pages, page_size, heads, head_dim) for _ in "kv")
        return Cache(list(k.unbind()), list(v.unbind()), k, v)
    if layout == "vllm_nhd":
        blocks = [pool(2, pages, page_size, heads, head_dim) for _ in range(layers)]
        return Cache([block[0] for block in blocks], [block[1] for block in blocks])
    if layout == "vllm_hnd":
        blocks = [pool(2, pages, heads, page_size, head_dim).transpose(2, 3) for _ in range(layers)]
        return Cache([block[0] for block in blocks], [block[1] for block in blocks])
    unified = pool(pages, GROUPS, layers, 2, page_size, heads // GROUPS, head_dim)
    k, v = ([unified[:, g, n, i] for g in range(GROUPS) for n in range(layers)] for i in range(2))
    return Cache(k, v, groups=GROUPS)


def latent_stack(layout, memory, layers, pages, page_size, dim, dtype=torch.bfloat16) -> torch.Tensor:
    """[layers, pages, page_size, dim]: the layouts of a K or V pool of one head."""
    return STACKS[layout](lambda *shape: dense(shape, dtype, memory), layers, pages, page_size, 1, dim).squeeze(3)


def cut(stack: torch.Tensor, *layers: int) -> list:
    """A stack as a list of pieces of so many layers each. A piece of one layer comes without its layer dimension."""
    return [piece.squeeze(0) if piece.shape[0] == 1 else piece for piece in stack.split(layers)]


# ---- indices --------------------------------------------------------------------------------------------------------


def pick(count: int, capacity: int, seed: int = 0) -> list:
    """`count` different indices below `capacity`, in random order."""
    return torch.randperm(capacity, generator=torch.Generator().manual_seed(seed))[:count].tolist()


INDEX_FORMS = ("plain", "every_other", "offset", "column")


def index_tensor(values, memory="cpu", dtype=torch.int64, form="plain") -> torch.Tensor:
    """A 1-d index tensor; in the forms that skip elements, what lies between is a valid index, 0, that is not meant."""
    count = len(values)
    if form == "plain":
        base = empty(count * dtype.itemsize, memory).view(dtype)
        view = base
    elif form == "every_other":
        base = empty(2 * count * dtype.itemsize, memory).view(dtype)
        view = base[::2]
    elif form == "offset":
        base = empty((count + 3) * dtype.itemsize, memory).view(dtype)
        view = base[3:]
    elif form == "column":
        base = empty(5 * count * dtype.itemsize, memory).view(dtype).view(count, 5)
        view = base[:, 2]
    else:
        base = empty(dtype.itemsize, memory).view(dtype)  # "expanded": one index, `count` times
        view = base.expand(count)
        assert len(set(values)) <= 1
        values = values[:1]
    base.zero_()
    (base if form == "expanded" else view).copy_(torch.tensor(values, dtype=dtype))
    return view


# ---- calls ----------------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One call of an operator. `caches` are its cache arguments in order."""

    op: str
    caches: tuple
    src_indices: torch.Tensor | None = None
    dst_indices: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def args(self) -> tuple:
        return (*self.caches, self.src_indices, self.dst_indices)

    def run(self, functions=torch.ops.kvops) -> None:
        """Calls the raw operator, or the public function of `functions=kvops`."""
        getattr(functions, self.op)(*self.args, **self.options)

    def named_caches(self) -> dict[str, torch.Tensor]:
        """Every cache tensor under the name that messages use."""
        named = {}
        for name, cache in zip(CACHES[self.op], self.caches, strict=True):
            if torch.is_tensor(cache):
                named[name] = cache
            else:
                named.update((f"{name}[{i}]", tensor) for i, tensor in enumerate(cache))
        return named

    def pairs(self) -> list:
        """(source tensors, destination tensors) of K, and of V where the operator has it."""
        lists = [[cache] if torch.is_tensor(cache) else list(cache) for cache in self.caches]
        if self.op in MOVES:
            return [(pool, pool) for pool in lists]
        return list(zip(lists[0::2], lists[1::2], strict=True))


@dataclass(frozen=True)
class Way:
    """Where source, destination and indices of a call lie, and the engine that makes it."""

    src: str
    dst: str
    index: str
    engine: int = 0

    def __str__(self):
        return f"{self.src}-{self.dst}-engine{self.engine}-indices_{self.index}"

    def indices(self, values, **kwargs) -> torch.Tensor:
        return index_tensor(values, self.index, **kwargs)

    def call(self, op, caches, src_indices=None, dst_indices=None, **options) -> Call:
        """Indices may be plain lists here."""
        src_indices, dst_indices = (
            self.indices(values) if isinstance(values, list) else values for values in (src_indices, dst_indices)
        )
        return Call(op, tuple(caches), src_indices, dst_indices, {"engine": self.engine, **options})


def caches_for(
    op,
    way,
    form="list",
    layers=3,
    src=(5, 4),
    dst=(7, 3),
    row=(2, 8),
    v_row=None,
    dtype=torch.bfloat16,
) -> tuple:
    """Plain cache arguments for any operator. `src` and `dst` are (pages, page_size) or (tokens,). Lists have one
    tensor a layer, or one stacked pool in the form "stack". MLA rows are as wide as K's. A move's pool is `src`."""

    def cache(memory, side, row):
        row = (math.prod(row),) if is_mla(op) else row
        if not takes_lists(op):
            return dense((*side, *row), dtype, memory)
        if form == "stack":
            return [dense((layers, *side, *row), dtype, memory)]
        return [dense((*side, *row), dtype, memory) for _ in range(layers)]

    rows = [row] if is_mla(op) else [row, v_row or row]
    sides = [(way.src, src)] if op in MOVES else [(way.src, src), (way.dst, dst)]
    return tuple(cache(*side, row) for row in rows for side in sides)


CPU_WAY = Way("cpu", "cpu", "cpu")


def cuda_ways() -> list:
    """Every placement with a GPU side, and every engine that serves it. Auto and the SM kernel get their indices on the
    GPU, the others on the CPU; test_cuda.py crosses the rest."""
    ways = [Way("pinned", "pinned", "cpu"), Way("cpu", "cpu", "cuda:0")]
    for src, dst in (
        ("pinned", "cuda:0"),
        ("cuda:0", "pinned"),
        ("cpu", "cuda:0"),
        ("cuda:0", "cpu"),
        ("cuda:0", "cuda:0"),
    ):
        engines = (0, 1, 2) if src == dst else (0, 1, 2, 3)
        ways += [Way(src, dst, "cuda:0" if engine in (0, 1) else "cpu", engine) for engine in engines]
    if torch.cuda.device_count() > 1:
        ways += [Way("cuda:0", "cuda:1", "cpu"), Way("cuda:1", "cuda:0", "cuda:0")]
    return ways


def cuda_pools() -> list:
    """The same for moves within one pool."""
    return [Way("pinned", "pinned", "cpu")] + [
        Way("cuda:0", "cuda:0", "cuda:0" if engine in (0, 1) else "cpu", engine) for engine in (0, 1, 2)
    ]

"""The checks of every call that need no address and no index value, in the order and the words of csrc/geometry.cpp.

Sizes may be symbols, also unbacked ones: a comparison of sizes goes through `expect`, which hands a symbolic condition
to torch._check instead of asking for its value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

ENGINES = ("0 (auto)", "1 (sm)", "2 (copy)", "3 (staged)")


@dataclass
class Cache:
    """A cache tensor as layers x pages x page_size x heads x head_dim, whatever its number of dimensions."""

    name: str
    tensor: Tensor
    layers: int = 1
    pages: int = 0
    page_size: int = 1
    heads: int = 1
    head_dim: int = 0

    def units(self, page_indices: bool) -> int:
        return self.pages if page_indices else self.pages * self.page_size


class CacheArgument:
    """One tensor, or a list that is the concatenation of its elements along the layer axis."""

    def __init__(self, name: str, tensors: Tensor | Sequence[Tensor]) -> None:
        self.name = name
        self.is_list = isinstance(tensors, (list, tuple))
        self.tensors = list(tensors) if self.is_list else [tensors]
        self.caches: list[Cache] = []

    def names(self) -> Iterator[tuple[str, Tensor]]:
        for i, tensor in enumerate(self.tensors):
            yield (f"{self.name}[{i}]" if self.is_list else self.name), tensor

    def layers(self) -> int:
        return sum(cache.layers for cache in self.caches)


@dataclass
class Pair:
    src: CacheArgument
    dst: CacheArgument

    @property
    def arguments(self) -> list[CacheArgument]:
        return [self.src] if self.src is self.dst else [self.src, self.dst]


@dataclass
class Call:
    op: str
    latent: bool
    pairs: list[Pair]
    src_indices: Tensor | None
    dst_indices: Tensor | None
    page_indices: bool
    engine: int
    num_sms: int

    @property
    def src(self) -> list[Cache]:
        return [cache for pair in self.pairs for cache in pair.src.caches]

    @property
    def dst(self) -> list[Cache]:
        return [cache for pair in self.pairs for cache in pair.dst.caches]

    def fail(self, text: str) -> NoReturn:
        raise RuntimeError(f"kvops.{self.op}: {text}")

    def expect(self, condition: bool | torch.SymBool, text: Callable[[], str]) -> None:
        if isinstance(condition, torch.SymBool):
            torch._check(condition, lambda: f"kvops.{self.op}: {text()}")
        elif not condition:
            self.fail(text())


def check_call(call: Call) -> None:
    _check_options(call)
    for pair in call.pairs:
        for argument in pair.arguments:
            argument.caches = [_read_cache(call, argument, name, tensor) for name, tensor in argument.names()]
    for side in (call.src, call.dst):
        _check_one_device(call, side)
    for side in (call.src, call.dst):
        _check_one_page_size(call, side)
    _check_layers(call)
    for pair in call.pairs:
        _check_rows(call, pair)
    _check_page_indices(call)
    _check_indices(call)
    _check_engine_serves(call)
    _check_requires_grad(call)
    _check_all_meta_or_none(call)


def _check_options(call: Call) -> None:
    if not 0 <= call.engine <= 3:
        call.fail(f"engine is {call.engine}, expected 0 (auto), 1 (sm), 2 (copy) or 3 (staged)")
    if call.num_sms < 0:
        call.fail(f"num_sms is {call.num_sms}, expected 0 (automatic) or more")


def _device(tensor: Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else str(tensor.device)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_place(call: Call, name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        call.fail(f"{name} has layout {str(tensor.layout).removeprefix('torch.')}, expected strided")
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        call.fail(f"{name} is on {_device(tensor)}, expected cpu or cuda")


def _shapes_expected(latent: bool, is_list: bool) -> str:
    if latent:
        if is_list:
            return "expected 2 [tokens, dim], 3 [pages, page_size, dim] or 4 [layers, pages, page_size, dim]"
        return "expected 2 [tokens, dim] or 3 [pages, page_size, dim]"
    if is_list:
        return (
            "expected 3 [tokens, heads, head_dim], 4 [pages, page_size, heads, head_dim] "
            "or 5 [layers, pages, page_size, heads, head_dim]"
        )
    return "expected 3 [tokens, heads, head_dim] or 4 [pages, page_size, heads, head_dim]"


def _read_cache(call: Call, argument: CacheArgument, name: str, tensor: Tensor) -> Cache:
    if tensor is None:
        call.fail(f"{name} is None, expected a tensor")
    _check_place(call, name, tensor)
    if tensor.is_quantized:
        call.fail(f"{name} has dtype {_dtype(tensor)}, expected one that is not quantized")
    index_dims = tensor.dim() - (1 if call.latent else 2)  # 1: tokens, 2: paged, 3: a stack of layers
    if not 1 <= index_dims <= (3 if argument.is_list else 2):
        call.fail(f"{name} has {tensor.dim()} dimensions, {_shapes_expected(call.latent, argument.is_list)}")
    _check_last_dimension(call, name, tensor)
    sizes = list(tensor.shape)
    cache = Cache(name, tensor)
    if index_dims == 3:
        cache.layers = sizes.pop(0)
    cache.pages = sizes.pop(0)
    if index_dims >= 2:
        cache.page_size = sizes.pop(0)
    if not call.latent:
        cache.heads = sizes.pop(0)
    cache.head_dim = sizes.pop(0)
    return cache


def _check_last_dimension(call: Call, name: str, tensor: Tensor) -> None:
    stride = tensor.stride(-1)
    if isinstance(stride, int) and stride == 1:  # the good case asks nothing of symbolic sizes
        return
    # Strides of an empty tensor, or of a dimension of one element, mean nothing.
    exempt = tensor.shape[-1] <= 1
    for size in tensor.shape:
        exempt = exempt | (size == 0)
    call.expect(exempt | (stride == 1), lambda: f"{name} has stride {stride} in its last dimension, expected 1")


def _check_one_device(call: Call, side: list[Cache]) -> None:
    for cache in side:
        if cache.tensor.device != side[0].tensor.device:
            found, expected = _device(cache.tensor), _device(side[0].tensor)
            if "meta" not in (found, expected):  # reported by _check_all_meta_or_none
                call.fail(f"{cache.name} is on {found}, expected {expected} as {side[0].name}")


def _check_one_page_size(call: Call, side: list[Cache]) -> None:
    for cache in side[1:]:
        first = side[0]
        call.expect(
            cache.page_size == first.page_size,
            lambda cache=cache, first=first: (
                f"{cache.name} has page_size {cache.page_size}, expected {first.page_size} as {first.name}"
            ),
        )


def _check_layers(call: Call) -> None:
    first = call.pairs[0].src
    for pair in call.pairs:
        for argument in pair.arguments:
            call.expect(
                argument.layers() == first.layers(),
                lambda argument=argument: (
                    f"{argument.name} has {argument.layers()} layers in all, expected {first.layers()} as {first.name}"
                ),
            )


def _common_runs(src: list[Cache], dst: list[Cache]) -> Iterator[tuple[Cache, Cache]]:
    """The elements of two lists that share layers; the lists hold equally many in all.

    A symbolic number of layers counts as one or more. Where unbacked ones leave open which elements meet next, the walk
    ends: the kernel checks the rest.
    """
    i = j = src_done = dst_done = 0
    while i < len(src) and j < len(dst):
        src_left, dst_left = src[i].layers - src_done, dst[j].layers - dst_done
        if all(isinstance(left, torch.SymInt) or left > 0 for left in (src_left, dst_left)):
            yield src[i], dst[j]
        same = _known(src_left == dst_left)
        src_ends = same or _known(src_left < dst_left)
        dst_ends = same or _known(dst_left < src_left)
        if not (src_ends or dst_ends):
            return
        layers = src_left if src_ends else dst_left
        i, src_done = (i + 1, 0) if src_ends else (i, src_done + layers)
        j, dst_done = (j + 1, 0) if dst_ends else (j, dst_done + layers)


def _known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes is true, as far as can be told without the value of an unbacked one."""
    if not isinstance(condition, torch.SymBool):
        return condition
    # Slow to import, and loaded already where there are symbols.
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _check_rows(call: Call, pair: Pair) -> None:
    for src, dst in _common_runs(pair.src.caches, pair.dst.caches):
        if src.tensor.dtype != dst.tensor.dtype:
            call.fail(f"{dst.name} has dtype {_dtype(dst.tensor)}, expected {_dtype(src.tensor)} as {src.name}")
        if call.latent:
            call.expect(
                src.head_dim == dst.head_dim,
                lambda src=src, dst=dst: f"{dst.name} has dim {dst.head_dim}, expected {src.head_dim} as {src.name}",
            )
        for same in (src.heads == dst.heads, src.head_dim == dst.head_dim):
            call.expect(
                same,
                lambda src=src, dst=dst: (
                    f"{dst.name} has {dst.heads} heads of {dst.head_dim}, "
                    f"expected {src.heads} heads of {src.head_dim} as {src.name}"
                ),
            )


def _check_page_indices(call: Call) -> None:
    if call.page_indices and call.src and call.dst:
        src, dst = call.src[0], call.dst[0]
        call.expect(
            src.page_size == dst.page_size,
            lambda: (
                f"{dst.name} has page_size {dst.page_size}, expected {src.page_size} as {src.name}, "
                "since page_indices moves whole pages"
            ),
        )


def _check_indices(call: Call) -> None:
    for name, indices in (("src_indices", call.src_indices), ("dst_indices", call.dst_indices)):
        if indices is None:
            if call.pairs[0].src is call.pairs[0].dst:  # a move names its rows
                call.fail(f"{name} is None, expected a tensor")
            continue
        _check_place(call, name, indices)
        if indices.dtype not in (torch.int32, torch.int64):
            call.fail(f"{name} has dtype {_dtype(indices)}, expected int32 or int64")
        if indices.dim() != 1:
            call.fail(f"{name} has {indices.dim()} dimensions, expected 1")

    unit = "pages" if call.page_indices else "tokens"
    if call.src_indices is not None and call.dst_indices is not None:
        src_count, dst_count = call.src_indices.shape[0], call.dst_indices.shape[0]
        call.expect(
            src_count == dst_count,
            lambda: f"dst_indices has {dst_count} elements, expected {src_count} as src_indices",
        )
    elif call.src_indices is not None or call.dst_indices is not None:
        given, whole = ("src_indices", call.dst) if call.src_indices is not None else ("dst_indices", call.src)
        count = (call.src_indices if call.src_indices is not None else call.dst_indices).shape[0]
        for cache in whole:
            found = cache.units(call.page_indices)
            call.expect(
                found >= count,
                lambda cache=cache, found=found: (
                    f"{cache.name} has {found} {unit}, expected at least {count}, the length of {given}"
                ),
            )
    elif call.src or call.dst:
        first = (call.src or call.dst)[0]
        expected = first.units(call.page_indices)
        for pair in call.pairs:
            for argument in pair.arguments:
                for cache in argument.caches:
                    found = cache.units(call.page_indices)
                    call.expect(
                        found == expected,
                        lambda cache=cache, found=found: (
                            f"{cache.name} has {found} {unit}, expected {expected} as {first.name}"
                        ),
                    )


def _check_engine_serves(call: Call) -> None:
    if not call.src or not call.dst:
        return
    on_host = [side[0].tensor.device.type == "cpu" for side in (call.src, call.dst)]
    if all(on_host) and call.engine != 0:
        call.fail(
            f"engine is {ENGINES[call.engine]}, expected 0 (auto): source and destination are both in host memory"
        )
    on_gpu = [side[0].tensor.device.type == "cuda" for side in (call.src, call.dst)]
    if all(on_gpu) and call.engine == 3:
        call.fail(
            "engine is 3 (staged), expected 0 (auto), 1 (sm) or 2 (copy): "
            "neither source nor destination is in host memory"
        )


def _check_requires_grad(call: Call) -> None:
    for cache in call.dst:
        refuse_requires_grad(call.op, cache.name, cache.tensor)


def refuse_requires_grad(op: str, name: str, tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise RuntimeError(
            f"kvops.{op}: {name} requires grad, expected one that does not: "
            "a transfer writes in place and records no gradient"
        )


def _check_all_meta_or_none(call: Call) -> None:
    tensors = [(cache.name, cache.tensor) for cache in (*call.src, *call.dst)]
    for name, indices in (("src_indices", call.src_indices), ("dst_indices", call.dst_indices)):
        if indices is not None:
            tensors.append((name, indices))
    on_meta = [name for name, tensor in tensors if tensor.device.type == "meta"]
    if on_meta and len(on_meta) < len(tensors):
        call.fail(f"{on_meta[0]} is on meta, expected all tensors on meta or none")

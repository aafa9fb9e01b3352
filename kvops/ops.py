"""The public functions: names, defaults and documentation of the operators ``torch.ops.kvops.*``.

They do as little as a Python call can: look up the engine, refuse a destination that requires grad, call the operator.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from kvops.meta.checks import refuse_requires_grad

Caches = Tensor | Sequence[Tensor]


class Engine(enum.IntEnum):
    """Who moves the bytes. See the table of engines in :func:`transfer_kv_per_layer`."""

    AUTO = 0
    SM = 1
    COPY = 2
    STAGED = 3


_ENGINES: dict[str | int, int] = {engine.name.lower(): int(engine) for engine in Engine}
_ENGINES |= {int(engine): int(engine) for engine in Engine}  # an Engine is found under its number

_transfer_kv_per_layer = torch.ops.kvops.transfer_kv_per_layer.default
_transfer_kv_per_layer_mla = torch.ops.kvops.transfer_kv_per_layer_mla.default
_transfer_kv_all_layer = torch.ops.kvops.transfer_kv_all_layer.default
_transfer_kv_all_layer_mla = torch.ops.kvops.transfer_kv_all_layer_mla.default
_move_kv = torch.ops.kvops.move_kv.default
_move_kv_mla = torch.ops.kvops.move_kv_mla.default


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor | None = None,
    dst_indices: Tensor | None = None,
    *,
    page_indices: bool = False,
    engine: Engine | int | str = "auto",
    num_sms: int = 0,
) -> None:
    """Copies rows of one layer's K and V cache from ``src`` to ``dst``, by index.

    For each ``i``: row ``src_indices[i]`` of ``src_k`` is copied to row ``dst_indices[i]`` of ``dst_k``, and likewise
    V. A row is what one token owns: ``heads * head_dim`` elements. ``dst_k`` and ``dst_v`` are mutated, and nothing
    else; rows that no index names keep their bytes.

    Args:
        src_k, dst_k, src_v, dst_v: caches of shape ``[tokens, heads, head_dim]`` or
            ``[pages, page_size, heads, head_dim]``, on the CPU or a CUDA device, any dtype but quantized. Strides are
            free, except
            that the last dimension is contiguous: a layer of any memory layout is a view. K and V may have rows of
            different size; within K and within V, dtype, heads and head_dim agree between source and destination.
            Source and destination may have different page sizes. Both sources lie on one device, both destinations on
            one device.
        src_indices, dst_indices: token indices: int32 or int64, one-dimensional, of equal length, any stride, on the
            CPU or a CUDA device. Index ``t`` is page ``t // page_size``, slot ``t % page_size``, on each side by that
            side's own page size. ``None`` on one side means ``0, 1, 2, ...``; on both sides all tokens in order, which
            asks for equally many on both. Where ``dst_indices`` names a row more than once, each of its bytes comes
            from one of the sources; from which is unspecified.
        page_indices: indices name pages instead of tokens, and all of a page moves. Page sizes must agree.
        engine: who moves the bytes: an :class:`Engine`, its number, or its name.

            ========== ========================================================================================
            "auto"     the engine measured to be the fastest for this transfer
            "sm"       a kernel on a few SMs, which reads or writes host memory in place. Takes indices anywhere
            "copy"     the GPU's copy engine: runs of bytes that are contiguous on both sides. Takes no SM
            "staged"   the copy engine between host memory and a buffer on the GPU, a kernel between buffer and cache
            ========== ========================================================================================

            Between two caches in host memory the CPU's threads move the bytes, and only "auto" is accepted.
        num_sms: the most SMs that the SM kernel may take; 0 takes the fewest that saturate the link to the host, and
            all SMs between GPU memories (also in the staged engine's kernel).

    Stream and host: the work is ordered by the current stream of the destination's device, or of the source's where the
    destination is on the CPU; with two CUDA devices by the current streams of both. The call returns at once, and every
    argument may be dropped or, on that stream, be reused right after. It waits for the GPU only where host memory is
    pageable (which is moved through a pinned buffer, with one warning a process), where the copy or staged engine is
    asked for and indices lie on a GPU, where two CPU caches are given indices on a GPU, where indices lie on another
    GPU than the one that runs the transfer, and where it raises a fault that an earlier call met. Between CPU caches it
    returns when the bytes have moved. Under stream capture, index values on the CPU are those of the call, values on
    the GPU those of each replay, and the tensors must live as long as the graph, as with all of CUDA. PyTorch's version
    counters are not advanced.

    Raises:
        RuntimeError: for shapes, dtypes, devices or options that do not fit; for an index on the CPU that is out of
            range (before any byte moves); for source and destination planes, or indices and destination, that share
            memory; for a destination that
            overlaps itself or requires grad. The message names the argument, what was found and what was expected. An
            index on a GPU that is out of range is skipped, all other rows are moved, and the next call on that device
            raises.
        ValueError: for an engine of unknown name.

    Example: tokens 5 and 9 of layer 3, from a pinned page-first pool to the first rows of a GPU cache::

        host = torch.zeros(64, 16, 32, 8, 128, dtype=torch.bfloat16, pin_memory=True)  # pages, page_size, layers, ...
        k, v = torch.empty(2, 1024, 8, 128, dtype=torch.bfloat16, device="cuda")
        kvops.transfer_kv_per_layer(host[:, :, 3], k, host[:, :, 3], v, torch.tensor([5, 9]))
    """
    if dst_k.requires_grad or dst_v.requires_grad:
        _refuse_requires_grad("transfer_kv_per_layer", dst_k=dst_k, dst_v=dst_v)
    _transfer_kv_per_layer(
        src_k,
        dst_k,
        src_v,
        dst_v,
        src_indices,
        dst_indices,
        **_options(page_indices, engine, num_sms),
    )


def transfer_kv_per_layer_mla(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor | None = None,
    dst_indices: Tensor | None = None,
    *,
    page_indices: bool = False,
    engine: Engine | int | str = "auto",
    num_sms: int = 0,
) -> None:
    """Copies rows of one layer's latent (MLA) cache, or of any other state, from ``src`` to ``dst``, by index.

    As :func:`transfer_kv_per_layer`, which describes all arguments, with one cache in place of K and V.

    Args:
        src, dst: caches of shape ``[tokens, dim]`` or ``[pages, page_size, dim]``; a row is ``dim`` elements. ``dst``
            is mutated.

    Raises:
        RuntimeError, ValueError: as :func:`transfer_kv_per_layer`.

    Example::

        kvops.transfer_kv_per_layer_mla(host_latents[layer], latents[layer], host_slots, device_slots)
    """
    if dst.requires_grad:
        _refuse_requires_grad("transfer_kv_per_layer_mla", dst=dst)
    _transfer_kv_per_layer_mla(
        src,
        dst,
        src_indices,
        dst_indices,
        **_options(page_indices, engine, num_sms),
    )


def transfer_kv_all_layer(
    src_k: Caches,
    dst_k: Caches,
    src_v: Caches,
    dst_v: Caches,
    src_indices: Tensor | None = None,
    dst_indices: Tensor | None = None,
    *,
    page_indices: bool = False,
    engine: Engine | int | str = "auto",
    num_sms: int = 0,
) -> None:
    """Copies rows of all layers' K and V caches from ``src`` to ``dst``, by index, in one call.

    As :func:`transfer_kv_per_layer`, which describes the other arguments, for each layer with the same indices.

    Args:
        src_k, dst_k, src_v, dst_v: one tensor that stacks the layers, ``[layers, pages, page_size, heads, head_dim]``,
            or a sequence. A sequence is the concatenation of its elements along the layer axis; an element is such a
            stack, or one layer as in :func:`transfer_kv_per_layer`. Source and destination may be cut differently; the
            number of layers in all agrees. One page size and one device hold for each side. One stacked tensor is the
            fastest form to call. All of ``dst_k`` and ``dst_v`` are mutated at most.

    Raises:
        RuntimeError, ValueError: as :func:`transfer_kv_per_layer`.

    Example: all layers of a layer-first GPU pool ``[layers, tokens, heads, head_dim]`` to page-first host pages
    ``[pages, page_size, layers, heads, head_dim]``::

        kvops.transfer_kv_all_layer(
            k.unsqueeze(2), host_k.permute(2, 0, 1, 3, 4),
            v.unsqueeze(2), host_v.permute(2, 0, 1, 3, 4), slots, host_slots,
        )
    """
    src_k = _list("transfer_kv_all_layer", "src_k", src_k, 5)
    dst_k = _list("transfer_kv_all_layer", "dst_k", dst_k, 5)
    src_v = _list("transfer_kv_all_layer", "src_v", src_v, 5)
    dst_v = _list("transfer_kv_all_layer", "dst_v", dst_v, 5)
    if _any_requires_grad(dst_k) or _any_requires_grad(dst_v):
        _refuse_requires_grad("transfer_kv_all_layer", dst_k=dst_k, dst_v=dst_v)
    _transfer_kv_all_layer(
        src_k,
        dst_k,
        src_v,
        dst_v,
        src_indices,
        dst_indices,
        **_options(page_indices, engine, num_sms),
    )


def transfer_kv_all_layer_mla(
    src: Caches,
    dst: Caches,
    src_indices: Tensor | None = None,
    dst_indices: Tensor | None = None,
    *,
    page_indices: bool = False,
    engine: Engine | int | str = "auto",
    num_sms: int = 0,
) -> None:
    """Copies rows of all layers' latent (MLA) caches from ``src`` to ``dst``, by index, in one call.

    As :func:`transfer_kv_all_layer` with one list in place of K and V. Rows may differ in size from element to element,
    so that latents, index keys, scales and other states that share an index space travel together.

    Args:
        src, dst: one stack ``[layers, pages, page_size, dim]``, or a sequence of such stacks and of single layers
            ``[tokens, dim]`` or ``[pages, page_size, dim]``. Elements of ``dst`` are mutated.

    Raises:
        RuntimeError, ValueError: as :func:`transfer_kv_per_layer`.

    Example::

        host, device = [host_latents, host_index_keys], [latents, index_keys]
        kvops.transfer_kv_all_layer_mla(host, device, host_pages, device_pages, page_indices=True)
    """
    src = _list("transfer_kv_all_layer_mla", "src", src, 4)
    dst = _list("transfer_kv_all_layer_mla", "dst", dst, 4)
    if _any_requires_grad(dst):
        _refuse_requires_grad("transfer_kv_all_layer_mla", dst=dst)
    _transfer_kv_all_layer_mla(
        src,
        dst,
        src_indices,
        dst_indices,
        **_options(page_indices, engine, num_sms),
    )


def move_kv(
    k: Caches,
    v: Caches,
    src_indices: Tensor,
    dst_indices: Tensor,
    *,
    page_indices: bool = False,
    engine: Engine | int | str = "auto",
    num_sms: int = 0,
) -> None:
    """Moves rows within the K and V pools of all layers: row ``src_indices[i]`` to row ``dst_indices[i]``.

    The result is that of reading all source rows first and writing all destination rows then, also where the two index
    sets overlap or form cycles. Rows pass through a buffer of at most about 32 MiB, or of one layer where that is
    more, on the pools' device; it is given back when the call ends.

    Args:
        k, v: as the caches of :func:`transfer_kv_all_layer`; both are mutated.
        src_indices, dst_indices, page_indices, num_sms: as in :func:`transfer_kv_per_layer`; ``None`` is not accepted.
        engine: "auto" or "sm" (the SM kernel), or "copy".

    Raises:
        RuntimeError, ValueError: as :func:`transfer_kv_per_layer`.

    Example: two slots change places::

        kvops.move_kv(k, v, torch.tensor([3, 8]), torch.tensor([8, 3]))
    """
    k = _list("move_kv", "k", k, 5)
    v = _list("move_kv", "v", v, 5)
    if _any_requires_grad(k) or _any_requires_grad(v):
        _refuse_requires_grad("move_kv", k=k, v=v)
    _move_kv(
        k,
        v,
        src_indices,
        dst_indices,
        **_options(page_indices, engine, num_sms),
    )


def move_kv_mla(
    caches: Caches,
    src_indices: Tensor,
    dst_indices: Tensor,
    *,
    page_indices: bool = False,
    engine: Engine | int | str = "auto",
    num_sms: int = 0,
) -> None:
    """Moves rows within the latent (MLA) pools of all layers: row ``src_indices[i]`` to row ``dst_indices[i]``.

    As :func:`move_kv` with one list in place of K and V.

    Args:
        caches: as the caches of :func:`transfer_kv_all_layer_mla`; mutated.

    Raises:
        RuntimeError, ValueError: as :func:`transfer_kv_per_layer`.

    Example::

        kvops.move_kv_mla(latents, torch.tensor([3, 8]), torch.tensor([8, 3]))
    """
    caches = _list("move_kv_mla", "caches", caches, 4)
    if _any_requires_grad(caches):
        _refuse_requires_grad("move_kv_mla", caches=caches)
    _move_kv_mla(
        caches,
        src_indices,
        dst_indices,
        **_options(page_indices, engine, num_sms),
    )


def _options(page_indices: bool, engine: Engine | int | str, num_sms: int) -> dict[str, bool | int]:
    """The operator's keywords, but those at their defaults: each one passed costs more than half a microsecond."""
    options = {}
    if page_indices is not False:
        options["page_indices"] = page_indices
    if engine != "auto":
        options["engine"] = _ENGINES[engine] if engine in _ENGINES else _unknown_engine(engine)
    if num_sms != 0:
        options["num_sms"] = num_sms
    return options


def _list(op: str, name: str, caches: Caches, stack_dims: int) -> Sequence[Tensor]:
    """The list that the operator takes. A bare tensor is a stack of layers: one layer by itself would be a slip."""
    if isinstance(caches, Tensor):
        if caches.dim() != stack_dims:
            shape = (
                "[layers, pages, page_size, dim]" if stack_dims == 4 else "[layers, pages, page_size, heads, head_dim]"
            )
            raise RuntimeError(
                f"kvops.{op}: {name} has {caches.dim()} dimensions, expected {stack_dims} {shape}, or a list of layers "
                "(a pool without pages is pool.unsqueeze(2))"
            )
        return [caches]
    return caches if isinstance(caches, list | tuple) else list(caches)


def _any_requires_grad(caches: Sequence[Tensor]) -> bool:
    return any([cache.requires_grad for cache in caches])  # noqa: C419  (a list is faster than a generator here)


def _refuse_requires_grad(op: str, **destinations: Tensor | Sequence[Tensor]) -> NoReturn:
    for name, caches in destinations.items():
        named = [(name, caches)] if isinstance(caches, Tensor) else [(f"{name}[{i}]", c) for i, c in enumerate(caches)]
        for cache_name, cache in named:
            refuse_requires_grad(op, cache_name, cache)
    raise AssertionError("one of the destinations requires grad")


def _unknown_engine(engine: object) -> int:
    if isinstance(engine, int):
        return engine  # the operator refuses it in its own words
    names = ", ".join(repr(member.name.lower()) for member in Engine)
    raise ValueError(f"engine is {engine!r}, expected one of {names}, or an Engine")

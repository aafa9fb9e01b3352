"""The fakes of the four transfer operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvops.meta.checks import CacheArgument, Call, Pair, check_call
from torch import Tensor


@torch.library.register_fake("kvops::transfer_kv_per_layer")
def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor | None,
    dst_indices: Tensor | None,
    *,
    page_indices: bool = False,
    engine: int = 0,
    num_sms: int = 0,
) -> None:
    pairs = [
        Pair(CacheArgument("src_k", src_k), CacheArgument("dst_k", dst_k)),
        Pair(CacheArgument("src_v", src_v), CacheArgument("dst_v", dst_v)),
    ]
    check_call(Call("transfer_kv_per_layer", False, pairs, src_indices, dst_indices, page_indices, engine, num_sms))


@torch.library.register_fake("kvops::transfer_kv_per_layer_mla")
def transfer_kv_per_layer_mla(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor | None,
    dst_indices: Tensor | None,
    *,
    page_indices: bool = False,
    engine: int = 0,
    num_sms: int = 0,
) -> None:
    pairs = [Pair(CacheArgument("src", src), CacheArgument("dst", dst))]
    check_call(Call("transfer_kv_per_layer_mla", True, pairs, src_indices, dst_indices, page_indices, engine, num_sms))


@torch.library.register_fake("kvops::transfer_kv_all_layer")
def transfer_kv_all_layer(
    src_k: Sequence[Tensor],
    dst_k: Sequence[Tensor],
    src_v: Sequence[Tensor],
    dst_v: Sequence[Tensor],
    src_indices: Tensor | None,
    dst_indices: Tensor | None,
    *,
    page_indices: bool = False,
    engine: int = 0,
    num_sms: int = 0,
) -> None:
    pairs = [
        Pair(CacheArgument("src_k", src_k), CacheArgument("dst_k", dst_k)),
        Pair(CacheArgument("src_v", src_v), CacheArgument("dst_v", dst_v)),
    ]
    check_call(Call("transfer_kv_all_layer", False, pairs, src_indices, dst_indices, page_indices, engine, num_sms))


@torch.library.register_fake("kvops::transfer_kv_all_layer_mla")
def transfer_kv_all_layer_mla(
    src: Sequence[Tensor],
    dst: Sequence[Tensor],
    src_indices: Tensor | None,
    dst_indices: Tensor | None,
    *,
    page_indices: bool = False,
    engine: int = 0,
    num_sms: int = 0,
) -> None:
    pairs = [Pair(CacheArgument("src", src), CacheArgument("dst", dst))]
    check_call(Call("transfer_kv_all_layer_mla", True, pairs, src_indices, dst_indices, page_indices, engine, num_sms))

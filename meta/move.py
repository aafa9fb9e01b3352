"""The fakes of the operators that move rows within one pool: source and destination are the same caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kvops.meta.checks import CacheArgument, Call, Pair, check_call
from torch import Tensor


def _within(name: str, caches: Sequence[Tensor]) -> Pair:
    argument = CacheArgument(name, caches)
    return Pair(argument, argument)


@torch.library.register_fake("kvops::move_kv")
def move_kv(
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    *,
    page_indices: bool = False,
    engine: int = 0,
    num_sms: int = 0,
) -> None:
    pairs = [_within("k", k), _within("v", v)]
    check_call(Call("move_kv", False, pairs, src_indices, dst_indices, page_indices, engine, num_sms))


@torch.library.register_fake("kvops::move_kv_mla")
def move_kv_mla(
    caches: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    *,
    page_indices: bool = False,
    engine: int = 0,
    num_sms: int = 0,
) -> None:
    pairs = [_within("caches", caches)]
    check_call(Call("move_kv_mla", True, pairs, src_indices, dst_indices, page_indices, engine, num_sms))

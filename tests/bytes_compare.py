"""Compares bytes, and says where the first wrong one lies: argument, coordinates, both values, and how many are wrong.

Values are compared as bytes because poison and real caches hold NaN, which equals nothing, itself included.
"""

from __future__ import annotations

import torch


def byte_view(tensor: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
    """`tensor` as uint8 over `storage`, the bytes of its storage or a copy of them. The last dimension counts bytes."""
    size = tensor.element_size()
    shape = [*tensor.shape[:-1], tensor.shape[-1] * size]
    strides = [*(stride * size for stride in tensor.stride()[:-1]), 1]
    return storage.as_strided(shape, strides, tensor.storage_offset() * size)


def locate(position: int, storage_bytes: int, views: dict[str, torch.Tensor]) -> str:
    """The name and coordinates of the byte at `position` of a storage under the views that lie in it."""
    positions = torch.arange(storage_bytes)
    for name, tensor in views.items():
        hits = (byte_view(tensor, positions) == position).nonzero()
        if len(hits):
            *outer, byte = hits[0].tolist()
            element = ", ".join(str(i) for i in [*outer, byte // tensor.element_size()])
            return f"{name}[{element}], byte {byte % tensor.element_size()}"
    return "outside of every cache tensor"


def assert_same_bytes(found: torch.Tensor, alternatives: list, views: dict[str, torch.Tensor], what: str) -> None:
    """`found` is a whole storage. Each of its bytes must be that of one of the alternatives, mostly there is one."""
    wrong = torch.stack([found != expected for expected in alternatives]).all(0)
    if not wrong.any():
        return
    first = int(wrong.nonzero()[0])
    expected = " or ".join(sorted({f"0x{int(alternative[first]):02x}" for alternative in alternatives}))
    raise AssertionError(
        f"{what}: {locate(first, len(found), views)} (byte {first} of its storage) is 0x{int(found[first]):02x}, "
        f"expected {expected}; {int(wrong.sum())} of {len(found)} bytes differ"
    )

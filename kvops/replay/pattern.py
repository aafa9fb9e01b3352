"""The bytes that the rows of a block must hold, and where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvops.replay.models import Block


class Pattern:
    """Eight-byte words: hash(block, layer, token, part) ^ hash(word number).

    The first differs for every row of a block, so a row in a wrong place shows in nearly every byte; the second shows
    bytes in a wrong place within their row.
    """

    def __init__(self, block: Block, seed: int, device: str) -> None:
        def count(n: int) -> Tensor:
            return torch.arange(n, device=device)

        self.block, self.device, self.seed = block, device, seed
        self._rows = count(block.rows).view(len(block.model.parts), block.layers, 1, block.tokens)
        self._words = _mix(count(block.model.row_bytes // 8))

    def __call__(self, blocks: Sequence[int]) -> Tensor:
        """[parts, layers, pages of all blocks, page_size, row words]"""
        ids = torch.tensor(blocks, dtype=torch.int64, device=self.device).unsqueeze(1)
        rows = _mix(_mix(ids + self.seed) + self._rows)  # [parts, layers, blocks, tokens]
        return rows.flatten(2).unflatten(2, (-1, self.block.page_size, 1)) ^ self._words


def _mix(x: Tensor) -> Tensor:
    """Different numbers stay different and look random (multiply and xor-shift, both invertible modulo 2**64)."""
    x = (x + 1) * -0x61C8864680B583EB  # 0 stays 0 in what follows
    x = (x ^ _shift(x)) * -0x3B314601E57A13AD
    return x ^ _shift(x)


def _shift(x: Tensor) -> Tensor:
    return (x >> 32) & 0xFFFFFFFF  # int64 shifts in its sign


class Mismatch(NamedTuple):
    block: int
    layer: int
    token: int
    part: str
    byte: int
    found: int
    expected: int

    def __str__(self) -> str:
        return (
            f"block {self.block}, layer {self.layer}, token {self.token}, {self.part}, byte {self.byte}: "
            f"{self.found:#04x}, expected {self.expected:#04x}"
        )


def compare(
    block: Block, blocks: Sequence[int], found: Sequence[Tensor], expected: Tensor
) -> tuple[int, Mismatch | None]:
    """How many rows are wrong, and the first wrong byte in the order of Mismatch. `found`: a tensor a part."""
    if all(map(torch.equal, found, expected)):
        return 0, None
    found = torch.stack(tuple(found))
    wrong = (found != expected).any(-1)  # [parts, layers, pages, page_size]
    wrong = wrong.flatten(2).unflatten(2, (len(blocks), block.tokens)).permute(2, 1, 3, 0)
    number, layer, token, part = wrong.nonzero()[0].tolist()
    page, slot = divmod(number * block.tokens + token, block.page_size)
    row, right = (tensor[part, layer, page, slot].view(torch.uint8).tolist() for tensor in (found, expected))
    byte = next(byte for byte in range(len(row)) if row[byte] != right[byte])
    mismatch = Mismatch(blocks[number], layer, token, block.model.parts[part], byte, row[byte], right[byte])
    return int(wrong.sum()), mismatch

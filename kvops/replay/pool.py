"""The pages of one tier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvops.replay.models import Block

# How [layers, pages, page_size, row] is made of the pool as allocated: the permutation of its dimensions.
LAYOUTS = {
    "layer-first": (0, 1, 2, 3),  # allocated [layers, pages, page_size, row]
    "page-first": (2, 0, 1, 3),  # allocated [pages, page_size, layers, row]
    "page-first-direct": (1, 0, 2, 3),  # allocated [pages, layers, page_size, row]
}
POISON = 0x7FA57FA57FA57FA5  # what a free page holds; four NaNs in bf16


class Pool:
    """Memory for `slots` blocks, all poison. A slot's pages are scattered, as in a cache that has run for a while.

    `caches` is what kvops gets: one tensor a part, [layers, pages, page_size, *row] in bf16. `words` are the same bytes as
    int64, [layers, pages, page_size, row words].
    """

    def __init__(self, block: Block, slots: int, layout: str, device: str, pinned: bool, random: torch.Generator) -> None:
        permutation = LAYOUTS[layout]
        shape = (block.layers, slots * block.pages, block.page_size, block.model.row_bytes // 8)
        allocated = [shape[permutation.index(dim)] for dim in range(4)]
        self.words = [
            torch.empty(allocated, dtype=torch.int64, device=device, pin_memory=pinned).fill_(POISON).permute(permutation)
            for _ in block.model.parts
        ]
        self.caches = [words.view(torch.bfloat16).unflatten(-1, block.model.row) for words in self.words]
        self.device = device
        self._pages = torch.randperm(slots * block.pages, generator=random).view(slots, block.pages)

    def pages(self, slots: Sequence[int]) -> Tensor:
        """The pages of these slots, on the CPU."""
        return self._pages[torch.tensor(slots, dtype=torch.int64)].flatten()

    def poison(self, slots: Sequence[int]) -> None:
        if slots:
            pages = self.pages(slots).to(self.device)
            for words in self.words:
                words.index_fill_(1, pages, POISON)

    def write(self, slots: Sequence[int], content: Tensor) -> None:
        """`content`: [parts, layers, pages, page_size, row words]."""
        pages = self.pages(slots).to(self.device)
        for words, part in zip(self.words, content, strict=True):
            words.index_copy_(1, pages, part)

    def read(self, slots: Sequence[int]) -> Tensor:
        pages = self.pages(slots).to(self.device)
        return torch.stack([words.index_select(1, pages) for words in self.words])

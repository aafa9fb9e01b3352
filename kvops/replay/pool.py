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

    `caches` is what kvops gets: one tensor a part, [layers, pages, page_size, *row] in bf16. All else here sees the
    same bytes as int64 words.
    """

    def __init__(
        self, block: Block, slots: int, layout: str, device: str, *, pinned: bool, random: torch.Generator
    ) -> None:
        permutation = LAYOUTS[layout]
        shape = (block.layers, slots * block.pages, block.page_size, block.model.row_bytes // 8)
        allocated = [shape[permutation.index(dim)] for dim in range(4)]
        self._memory = [
            torch.empty(allocated, dtype=torch.int64, device=device, pin_memory=pinned).fill_(POISON)
            for _ in block.model.parts
        ]
        self._permutation = permutation
        rows = [self._view(memory).view(torch.bfloat16) for memory in self._memory]
        self.caches = [part.unflatten(-1, block.model.row) for part in rows]
        self.device = device
        self._pages = torch.randperm(slots * block.pages, generator=random).view(slots, block.pages)

    def pages(self, slots: Sequence[int]) -> Tensor:
        """The pages of these slots, on the CPU."""
        return self._pages[torch.tensor(slots, dtype=torch.int64)].flatten()

    def poison(self, slots: Sequence[int]) -> None:
        if slots:
            pages = self.pages(slots).to(self.device)
            for memory in self._memory:
                memory.index_fill_(self._page_dim, pages, POISON)

    def write(self, slots: Sequence[int], content: Tensor) -> None:
        """`content`: what Pattern makes."""
        pages = self.pages(slots).to(self.device)
        for memory, part in zip(self._memory, content, strict=True):
            self._view(memory).index_copy_(1, pages, part)

    def read(self, slots: Sequence[int]) -> list[Tensor]:
        # Selected before the permutation: index_select copies all of a view that is not contiguous.
        pages = self.pages(slots).to(self.device)
        return [self._view(memory.index_select(self._page_dim, pages)) for memory in self._memory]

    @property
    def _page_dim(self) -> int:
        return self._permutation[1]

    def _view(self, memory: Tensor) -> Tensor:
        """[layers, pages, page_size, row words], whatever the layout."""
        return memory.permute(self._permutation)

"""Carries the plans of the tiers out on two pools, with one kvops call a direction and request."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import kvops
from kvops.replay.models import Block
from kvops.replay.pattern import Mismatch, Pattern, compare
from kvops.replay.pool import Pool
from kvops.replay.tiers import Move, Placed, TwoTierCache

CHUNK_BYTES = 64 << 20  # patterns are made and compared piece by piece


@dataclass
class Meter:
    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        return self.bytes / self.seconds / 1e9 if self.calls else 0.0


@dataclass
class Count:
    requests: int = 0
    too_large: int = 0  # requests that need more blocks than the device pool holds; the end of the prompt is left out
    blocks_cut: int = 0
    looked_up: int = 0
    device_hits: int = 0
    host_hits: int = 0
    computed: int = 0
    evicted: int = 0
    rows_verified: int = 0
    mismatches: int = 0  # rows


class Replayer:
    def __init__(
        self,
        block: Block,
        device_slots: int,
        host_slots: int,
        *,
        device: str = "cpu",
        host_layout: str = "page-first",
        engine: str = "auto",
        indices_on: str = "cpu",
        seed: int = 0,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        self.block, self.engine, self.indices_on, self.on_cuda = block, engine, indices_on, device == "cuda"
        self.tiers = TwoTierCache(device_slots, host_slots)
        self.device_pool = Pool(block, device_slots, "layer-first", device, pinned=False, random=random)
        self.host_pool = Pool(block, host_slots, host_layout, "cpu", pinned=self.on_cuda, random=random)
        self.pattern = Pattern(block, seed, device)
        self.count = Count()
        self.restored, self.offloaded = Meter(), Meter()
        self.first_mismatch: Mismatch | None = None

    def request(self, prompt: Sequence[int]) -> None:
        fits = prompt[: self.tiers.device.slots]
        plan = self.tiers.request(fits)

        self.host_pool.poison(plan.freed_on_host)
        self._transfer(self.device_pool, self.host_pool, plan.offloads, self.offloaded)
        self.device_pool.poison(plan.freed_on_device)

        self._transfer(self.host_pool, self.device_pool, plan.restores, self.restored)
        self.host_pool.poison([move.source for move in plan.restores])

        # The request reads its prefix, and adds the rest of its prompt.
        self._verify(self.device_pool, plan.hits + [Placed(move.block, move.target) for move in plan.restores])
        self._compute(plan.computes)

        self.count.requests += 1
        self.count.too_large += len(fits) < len(prompt)
        self.count.blocks_cut += len(prompt) - len(fits)
        self.count.looked_up += len(fits)
        self.count.device_hits += len(plan.hits)
        self.count.host_hits += len(plan.restores)
        self.count.computed += len(plan.computes)
        self.count.evicted += plan.evictions

    def verify_all(self) -> None:
        """What is left in both tiers."""
        for pool, tier in ((self.device_pool, self.tiers.device), (self.host_pool, self.tiers.host)):
            self._verify(pool, [Placed(block, slot) for block, slot in tier.blocks.items()])

    def _transfer(self, source: Pool, target: Pool, moves: list[Move], meter: Meter) -> None:
        if not moves:
            return
        source_pages = source.pages([move.source for move in moves])
        target_pages = target.pages([move.target for move in moves])
        if self.indices_on == "device":
            source_pages, target_pages = (pages.to(self.device_pool.device) for pages in (source_pages, target_pages))
        options = {"page_indices": True, "engine": self.engine}

        self._synchronize()
        start = time.perf_counter()
        if len(self.block.model.parts) == 2:
            (source_k, source_v), (target_k, target_v) = source.caches, target.caches
            kvops.transfer_kv_all_layer(source_k, target_k, source_v, target_v, source_pages, target_pages, **options)
        else:
            kvops.transfer_kv_all_layer_mla(source.caches[0], target.caches[0], source_pages, target_pages, **options)
        self._synchronize()
        meter.seconds += time.perf_counter() - start
        meter.calls += 1
        meter.bytes += len(moves) * self.block.bytes

    def _compute(self, placed: list[Placed]) -> None:
        for blocks, slots in self._chunks(placed):
            self.device_pool.write(slots, self.pattern(blocks))

    def _verify(self, pool: Pool, placed: list[Placed]) -> None:
        for blocks, slots in self._chunks(placed):
            found = [part.to(self.pattern.device) for part in pool.read(slots)]
            rows, mismatch = compare(self.block, blocks, found, self.pattern(blocks))
            self.count.mismatches += rows
            self.first_mismatch = self.first_mismatch or mismatch
            self.count.rows_verified += len(blocks) * self.block.rows

    def _chunks(self, placed: list[Placed]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Blocks and their slots."""
        size = max(1, CHUNK_BYTES // self.block.bytes)
        for start in range(0, len(placed), size):
            blocks, slots = zip(*placed[start : start + size], strict=True)
            yield blocks, slots

    def _synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

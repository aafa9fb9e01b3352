"""Carries the plans of the tiers out on two pools, with one kvops call a direction and request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
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
        self.device = Pool(block, device_slots, "layer-first", device, pinned=False, random=random)
        self.host = Pool(block, host_slots, host_layout, "cpu", pinned=self.on_cuda, random=random)
        self.pattern = Pattern(block, seed, device)
        self.count: Counter[str] = Counter()
        self.restored, self.offloaded = Meter(), Meter()
        self.first_mismatch: Mismatch | None = None

    def request(self, prompt: Sequence[int]) -> None:
        fits = prompt[: self.tiers.device.slots]
        self.count["requests"] += 1
        self.count["too large"] += len(fits) < len(prompt)
        self.count["blocks cut"] += len(prompt) - len(fits)
        plan = self.tiers.request(fits)

        self.host.poison(plan.evicted)
        self._transfer(self.device, self.host, plan.offloads, self.offloaded)
        self.device.poison(plan.vacated)

        self._transfer(self.host, self.device, plan.restores, self.restored)
        self.host.poison([move.source for move in plan.restores])

        # The request reads its prefix, and adds the rest of its prompt.
        self._verify(self.device, plan.hits + [Placed(move.block, move.target) for move in plan.restores])
        self._compute(plan.computes)

        self.count["looked up"] += len(fits)
        self.count["device hits"] += len(plan.hits)
        self.count["host hits"] += len(plan.restores)
        self.count["computed"] += len(plan.computes)
        self.count["lost"] += plan.lost

    def verify_all(self) -> None:
        """What is left in both tiers."""
        for pool, tier in ((self.device, self.tiers.device), (self.host, self.tiers.host)):
            self._verify(pool, [Placed(block, slot) for block, slot in tier.blocks.items()])

    def _transfer(self, source: Pool, target: Pool, moves: list[Move], meter: Meter) -> None:
        if not moves:
            return
        source_pages = source.pages([move.source for move in moves])
        target_pages = target.pages([move.target for move in moves])
        if self.indices_on == "device":
            source_pages, target_pages = source_pages.to(self.device.device), target_pages.to(self.device.device)
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
            self.device.write(slots, self.pattern(blocks))

    def _verify(self, pool: Pool, placed: list[Placed]) -> None:
        for blocks, slots in self._chunks(placed):
            found = pool.read(slots).to(self.pattern.device)
            rows, mismatch = compare(self.block, blocks, found, self.pattern(blocks))
            self.count["mismatches"] += rows
            self.first_mismatch = self.first_mismatch or mismatch
            self.count["rows verified"] += len(blocks) * self.block.rows

    def _chunks(self, placed: list[Placed]):
        size = max(1, CHUNK_BYTES // self.block.bytes)
        for start in range(0, len(placed), size):
            yield zip(*placed[start : start + size], strict=True)

    def _synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

"""The bookkeeping of a two-tier prefix cache: what a request finds, and what has to move. No tensors here.

A block lies in one tier at most. Both tiers are LRU; a prompt is touched from its end to its start, so that the end of
a prefix is evicted before its start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import NamedTuple


class Tier:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.free = list(range(slots))
        self.blocks: OrderedDict[int, int] = OrderedDict()  # block -> slot, the least recently used first

    def __contains__(self, block: int) -> bool:
        return block in self.blocks

    def take(self, block: int) -> int:
        slot = self.blocks[block] = self.free.pop()
        return slot

    def release(self, block: int) -> int:
        slot = self.blocks.pop(block)
        self.free.append(slot)
        return slot

    def touch(self, block: int) -> None:
        self.blocks.move_to_end(block)

    def oldest(self, n: int) -> list[int]:
        return list(islice(self.blocks, max(n, 0)))


class Placed(NamedTuple):
    block: int
    slot: int


class Move(NamedTuple):
    block: int
    source: int
    target: int


@dataclass
class Plan:
    """What one request does, in the order in which it must be done."""

    freed_on_host: list[int] = field(default_factory=list)  # slots
    offloads: list[Move] = field(default_factory=list)  # device -> host
    freed_on_device: list[int] = field(default_factory=list)  # slots, those of the offloads among them
    restores: list[Move] = field(default_factory=list)  # host -> device; the host slots are free afterwards
    hits: list[Placed] = field(default_factory=list)  # on the device before and after
    computes: list[Placed] = field(default_factory=list)
    evictions: int = 0  # blocks that are in neither tier any more


class TwoTierCache:
    def __init__(self, device_slots: int, host_slots: int) -> None:
        self.device = Tier(device_slots)
        self.host = Tier(host_slots)

    def request(self, prompt: Sequence[int]) -> Plan:
        """Makes all of a prompt resident on the device, which must have that many slots."""
        device, host, plan = self.device, self.host, Plan()

        cached = list(takewhile(lambda block: block in device or block in host, prompt))
        missing = prompt[len(cached) :]
        for block in missing:  # behind a gap: in a tier, but not usable
            if block in device:
                plan.freed_on_device.append(device.release(block))
            elif block in host:
                plan.freed_on_host.append(host.release(block))
        for block in cached:  # now evictions, the oldest first, take all others before these
            (device if block in device else host).touch(block)
        hits = [block for block in cached if block in device]
        restored = [block for block in cached if block in host]

        # The offload comes before the restore, which needs the room: the host holds the blocks of both for a moment.
        victims = device.oldest(len(restored) + len(missing) - len(device.free))
        dropped = max(0, len(victims) - (host.slots - len(restored)))
        evicted = [host.release(block) for block in host.oldest(len(victims) - dropped - len(host.free))]
        plan.freed_on_host += evicted
        plan.evictions = dropped + len(evicted)
        for number, block in enumerate(victims):
            slot = device.release(block)
            plan.freed_on_device.append(slot)
            if number >= dropped:
                plan.offloads.append(Move(block, slot, host.take(block)))

        plan.restores = [Move(block, host.release(block), device.take(block)) for block in restored]
        plan.computes = [Placed(block, device.take(block)) for block in missing]
        plan.hits = [Placed(block, device.blocks[block]) for block in hits]
        for block in reversed(prompt):
            device.touch(block)
        return plan

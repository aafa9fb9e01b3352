"""What a replay says, as text and as JSON."""

from __future__ import annotations

import argparse
import json
import sys

from kvops.replay.models import Block
from kvops.replay.replayer import Meter, Replayer
from kvops.replay.trace import BLOCK_TOKENS

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def print_setting(options: argparse.Namespace, block: Block, device_slots: int, host_slots: int) -> None:
    row = " x ".join(map(str, block.model.row))
    tokens = f"{BLOCK_TOKENS} tokens / {options.scale} = {block.tokens}"
    print(f"trace      {options.trace or f'generated, seed {options.seed}'}")
    print(f"model      {options.model}, {block.layers} of its {block.model.layers} layers, rows of {row} bf16")
    print(f"block      {tokens}, in pages of {block.page_size}, {size(block.bytes)}")
    print(f"device     {options.device}, {size(options.device_pool)} layer-first, {device_slots} blocks")
    print(f"host       {size(options.host_pool)} {options.host_layout}, {host_slots} blocks", flush=True)


def print_result(replayer: Replayer, seconds: float) -> None:
    count = replayer.count
    outcomes = {"device hits": count.device_hits, "host hits": count.host_hits, "computed": count.computed}
    shares = (f"{blocks / max(1, count.looked_up):.1%} {name}" for name, blocks in outcomes.items())
    print(f"requests   {count.requests} in {seconds:.1f} s")
    print(f"blocks     {count.looked_up} looked up: {', '.join(shares)}")
    print(f"too large  {count.too_large} prompts for the device pool, {count.blocks_cut} blocks cut from their ends")
    print(f"restored   {_meter(replayer.restored)}")
    print(f"offloaded  {_meter(replayer.offloaded)}")
    print(f"evicted    {count.evicted} blocks from both pools, the bytes of their last offload not verified")
    print(f"verified   {count.rows_verified} rows, {count.mismatches} mismatches")
    if replayer.first_mismatch:
        print(f"first mismatch: {replayer.first_mismatch}", file=sys.stderr)


def write_json(options: argparse.Namespace, replayer: Replayer, seconds: float) -> None:
    block, mismatch = replayer.block, replayer.first_mismatch
    setting = {name: value for name, value in vars(options).items() if name not in ("run", "json", "quiet")}
    trace = str(options.trace) if options.trace else None
    result = {
        "setting": setting | {"trace": trace, "layers": block.layers, "page_size": block.page_size},
        "block": {"tokens": block.tokens, "bytes": block.bytes},
        "seconds": seconds,
        **vars(replayer.count),
        "restored": vars(replayer.restored) | {"GB/s": replayer.restored.rate},
        "offloaded": vars(replayer.offloaded) | {"GB/s": replayer.offloaded.rate},
        "first_mismatch": mismatch._asdict() if mismatch else None,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def size(n: int) -> str:
    unit = next((unit for unit in reversed(UNITS) if n >= UNITS[unit]), "KiB")
    return f"{n / UNITS[unit]:.4g} {unit}"


def _meter(meter: Meter) -> str:
    return f"{size(meter.bytes)} in {meter.calls} calls, {meter.seconds:.2f} s, {meter.rate:.2f} GB/s"

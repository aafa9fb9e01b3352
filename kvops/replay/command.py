"""python -m kvops replay"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path

from tqdm import tqdm

import kvops
from kvops.replay.models import MODELS, Block
from kvops.replay.pool import LAYOUTS
from kvops.replay.replayer import Meter, Replayer
from kvops.replay.trace import BLOCK_TOKENS, TraceError, generate_trace, read_trace

GENERATED_REQUESTS = 1000
# What a real trace of an hour needs less than a minute for; on the CPU in less than 2 GiB.
DEFAULTS = {
    "cpu": {"scale": 128, "layers": 4, "device_pool": 128 << 20, "host_pool": 512 << 20},
    "cuda": {"scale": 32, "layers": None, "device_pool": 4 << 30, "host_pool": 16 << 30},
}
COUNTS = (
    "requests",
    "looked up",
    "device hits",
    "host hits",
    "computed",
    "lost",
    "too large",
    "blocks cut",
    "rows verified",
    "mismatches",
)
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="replay a request trace through a two-tier KV cache and check every byte",
        description="Replays a request trace through a paged KV cache of a device pool and a host pool, both LRU, as fast as "
        "it goes. The longest cached prefix of a prompt is used: blocks on the device as they are, blocks in host memory "
        "after one restore; the others are computed (their bytes are a known pattern). What has to leave the device is "
        "offloaded to host memory. Each block that a request uses is compared with the pattern, and at the end all that "
        "is left. Exit code: 0, 1 after a mismatch, 2 for bad input.",
    )
    parser.set_defaults(run=lambda options: run(parser, options))
    add = parser.add_argument
    add("trace", nargs="?", type=Path, help=f"JSON lines; without it, {GENERATED_REQUESTS} generated requests")
    add("--requests", type=_positive, metavar="N", help="only the first N requests")
    add("--model", choices=MODELS, default="Llama-3-8B", help="(default: %(default)s)")
    add("--layers", type=_positive, metavar="N", help="layers used of the model's (default: 4 on the CPU, all on CUDA)")
    add(
        "--scale",
        type=_positive,
        metavar="N",
        help=f"divides the {BLOCK_TOKENS} tokens of a block (default: 128 on the CPU, 32 on CUDA)",
    )
    add("--page-size", type=_positive, metavar="N", help="tokens a page (default: 16, at most half a block)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    add("--device-pool", type=_size, metavar="SIZE", help='like "512MiB" (default: 128MiB on the CPU, 4GiB on CUDA)')
    add("--host-pool", type=_size, metavar="SIZE", help="0 for none (default: 512MiB on the CPU, 16GiB on CUDA)")
    add("--host-layout", choices=LAYOUTS, default="page-first", help="(default: %(default)s)")
    add("--engine", choices=("auto", "sm", "copy", "staged"), default="auto", help="(default: %(default)s)")
    add("--indices", choices=("cpu", "device"), default="cpu", help="where page indices lie (default: %(default)s)")
    add("--seed", type=_seed, metavar="N", default=0, help="of pages, pattern and generated trace (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the result there as well")
    add("--quiet", action="store_true", help="no progress bar")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    _complete(parser, options)
    block = _block(parser, options)
    slots = {name: getattr(options, f"{name}_pool") // block.bytes for name in ("device", "host")}
    if not slots["device"]:
        parser.error(f"--device-pool holds no block: one takes {_text(block.bytes)}")
    try:
        if options.trace:
            trace = read_trace(options.trace, options.requests)
        else:
            trace = generate_trace(options.requests or GENERATED_REQUESTS, options.seed)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    _print_setting(options, block, slots)

    start = time.perf_counter()
    replayer = Replayer(
        block,
        slots["device"],
        slots["host"],
        device=options.device,
        host_layout=options.host_layout,
        engine=options.engine,
        indices_on=options.indices,
        seed=options.seed,
    )
    for request in tqdm(trace, unit=" requests", disable=True if options.quiet else None):  # None: not to a file or pipe
        replayer.request(request.hash_ids)
    replayer.verify_all()
    seconds = time.perf_counter() - start

    _print_result(replayer, seconds)
    if options.json:
        _write_json(options, replayer, slots, seconds)
    return 1 if replayer.first_mismatch else 0


def _complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fills in what depends on the device, and refuses what does not go together."""
    available = kvops.cuda_available()
    if options.device == "auto":
        options.device = "cuda" if available else "cpu"
    if options.device == "cuda" and not available:
        parser.error(f"--device cuda: {available.reason}")
    if options.device == "cpu" and options.engine != "auto":
        parser.error(f"--engine {options.engine} needs --device cuda")
    for name, value in DEFAULTS[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: no such folder")


def _block(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Block:
    model = MODELS[options.model]
    layers = options.layers or model.layers
    if layers > model.layers:
        parser.error(f"--layers {layers}: {options.model} has {model.layers}")
    tokens, rest = divmod(BLOCK_TOKENS, options.scale)
    if rest:
        parser.error(f"--scale {options.scale} does not divide the {BLOCK_TOKENS} tokens of a block")
    page_size = options.page_size or max(1, min(16, tokens // 2))
    if tokens % page_size:
        parser.error(f"--page-size {page_size} does not divide a block of {tokens} tokens (--scale {options.scale})")
    return Block(model, layers, tokens, page_size)


def _print_setting(options: argparse.Namespace, block: Block, slots: dict[str, int]) -> None:
    row = " x ".join(map(str, block.model.row))
    print(f"trace      {options.trace or f'generated, seed {options.seed}'}")
    print(f"model      {options.model}, {block.layers} of its {block.model.layers} layers, rows of {row} bf16")
    print(
        f"block      {BLOCK_TOKENS} tokens / {options.scale} = {block.tokens}, {block.pages} pages of {block.page_size}, "
        f"{_text(block.bytes)}"
    )
    print(f"device     {options.device}, {_text(options.device_pool)} layer-first: {slots['device']} blocks")
    print(f"host       {_text(options.host_pool)} {options.host_layout}: {slots['host']} blocks", flush=True)


def _print_result(replayer: Replayer, seconds: float) -> None:
    count = replayer.count
    share = {name: count[name] / max(1, count["looked up"]) for name in ("device hits", "host hits", "computed")}
    print(f"requests   {count['requests']} in {seconds:.1f} s")
    print(f"blocks     {count['looked up']} looked up: {', '.join(f'{share[name]:.1%} {name}' for name in share)}")
    print(f"lost       {count['lost']} blocks left the host pool for good")
    print(f"too large  {count['too large']} requests for the device pool, {count['blocks cut']} blocks cut from their ends")
    print(f"restored   {_meter(replayer.restored)}")
    print(f"offloaded  {_meter(replayer.offloaded)}")
    print(f"verified   {count['rows verified']} rows, {count['mismatches']} mismatches")
    if replayer.first_mismatch:
        print(f"first mismatch: {replayer.first_mismatch}", file=sys.stderr)


def _write_json(options: argparse.Namespace, replayer: Replayer, slots: dict[str, int], seconds: float) -> None:
    block, mismatch = replayer.block, replayer.first_mismatch
    setting = {name: value for name, value in vars(options).items() if name not in ("run", "json", "quiet")}
    setting |= {"trace": str(options.trace) if options.trace else None, "layers": block.layers, "page_size": block.page_size}
    result = {
        "setting": setting,
        "block": {"tokens": block.tokens, "bytes": block.bytes},
        "slots": slots,
        "seconds": seconds,
        **{name.replace(" ", "_"): replayer.count[name] for name in COUNTS},
        "restored": vars(replayer.restored) | {"GB/s": replayer.restored.rate},
        "offloaded": vars(replayer.offloaded) | {"GB/s": replayer.offloaded.rate},
        "first_mismatch": mismatch._asdict() if mismatch else None,
    }
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def _meter(meter: Meter) -> str:
    return f"{_text(meter.bytes)} in {meter.calls} calls, {meter.seconds:.2f} s, {meter.rate:.2f} GB/s"


def _text(size: int) -> str:
    unit = next((unit for unit in reversed(UNITS) if size >= UNITS[unit]), "KiB")
    return f"{size / UNITS[unit]:.4g} {unit}"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number below 2**63")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})", text)
    if text == "0":
        return 0
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 1.5GiB")
    return int(float(match[1]) * UNITS[match[2]])

"""python -m kvops replay"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

import kvops
from kvops.replay import report
from kvops.replay.models import MODELS, Block
from kvops.replay.pool import LAYOUTS
from kvops.replay.replayer import Replayer
from kvops.replay.trace import BLOCK_TOKENS, TraceError, generate_trace, read_trace

DESCRIPTION = """
Replays a request trace, as fast as it goes, through a paged KV cache of a device pool and a host pool, both LRU. A
request uses the longest prefix of its prompt that is cached: what the device holds as it is, what host memory holds
after one restore. The rest is "computed": its bytes are a known pattern. What has to leave the device is offloaded to
host memory. All a request uses is compared with the pattern, and so is, at the end, all that is left in both pools.
Exit code: 0, 1 after a mismatch, 2 for bad input.
"""

GENERATED_REQUESTS = 1500
# An hour of a busy service takes about a minute at most, on the CPU in less than 2 GiB. One CPU thread: a request moves
# about 1 MiB, where more threads gain little on an idle machine and lose much on a busy one, waiting for each other.
DEFAULTS = {
    "cpu": {"scale": 128, "layers": 2, "device_pool": 64 << 20, "host_pool": 512 << 20, "threads": 1},
    "cuda": {"scale": 32, "layers": None, "device_pool": 2 << 30, "host_pool": 16 << 30, "threads": None},
}


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "replay", help="replay a request trace through a two-tier KV cache and check its bytes", description=DESCRIPTION
    )
    parser.set_defaults(run=lambda options: run(parser, options))
    trace_text = f"JSON lines (default: {GENERATED_REQUESTS} generated requests)"
    parser.add_argument("trace", nargs="?", type=Path, help=trace_text)

    def option(name: str, text: str, **settings) -> None:
        parser.add_argument(f"--{name}", help=text, **settings)

    def number(name: str, text: str, **settings) -> None:
        option(name, text, type=_positive, metavar="N", **settings)

    def choice(name: str, text: str, choices, default: str) -> None:
        option(name, f"{text} (default: %(default)s)", choices=choices, default=default)

    number("requests", "only the first N requests, or N generated ones")
    choice("model", "whose rows are moved, in bf16", MODELS, "Llama-3-8B")
    number("layers", "layers used of the model's (default: 2 on the CPU, all on CUDA)")
    number("scale", f"divides the {BLOCK_TOKENS} tokens of a block (default: 128 on the CPU, 32 on CUDA)")
    number("page-size", "tokens a page (default: 16, at most half a block)")
    choice("device", "of the device pool; auto is cuda if kvops can", ("auto", "cpu", "cuda"), "auto")
    option("device-pool", "(default: 64MiB on the CPU, 2GiB on CUDA)", type=_size, metavar="SIZE")
    option("host-pool", "0 for none (default: 512MiB on the CPU, 16GiB on CUDA)", type=_size, metavar="SIZE")
    choice("host-layout", "of the host pool; the device's is layer-first", LAYOUTS, "page-first")
    choice("engine", "of kvops", ("auto", "sm", "copy", "staged"), "auto")
    choice("indices", "where page indices lie", ("cpu", "device"), "cpu")
    number("threads", "CPU threads of PyTorch and kvops (default: 1; PyTorch's on CUDA)")
    option("seed", "of pages, pattern and generated trace (default: 0)", type=_seed, metavar="N", default=0)
    option("json", "write the result there as well", type=Path, metavar="FILE")
    option("quiet", "no progress bar", action="store_true")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    _complete(parser, options)
    block = _block(parser, options)
    device_slots, host_slots = options.device_pool // block.bytes, options.host_pool // block.bytes
    if device_slots == 0:
        parser.error(f"--device-pool holds no block: one takes {report.size(block.bytes)}")
    try:
        if options.trace:
            trace = read_trace(options.trace, options.requests)
        else:
            trace = generate_trace(options.requests or GENERATED_REQUESTS, options.seed)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2

    report.print_setting(options, block, device_slots, host_slots)
    if options.threads:
        torch.set_num_threads(options.threads)
    replayer = Replayer(
        block,
        device_slots,
        host_slots,
        device=options.device,
        host_layout=options.host_layout,
        engine=options.engine,
        indices_on=options.indices,
        seed=options.seed,
    )
    start = time.perf_counter()
    no_bar = True if options.quiet else None  # None: not to a file or pipe
    for request in tqdm(trace, unit=" requests", disable=no_bar):
        replayer.request(request.hash_ids)
    replayer.verify_all()
    seconds = time.perf_counter() - start

    report.print_result(replayer, seconds)
    if options.json:
        report.write_json(options, replayer, seconds)
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
    if options.json and (options.json.is_dir() or not options.json.absolute().parent.is_dir()):
        parser.error(f"--json {options.json}: expected a file in a folder that exists")


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


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number below 2**63")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(report.UNITS)})", text)
    if text == "0":
        return 0
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 1.5GiB")
    return int(float(match[1]) * report.UNITS[match[2]])

"""Request traces in the form of the Mooncake project, one JSON object a line:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, ...]}

An id stands for 512 prompt tokens and all before them, so prompts that begin with the same ids share a prefix.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

BLOCK_TOKENS = 512


class TraceError(Exception):
    """A trace that cannot be replayed; the text names file and line."""


@dataclass(frozen=True)
class Request:
    timestamp: int  # milliseconds from the start
    input_length: int  # tokens
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    try:
        with path.open("rb") as lines:
            requests = [_parse(line, f"{path}:{number}") for number, line in islice(enumerate(lines, 1), limit)]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    if not requests:
        raise TraceError(f"{path}: no request in it")
    return requests


def _parse(line: bytes, where: str) -> Request:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, a number of thousands of digits, nested too deep
        raise TraceError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: expected a JSON object, found {json.dumps(fields):.40}")

    def field(name: str, kind: type, expected: str):
        if name not in fields:
            raise TraceError(f"{where}: no field {name}")
        if type(fields[name]) is not kind:  # a bool is an int to isinstance
            raise TraceError(f"{where}: {name} is {json.dumps(fields[name]):.40}, expected {expected}")
        return fields[name]

    def length(name: str) -> int:
        value = field(name, int, "a whole number")
        if value < 0:
            raise TraceError(f"{where}: {name} is {value}, expected 0 or more")
        return value

    request = Request(*map(length, ("timestamp", "input_length", "output_length")), field("hash_ids", list, "a list"))
    for position, block in enumerate(request.hash_ids):
        if type(block) is not int or not 0 <= block < 1 << 63:
            raise TraceError(f"{where}: hash_ids[{position}] is {json.dumps(block):.40}, expected 0 <= id < 2**63")
    blocks, found = -(-request.input_length // BLOCK_TOKENS), len(request.hash_ids)
    if found != blocks:
        raise TraceError(
            f"{where}: hash_ids holds {found} ids, expected {blocks}: one per {BLOCK_TOKENS} tokens of the "
            f"input_length {request.input_length}"
        )
    if len(set(request.hash_ids)) != found:
        raise TraceError(f"{where}: hash_ids holds an id twice, expected each once: an id stands for a whole prefix")
    return request


def generate_trace(requests: int, seed: int) -> list[Request]:
    """Chats of several turns, each behind one of a few system prompts. A few users ask often, many now and then."""
    rng = random.Random(seed)
    new_id = count()
    systems = [[next(new_id) for _ in range(rng.randint(1, 6))] for _ in range(8)]
    chats: dict[int, tuple[list[int], int]] = {}  # user -> the whole blocks and the tokens so far
    trace = []
    timestamp = 0
    for _ in range(requests):
        user = _zipf(rng, 500)
        if user in chats and rng.random() < 0.9:
            blocks, tokens = chats[user]
        else:
            blocks = systems[_zipf(rng, len(systems))]
            tokens = len(blocks) * BLOCK_TOKENS
        tokens += 1 + int(rng.lognormvariate(7.5, 1.2))
        blocks = blocks + [next(new_id) for _ in range(tokens // BLOCK_TOKENS - len(blocks))]
        # The last block, if not full, is this prompt's alone: the next turn fills it with other tokens.
        rest = [next(new_id)] if tokens % BLOCK_TOKENS else []
        output = 1 + int(rng.expovariate(1 / 350))
        trace.append(Request(timestamp, tokens, output, blocks + rest))
        timestamp += int(rng.expovariate(1 / 300))
        chats[user] = blocks, tokens + output
        if tokens > 128 * BLOCK_TOKENS:
            del chats[user]
    return trace


def _zipf(rng: random.Random, n: int) -> int:
    """A rank below n, rank r about 1 / (r + 1) as likely as rank 0."""
    return int((n + 1) ** rng.random()) - 1

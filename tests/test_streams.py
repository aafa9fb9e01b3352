"""A transfer runs in the order of the current stream, returns at once, and needs nothing of the caller after that.

Streams are kept busy by a delay kernel: what runs too early, or is let go too soon, leaves the wrong bytes.
"""

import threading
from dataclasses import replace

import pytest
import torch
from cases import Way, dense, pick
from cuda_cases import DELAY, PINNED_WAYS, cuda_test, every_pinned_way, every_pool, every_way, simple_call
from reference import POISON, Snapshot, assert_bytes, check, expected, fill, reachable, storage_bytes

pytestmark = cuda_test


def check_in_stream_order(call, stream):
    """The stream is busy when the call is made; what the call reads is written there before it, what it wrote is read
    there after it and then overwritten. None of that may be seen too early or too late."""
    fill(call)
    before = Snapshot(reachable(call).values())
    alternatives = expected(call, before)
    on_gpu = [storage_bytes(tensor) for tensor in reachable(call).values() if tensor.is_cuda]
    kept = [storage.clone() for storage in on_gpu]
    for storage in on_gpu:
        storage.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY)
        for storage, content in zip(on_gpu, kept, strict=True):
            storage.copy_(content)
        call.run()
        results = [storage.clone() for storage in on_gpu]
        for storage in on_gpu:
            storage.zero_()
    stream.synchronize()
    for storage, result in zip(on_gpu, results, strict=True):
        storage.copy_(result)
    assert_bytes(call, alternatives, call.op)


STREAMS = {
    "side": torch.cuda.Stream,
    "high_priority": lambda: torch.cuda.Stream(priority=-1),
    "legacy_default": torch.cuda.default_stream,
}


@pytest.mark.parametrize("stream", STREAMS)
@every_way
def test_stream_order(way, stream):
    check_in_stream_order(simple_call(way), STREAMS[stream]())


@pytest.mark.parametrize("stream", STREAMS)
@every_pool
def test_stream_order_of_moves(way, stream):
    check_in_stream_order(simple_call(way, "move_kv"), STREAMS[stream]())


@every_pinned_way
def test_returns_before_the_work_is_done(way):
    call = simple_call(way)
    call.run()  # loads the kernels
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY)
    call.run()
    assert not torch.cuda.current_stream().query(), "the call waited for the stream"
    torch.cuda.synchronize()


def test_two_streams_do_not_wait_for_each_other():
    """A call on one stream, while the stream of another call is busy."""
    way = Way("pinned", "cuda:0", "cuda:0", engine=1)
    late, early = simple_call(way), simple_call(way)
    for call in (late, early):
        call.run()
    torch.cuda.synchronize()
    busy, free = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(3 * DELAY)
        late.run()
    with torch.cuda.stream(free):
        early.run()
    free.synchronize()
    assert not busy.query()
    torch.cuda.synchronize()


def test_many_threads_each_with_its_stream():
    failures = []

    def work(seed):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for way in PINNED_WAYS:
                    check(simple_call(way, count=5 + seed))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


# ---- lifetimes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ["cpu", "pinned"])
@every_pinned_way
def test_host_indices_may_be_changed_right_after_the_call(way, index):
    call = simple_call(replace(way, index=index))

    def run(call):
        torch.cuda._sleep(DELAY)
        call.run()
        values = [tensor.clone() for tensor in (call.src_indices, call.dst_indices)]
        for tensor in (call.src_indices, call.dst_indices):
            tensor.fill_(0)
        torch.cuda.synchronize()
        for tensor, value in zip((call.src_indices, call.dst_indices), values, strict=True):
            tensor.copy_(value)

    check(call, run)


@pytest.mark.parametrize("index", ["cpu", "pinned", "cuda:0"])
@every_pinned_way
def test_arguments_may_be_dropped_right_after_the_call(way, index):
    """The source and both index tensors go, and their memory is handed out again and overwritten while the stream is
    busy. Only the destination is held."""
    way = replace(way, index=index)
    tokens, dim = 64, 4096
    rows = torch.randint(0, POISON, (tokens, dim), dtype=torch.uint8)
    source = dense((tokens, dim), torch.uint8, way.src)
    source.copy_(rows)
    destination = dense((tokens, dim), torch.uint8, way.dst)
    src, dst = pick(tokens, tokens, seed=1), pick(tokens, tokens, seed=2)
    call = way.call("transfer_kv_per_layer_mla", (source, destination), src, dst)
    torch.cuda.synchronize()

    torch.cuda._sleep(DELAY)
    call.run()
    del call, source
    for _ in range(8):
        dense((tokens, dim), torch.uint8, way.src).fill_(1)
        way.indices([0] * tokens)
    torch.cuda.synchronize()
    assert torch.equal(destination.cpu()[dst], rows[src])

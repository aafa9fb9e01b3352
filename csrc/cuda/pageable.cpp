#include "pageable.h"

#include <algorithm>
#include <array>
#include <memory>

#include "../cpu/copy_rows.h"
#include "../through_buffer.h"

namespace kvops::cuda {
namespace {

constexpr int64_t kChunkBytes = 16 << 20;  // of each of two pinned buffers: one is filled while the other is on its way

}  // namespace

void run_pageable(const Plan& plan, const Context& context, const std::function<void(const Plan&)>& run) {
    if (context.capturing) {
        fail(plan.op, "host memory is pageable, expected pinned memory while the stream is being captured");
    }
    const auto [from_host, shape, page_size] = host_side_of(plan);
    const int64_t chunk = units_in(plan, kChunkBytes, page_size);
    const bool several = chunk < plan.count;
    struct Buffer {
        char* bytes;
        Event done;
        bool used;
        Halves halves;
    };
    const int64_t bytes = buffer_bytes(plan, chunk);
    std::array<std::unique_ptr<Buffer>, 2> buffers;
    for (int i = 0; i < (several ? 2 : 1); ++i) {
        buffers[i].reset(new Buffer{context.surroundings.pinned_bytes(bytes), Event(plan.op), false, {}});
    }
    const auto finish = [&](Buffer& buffer) {
        if (!buffer.used) return;
        buffer.done.synchronize();
        buffer.used = false;
        if (!from_host) copy_rows(buffer.halves.out_of, context.surroundings.parallel_for());
    };
    int next = 0;
    for (int64_t begin = 0; begin < plan.count; begin += chunk) {
        Buffer& buffer = *buffers[next];
        next = several ? 1 - next : 0;
        finish(buffer);
        buffer.halves =
            through_buffer(plan, begin, std::min(plan.count, begin + chunk), shape, page_size, buffer.bytes, -1);
        if (from_host) copy_rows(buffer.halves.into, context.surroundings.parallel_for());
        run(from_host ? buffer.halves.out_of : buffer.halves.into);
        buffer.done.record(context.stream);
        buffer.used = true;
    }
    finish(*buffers[next]);
    if (several) finish(*buffers[1 - next]);
}

}  // namespace kvops::cuda

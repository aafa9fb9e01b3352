// Idea: units go in chunks, and chunks in turn to a few streams of our own, each with a staging buffer. A stream copies its
// chunk between host memory and its buffer and moves it between buffer and cache, one after the other, so that it needs no
// event; while one stream's kernel runs, the others keep the copy engine busy, and copies of middling size, in several
// streams at once, hide each other's set-up. Bytes: once over the bus, and once in and once out of a buffer in the GPU's
// memory, which is some fifty times as fast. What bounds it: the bus.
#include "staged.h"

#include <algorithm>
#include <vector>

#include "../through_buffer.h"
#include "../tuning.h"
#include "copy_engine.h"
#include "sm_kernel.h"
#include "streams.h"
#include "upload.h"

namespace kvops::cuda {
void run_staged(const Plan& plan, const Context& context) {
    const auto [from_host, shape, page_size] = host_side_of(plan);
    const int64_t chunk = units_in(plan, tuning::staged_chunk_bytes, page_size);
    const int64_t chunks = (plan.count + chunk - 1) / chunk;
    // A capture would draw streams that other calls use into its graph: there the caller's stream does it all.
    const int streams = context.capturing ? 1 : static_cast<int>(std::min<int64_t>(chunks, kInternalStreams));

    // As the kernels see it. Their indices must be on their way before the streams part, except in a capture, whose replays
    // find them in the parameters.
    Plan on_device = plan;
    Indices& of_cache = (from_host ? on_device.dst : on_device.src).indices;
    if (of_cache.data != nullptr && !context.capturing) of_cache = uploaded(of_cache, plan.count, context);
    const int64_t bytes = buffer_bytes(plan, chunk);
    std::vector<char*> buffers;
    for (int i = 0; i < streams; ++i) buffers.push_back(context.surroundings.device_bytes(bytes, context.device));

    const auto run_chunk = [&](int64_t begin, char* buffer, const Context& on) {
        const int64_t end = std::min(plan.count, begin + chunk);
        if (from_host) {
            run_copy_in_order(through_buffer(plan, begin, end, shape, page_size, buffer, on.device).into, on);
            run_sm(through_buffer(on_device, begin, end, shape, page_size, buffer, on.device).out_of, on);
        } else {
            run_sm(through_buffer(on_device, begin, end, shape, page_size, buffer, on.device).into, on);
            run_copy_in_order(through_buffer(plan, begin, end, shape, page_size, buffer, on.device).out_of, on);
        }
    };
    if (context.capturing) {
        for (int64_t i = 0; i < chunks; ++i) run_chunk(i * chunk, buffers[0], context);
        return;
    }
    Fork fork(context, streams);
    for (int64_t i = 0; i < chunks; ++i) {
        Context on = context;
        on.stream = fork.stream(static_cast<int>(i % streams));
        run_chunk(i * chunk, buffers[i % streams], on);
    }
    fork.join();
}

}  // namespace kvops::cuda

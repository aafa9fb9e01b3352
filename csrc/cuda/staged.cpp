// Bytes: once over the bus, and once in and once out of a staging buffer in the GPU's memory, which is some fifty times as
// fast. Everything is ordered by the caller's stream, so that one buffer serves all chunks.
#include "staged.h"

#include "../through_buffer.h"
#include "copy_engine.h"
#include "sm_kernel.h"

namespace kvops::cuda {
namespace {

constexpr int64_t kChunkBytes = 16 << 20;  // copies of this size reach the copy engine's full speed

}  // namespace

void run_staged(const Plan& plan, const Context& context) {
    const auto [from_host, shape, page_size] = host_side_of(plan);
    const int64_t chunk = units_in(plan, kChunkBytes, page_size);
    char* buffer = context.surroundings.device_bytes(buffer_bytes(plan, chunk), context.device);
    for (int64_t begin = 0; begin < plan.count; begin += chunk) {
        const int64_t end = std::min(plan.count, begin + chunk);
        const Halves halves = through_buffer(plan, begin, end, shape, page_size, buffer, context.device);
        if (from_host) {
            run_copy(halves.into, context);
            run_sm(halves.out_of, context);
        } else {
            run_sm(halves.into, context);
            run_copy(halves.out_of, context);
        }
    }
}

}  // namespace kvops::cuda

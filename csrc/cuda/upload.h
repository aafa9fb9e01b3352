// Indices from host memory to the GPU.
#pragma once

#include <vector>

#include "../plan.h"
#include "runtime.h"

namespace kvops::cuda {

// A copy of host indices on the context's device, issued on the current stream (which need not be the context's).
inline Indices uploaded(const Indices& indices, int64_t count, const Context& context) {
    std::vector<int64_t> values(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) values[i] = indices[i];
    Indices result;
    result.data = context.surroundings.upload(values.data(), count * 8, context.device);
    result.device = context.device;
    return result;
}

}  // namespace kvops::cuda

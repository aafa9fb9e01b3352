// Which host memory the GPU reaches in place, and where one registration of it meets the next.
#pragma once

#include <vector>

#include "../plan.h"
#include "runtime.h"

namespace kvops::cuda {

struct HostMemory {
    bool pinned = true;              // all of it: allocated or registered with CUDA, and mapped at its own address
    std::vector<const char*> seams;  // ascending; where a cache goes on in another registration: no copy may span one
};

// Of the plan's host side, if it has one. Costs one call of the driver a tensor.
HostMemory host_memory_of(const Plan& plan, const Context& context);

}  // namespace kvops::cuda

// The staged engine: the copy engine moves host memory in pieces as large as the host has them, an SM kernel takes them
// apart in the GPU's own memory.
#pragma once

#include "../plan.h"
#include "runtime.h"

namespace kvops::cuda {

// One side is pinned host memory, the other the context's GPU. All indices lie in host memory.
void run_staged(const Plan& plan, const Context& context);

}  // namespace kvops::cuda

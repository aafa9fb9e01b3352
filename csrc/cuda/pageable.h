// Host memory that the GPU cannot reach in place: moved through pinned buffers, with the host's threads.
#pragma once

#include <functional>

#include "../plan.h"
#include "runtime.h"

namespace kvops::cuda {

// `run` moves a plan whose host side is pinned. All indices lie in host memory. Waits for the GPU.
void run_pageable(const Plan& plan, const Context& context, const std::function<void(const Plan&)>& run);

}  // namespace kvops::cuda

// The copy engine: the runs of bytes that are contiguous on both sides, copied by the GPU's DMA units. Takes no SM.
#pragma once

#include "../plan.h"
#include "runtime.h"

namespace kvops::cuda {

// All indices lie in host memory. May be captured: then each copy is a node of the graph.
void run_copy(const Plan& plan, const Context& context);

// The same on the context's stream alone, which is captured or one of our own: no copy is spread over others.
void run_copy_in_order(const Plan& plan, const Context& context);

}  // namespace kvops::cuda

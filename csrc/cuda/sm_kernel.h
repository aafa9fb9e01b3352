// The SM engine: thread blocks read and write caches in place, host memory over the bus.
#pragma once

#include "../plan.h"
#include "runtime.h"

namespace kvops::cuda {

// A further check on the units of a plan whose rows come from a buffer: a unit whose index lies outside of the limit is
// skipped. Its fault was reported when the buffer was filled.
struct SkipUnits {
    Indices indices;
    int64_t limit;
};

// Indices may lie on the plan's GPU (checked there, bad units skipped and reported) or in host memory (checked before).
void run_sm(const Plan& plan, const Context& context, const SkipUnits* skip = nullptr);

}  // namespace kvops::cuda

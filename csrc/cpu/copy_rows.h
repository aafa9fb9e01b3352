// The CPU engine: host memory to host memory, the reference for the others.
#pragma once

#include "../plan.h"
#include "parallel.h"

namespace kvops {

// All indices lie in host memory and have been checked. Source and destination share no byte.
void copy_rows(const Plan& plan, const ParallelFor& parallel_for);

}  // namespace kvops

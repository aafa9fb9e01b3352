// A plan with at least one side, or its indices, on a GPU.
#pragma once

#include "../engine.h"
#include "../plan.h"
#include "../surroundings.h"

namespace kvops::cuda {

// What bad indices of earlier calls have to say comes first, before this call moves anything.
void raise_pending_faults(const Plan& plan);

// Where a call's work was issued.
struct Ran {
    void* stream;  // a cudaStream_t
    bool captured;
};

// Moves the plan on the current stream of the destination's device, or of the source's where the destination is host memory.
Ran run(const Plan& plan, Engine engine, int num_sms, Surroundings& surroundings);

// The same within one pool: as if all rows were read before the first is written.
Ran run_within_pool(const Plan& plan, Engine engine, int num_sms, Surroundings& surroundings);

// Brings indices that lie on a GPU to host memory and checks their values. Waits for the GPU. `reason` says who needs them.
void fetch_indices(Plan& plan, const char* reason, Surroundings& surroundings);

}  // namespace kvops::cuda

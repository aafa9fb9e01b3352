// Bad index values that a kernel met on the GPU: written there to a word in host memory, raised by the next call.
#pragma once

#include <cstdint>

namespace kvops::cuda {

// The first fault since the last one was raised. Strings are literals of this library: the device only hands them back.
struct FaultRecord {
    const char* op;
    const char* indices;         // "src_indices" or "dst_indices"
    const char* limit_argument;  // as in plan.h
    int64_t limit_element;
    int64_t position;
    int64_t value;
    int64_t limit;
    bool pages;
    uint32_t complete;  // set last
};

// Where a kernel reports: one each device, for the life of the process.
struct FaultWord {
    FaultRecord* record;  // mapped host memory
    uint32_t* count;      // device memory: atomics on host memory are none to the device
};

FaultWord fault_word(const char* op, int device);

// Raises and clears what earlier kernels reported. Costs one read of host memory where there is nothing.
void raise_pending_fault(const char* op, int device);

}  // namespace kvops::cuda

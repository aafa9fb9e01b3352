// What an engine may ask of its surroundings, without knowing torch: temporary memory, streams and threads.
#pragma once

#include <cstdint>

#include "cpu/parallel.h"

namespace kvops {

// One call's. Memory lives until the call ends.
class Surroundings {
   public:
    virtual ~Surroundings() = default;

    // Device memory, ordered by the current stream of that device: work issued there may use it after the call has ended.
    virtual char* device_bytes(int64_t bytes, int device) = 0;
    // Host memory. Whoever uses it asynchronously must wait before the call ends.
    virtual char* host_bytes(int64_t bytes) = 0;
    virtual char* pinned_bytes(int64_t bytes) = 0;
    // A copy of host bytes on the device, issued on the current stream. `bytes` may be changed right after.
    virtual const char* upload(const void* bytes, int64_t size, int device) = 0;
    // The current stream of the device: a cudaStream_t.
    virtual void* stream(int device) = 0;

    // Torch's threads.
    virtual const ParallelFor& parallel_for() const = 0;
    // A warning of the caller's language.
    virtual void warn(const char* message) = 0;
};

}  // namespace kvops

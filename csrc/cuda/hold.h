// Pinned memory outlives the transfers that use it. Torch's pinned allocator hands memory out again as soon as the last
// tensor over it is gone; it knows of torch's own copies, but not of kernels that read host memory in place.
#pragma once

#include <functional>
#include <memory>
#include <vector>

namespace kvops::cuda {

// Keeps `memory` until what the device's stream (a cudaStream_t) has been given so far is done. `storages` are the addresses
// of the memory's storages: as long as they are the ones of an earlier call on that stream, holding on costs one event
// record, and `memory` is not asked for.
void hold_until_done(const char* op, int device, void* stream, const std::vector<const void*>& storages,
                     const std::function<std::shared_ptr<void>()>& memory);

// For the end of the process: memory that is still held then is left to it. To be called while torch is alive, and Python
// where there is one.
void stop_letting_go();

}  // namespace kvops::cuda

// Streams of kvops' own: a few for each device, made once, for the life of the process. They never block, and are not
// blocked by, the legacy default stream; events order them with the caller's stream.
#pragma once

#include "runtime.h"

namespace kvops::cuda {

constexpr int kInternalStreams = 4;

cudaStream_t internal_stream(const char* op, int device, int number);

}  // namespace kvops::cuda

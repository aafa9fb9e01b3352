// Two GPUs: in place where one reaches the other's memory, through a buffer on each where it does not.
#pragma once

#include <functional>

#include "../plan.h"
#include "runtime.h"

namespace kvops::cuda {

// Whether kernels on a device may touch the memory of its peer. Peer access is switched on for good where it can be had.
bool reaches(int device, int peer, const Context& context);

// `context` is that of the destination's device; the source is another device's. `run` moves a plan on a context's device.
// The current streams of both devices are ordered as if the transfer ran on both.
void run_between_devices(const Plan& plan, const Context& context,
                         const std::function<void(const Plan&, const Context&)>& run);

}  // namespace kvops::cuda

#include "peers.h"

#include <algorithm>

#include "../through_buffer.h"

namespace kvops::cuda {
namespace {

constexpr int64_t kChunkBytes = 64 << 20;

// The later stream waits for the earlier one; an event belongs to the device of the stream that records it.
void order_across(const Context& earlier, const Context& later) {
    if (earlier.stream == later.stream && earlier.device == later.device) return;
    DeviceGuard guard(earlier.op, earlier.device);
    Event event(earlier.op);
    event.record(earlier.stream);
    event.wait(later.stream);
}

// The way without peer access: packed on the source's device, copied across, unpacked at the destination.
void run_through_buffers(const Plan& plan, const Context& source, const Context& destination,
                         const std::function<void(const Plan&, const Context&)>& run) {
    const int64_t chunk = units_in(plan, kChunkBytes, 1);
    const int64_t bytes = buffer_bytes(plan, chunk);
    char* packed = source.surroundings.device_bytes(bytes, source.device);
    char* arrived = destination.surroundings.device_bytes(bytes, destination.device);
    for (int64_t begin = 0; begin < plan.count; begin += chunk) {
        const int64_t end = std::min(plan.count, begin + chunk);
        const Halves pack = through_buffer(plan, begin, end, Shape::of_src, 1, packed, source.device);
        const Halves unpack = through_buffer(plan, begin, end, Shape::of_src, 1, arrived, destination.device);
        {
            DeviceGuard guard(plan.op, source.device);
            run(pack.into, source);
        }
        order_across(source, destination);
        destination.check(cudaMemcpyPeerAsync(arrived, destination.device, packed, source.device,
                                              static_cast<size_t>(buffer_bytes(plan, end - begin)), destination.stream),
                          "cudaMemcpyPeerAsync");
        order_across(destination, source);
        run(unpack.out_of, destination);
    }
}

}  // namespace

bool reaches(int device, int peer, const Context& context) {
    int can = 0;
    context.check(cudaDeviceCanAccessPeer(&can, device, peer), "cudaDeviceCanAccessPeer");
    if (can == 0) return false;
    OutsideCapture outside;
    DeviceGuard guard(context.op, device);
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
        return true;
    }
    context.check(error, "cudaDeviceEnablePeerAccess");
    return true;
}

void run_between_devices(const Plan& plan, const Context& context,
                         const std::function<void(const Plan&, const Context&)>& run) {
    Context source = context;
    source.device = plan.src.device;
    source.stream = static_cast<cudaStream_t>(context.surroundings.stream(source.device));
    order_across(source, context);
    if (reaches(context.device, source.device, context)) {
        run(plan, context);
    } else {
        run_through_buffers(plan, source, context, run);
    }
    order_across(context, source);
}

}  // namespace kvops::cuda

#include "streams.h"

#include <map>
#include <mutex>
#include <utility>

namespace kvops::cuda {

cudaStream_t internal_stream(const char* op, int device, int number) {
    static std::mutex mutex;
    static std::map<std::pair<int, int>, cudaStream_t> streams;
    std::lock_guard<std::mutex> lock(mutex);
    const auto known = streams.find({device, number});
    if (known != streams.end()) return known->second;
    OutsideCapture outside;
    DeviceGuard guard(op, device);
    cudaStream_t stream = nullptr;
    check(op, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    streams.emplace(std::make_pair(device, number), stream);
    return stream;
}

}  // namespace kvops::cuda

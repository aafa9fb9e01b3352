#include "streams.h"

#include <map>
#include <mutex>
#include <utility>

namespace kvops::cuda {
namespace {

cudaStream_t internal_stream(const char* op, int device, int number) {
    static std::mutex mutex;
    static auto* streams = new std::map<std::pair<int, int>, cudaStream_t>;
    std::lock_guard<std::mutex> lock(mutex);
    const auto known = streams->find({device, number});
    if (known != streams->end()) return known->second;
    OutsideCapture outside;
    DeviceGuard guard(op, device);
    cudaStream_t stream = nullptr;
    check(op, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    streams->emplace(std::make_pair(device, number), stream);
    return stream;
}

}  // namespace

Fork::Fork(const Context& context, int streams) : context_(context) {
    for (int i = 0; i < streams; ++i) {
        streams_.push_back(internal_stream(context.op, context.device, i));
        done_.push_back(std::make_unique<Event>(context.op));
    }
    Event before(context.op);
    before.record(context.stream);
    for (const cudaStream_t stream : streams_) before.wait(stream);
}

void Fork::join() {
    joined_ = true;
    for (size_t i = 0; i < streams_.size(); ++i) {
        done_[i]->record(streams_[i]);
        done_[i]->wait(context_.stream);
    }
}

Fork::~Fork() {
    if (joined_) return;
    try {
        join();
    } catch (...) {
        // The context itself has failed, which the error on its way says.
    }
}

}  // namespace kvops::cuda

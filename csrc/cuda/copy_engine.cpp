// What bounds it: about half a microsecond a copy on an H200, then the bus. Copies of one call do not depend
// on each other, so that those of middling size are spread over several streams: the DMA units then overlap the set-up of
// one copy with the bytes of another.
#include "copy_engine.h"

#include <algorithm>
#include <vector>

#include "../runs.h"
#include "../tuning.h"
#include "streams.h"

namespace kvops::cuda {
namespace {

struct Copies {
    std::vector<void*> dst;
    std::vector<const void*> src;
    std::vector<size_t> bytes;
    size_t total = 0;

    void add(const char* from, char* to, int64_t size) {
        src.push_back(from);
        dst.push_back(to);
        bytes.push_back(static_cast<size_t>(size));
        total += static_cast<size_t>(size);
    }
    size_t size() const { return bytes.size(); }
};

// Copies in one batch: bounds the work that one call of the driver does at a time.
constexpr size_t kMaxBatch = 8192;

bool driver_has_batches(const Context& context) {
#if CUDART_VERSION >= 12080
    static const int version = [&] {
        int found = 0;
        context.check(cudaDriverGetVersion(&found), "cudaDriverGetVersion");
        return found;
    }();
    return version >= 12080;
#else
    (void)context;
    return false;
#endif
}

void copy_one_by_one(Copies& copies, size_t begin, size_t end, cudaStream_t stream, const Context& context) {
    for (size_t i = begin; i < end; ++i) {
        context.check(cudaMemcpyAsync(copies.dst[i], copies.src[i], copies.bytes[i], cudaMemcpyDefault, stream),
                      "cudaMemcpyAsync");
    }
}

void copy_batches(Copies& copies, size_t begin, size_t end, cudaStream_t stream, const Context& context) {
#if CUDART_VERSION >= 12080
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t attributes_from = 0;
    for (size_t first = begin; first < end; first += kMaxBatch) {
        const size_t count = std::min(kMaxBatch, end - first);
#if CUDART_VERSION >= 13000
        context.check(cudaMemcpyBatchAsync(const_cast<const void**>(copies.dst.data()) + first,
                                           copies.src.data() + first, copies.bytes.data() + first, count, &attributes,
                                           &attributes_from, 1, stream),
                      "cudaMemcpyBatchAsync");
#else
        size_t failed = 0;
        context.check(cudaMemcpyBatchAsync(copies.dst.data() + first, const_cast<void**>(copies.src.data()) + first,
                                           copies.bytes.data() + first, count, &attributes, &attributes_from, 1,
                                           &failed, stream),
                      "cudaMemcpyBatchAsync");
#endif
    }
#else
    copy_one_by_one(copies, begin, end, stream, context);
#endif
}

Copies copies_of(const Plan& plan, const Context& context) {
    Copies copies;
    each_run(plan, [&](const char* src, char* dst, int64_t bytes) {
        const char* host = plan.src.device < 0 ? src : dst;
        for (const char* seam : context.host_seams) {
            const int64_t before = seam - host;
            if (before <= 0 || before >= bytes) continue;
            copies.add(src, dst, before);
            src += before, dst += before, host += before, bytes -= before;
        }
        copies.add(src, dst, bytes);
    });
    return copies;
}

// A captured batch call would be lost without a word on drivers before CUDA 13.1.
bool in_batches(const Context& context) { return !context.capturing && driver_has_batches(context); }

}  // namespace

void run_copy(const Plan& plan, const Context& context) {
    Copies copies = copies_of(plan, context);
    if (!in_batches(context)) {
        copy_one_by_one(copies, 0, copies.size(), context.stream, context);
        return;
    }
    // The batch call refuses the legacy default stream, so that it always runs on streams of our own.
    const bool spread = copies.size() >= 2 * kInternalStreams &&
                        copies.total / copies.size() >= static_cast<size_t>(tuning::spread_run_bytes);
    const int streams = spread ? kInternalStreams : 1;
    Fork fork(context, streams);
    for (int i = 0; i < streams; ++i) {
        copy_batches(copies, copies.size() * i / streams, copies.size() * (i + 1) / streams, fork.stream(i), context);
    }
    fork.join();
}

void run_copy_in_order(const Plan& plan, const Context& context) {
    Copies copies = copies_of(plan, context);
    (in_batches(context) ? copy_batches : copy_one_by_one)(copies, 0, copies.size(), context.stream, context);
}

}  // namespace kvops::cuda

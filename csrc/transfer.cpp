#include "transfer.h"

#include <algorithm>
#include <cstring>

#include "check_overlap.h"
#include "cpu/copy_rows.h"
#include "engine.h"
#include "indices.h"
#include "move_within_pool.h"
#include "surroundings.h"
#ifdef KVOPS_WITH_CUDA
#include "cuda/hold.h"
#include "cuda/run.h"
#endif

namespace kvops {
namespace {

// Temporary memory from torch's allocators.
class TorchSurroundings : public Surroundings {
   public:
    char* device_bytes(int64_t bytes, int device) override { return keep(bytes_on_cuda(bytes, device)); }
    char* host_bytes(int64_t bytes) override { return keep(bytes_on_cpu(bytes)); }
    char* pinned_bytes(int64_t bytes) override { return keep(bytes_on_cpu(bytes, /*pinned=*/true)); }

    const char* upload(const void* bytes, int64_t size, int device) override {
        const Tensor pinned = bytes_on_cpu(size, /*pinned=*/true);
        std::memcpy(pinned.mutable_data_ptr(), bytes, static_cast<size_t>(size));
        const Tensor uploaded = bytes_on_cuda(size, device);
        copy_async(uploaded, pinned);
        return keep(uploaded);
    }

    void* stream(int device) override { return current_cuda_stream(device); }
    const ParallelFor& parallel_for() const override { return parallel_for_; }
    void warn(const char* message) override { kvops::warn(message); }

   private:
    char* keep(const Tensor& tensor) {
        kept_.push_back(tensor);
        return static_cast<char*>(tensor.mutable_data_ptr());
    }

    std::vector<Tensor> kept_;
    ParallelFor parallel_for_ = kvops::parallel_for;
};

void move_within_pool_on_cpu(const Plan& plan, Surroundings& surroundings) {
    const auto allocate = [&](int64_t bytes) { return surroundings.host_bytes(bytes); };
    each_move(plan, -1, allocate, [&](const Halves& halves) {
        copy_rows(halves.into, surroundings.parallel_for());
        copy_rows(halves.out_of, surroundings.parallel_for());
    });
}

void run_on_cpu(Plan& plan, bool within_pool, Surroundings& surroundings) {
    if (within_pool) {
        move_within_pool_on_cpu(plan, surroundings);
    } else {
        copy_rows(plan, surroundings.parallel_for());
    }
}

#ifdef KVOPS_WITH_CUDA

// Host caches may be dropped right after the call. (CUDA tensors too: torch orders their reuse by the stream.)
void hold_host_caches(const Plan& plan, const Request& request, void* stream) {
    const bool src_on_host = plan.src.device < 0;
    if (!src_on_host && plan.dst.device >= 0) return;
    std::vector<const Tensor*> tensors;
    std::vector<const void*> storages;
    for (const CachePair& pair : request.pairs) {
        const CacheArgument& argument = src_on_host ? pair.src : pair.dst;
        for (size_t i = 0; i < argument.size; ++i) {
            const void* storage = storage_of(argument.tensors[i]);
            if (std::find(storages.begin(), storages.end(), storage) != storages.end()) continue;
            storages.push_back(storage);
            tensors.push_back(&argument.tensors[i]);
        }
    }
    cuda::hold_until_done(plan.op, src_on_host ? plan.dst.device : plan.src.device, stream, storages, [&] {
        auto aliases = std::make_shared<std::vector<Tensor>>();
        for (const Tensor* tensor : tensors) aliases->push_back(alias_of(*tensor));
        return aliases;
    });
}

void run(Plan& plan, const Request& request, Surroundings& surroundings) {
    cuda::raise_pending_faults(plan);
    if (plan.count == 0 || plan.blocks.empty()) return;
    if (plan.src.device < 0 && plan.dst.device < 0) {
        cuda::fetch_indices(plan, "a transfer within host memory", surroundings);
        return run_on_cpu(plan, request.within_pool, surroundings);
    }
    const auto engine = static_cast<Engine>(request.engine);
    const auto num_sms = static_cast<int>(std::min<int64_t>(request.num_sms, 1 << 16));
    const cuda::Ran ran =
        (request.within_pool ? cuda::run_within_pool : cuda::run)(plan, engine, num_sms, surroundings);
    // A graph's replays are beyond any call: who captures keeps the memory, as with all of CUDA.
    if (!ran.captured) hold_host_caches(plan, request, ran.stream);
}

#else

void run(Plan& plan, const Request& request, Surroundings& surroundings) {
    for (const Side* side : {&plan.src, &plan.dst}) {
        if (side->device >= 0 || side->indices.device >= 0) {
            fail(plan.op,
                 "a tensor is on a GPU, but this build of kvops has no CUDA kernels (kvops.cuda_available() says why)");
        }
    }
    if (plan.count == 0 || plan.blocks.empty()) return;
    run_on_cpu(plan, request.within_pool, surroundings);
}

#endif

}  // namespace

void transfer(const Request& request) {
    Geometry geometry = Geometry::from(request);
    check_overlap(request, geometry);
    check_index_values(geometry.plan);
    TorchSurroundings surroundings;
    run(geometry.plan, request, surroundings);
}

}  // namespace kvops

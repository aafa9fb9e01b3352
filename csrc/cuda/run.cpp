// The way of a plan to its engine: which device and stream run it, where its indices must lie, which engine moves it.
#include "run.h"

#include <atomic>
#include <string>

#include "../indices.h"
#include "../move_within_pool.h"
#include "copy_engine.h"
#include "faults.h"
#include "pageable.h"
#include "peers.h"
#include "pinned.h"
#include "runtime.h"
#include "sm_kernel.h"
#include "staged.h"

namespace kvops::cuda {
namespace {

int running_device(const Plan& plan) { return plan.dst.device >= 0 ? plan.dst.device : plan.src.device; }

Context context_on(int device, const Plan& plan, int num_sms, Surroundings& surroundings) {
    Context context{plan.op, device,      static_cast<cudaStream_t>(surroundings.stream(device)), false, num_sms,
                    true,    surroundings};
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    context.check(cudaStreamIsCapturing(context.stream, &status), "cudaStreamIsCapturing");
    context.capturing = status != cudaStreamCaptureStatusNone;
    return context;
}

void fetch(const Plan& plan, const char* name, Side& side, const char* reason, Surroundings& surroundings) {
    Indices& indices = side.indices;
    if (indices.data == nullptr || indices.device < 0 || plan.count == 0) return;
    DeviceGuard guard(plan.op, indices.device);
    const Context context = context_on(indices.device, plan, 0, surroundings);
    if (context.capturing) {
        fail(plan.op, std::string(name) + " is on cuda:" + std::to_string(indices.device) +
                          ", expected cpu while the stream is being captured, since " + reason + " needs index values");
    }
    // One row of a two-dimensional copy an index: strided indices come in one call. A stride of 0 repeats one index.
    const size_t width = indices.is_64bit ? 8 : 4;
    char* values = surroundings.host_bytes(plan.count * static_cast<int64_t>(width));
    const size_t rows = indices.stride == 0 ? 1 : static_cast<size_t>(plan.count);
    const size_t pitch = rows == 1 ? width : width * indices.stride;  // the stride of one index means nothing
    context.check(
        cudaMemcpy2DAsync(values, width, indices.data, pitch, width, rows, cudaMemcpyDeviceToHost, context.stream),
        "cudaMemcpy2DAsync");
    context.check(cudaStreamSynchronize(context.stream), "cudaStreamSynchronize");
    indices.data = values;
    indices.device = -1;
    if (indices.stride != 0) indices.stride = 1;
    check_index_values(plan, name, side);
}

void warn_once_about_pageable_memory(Surroundings& surroundings) {
    static std::atomic<bool> warned{false};
    if (warned.exchange(true)) return;
    surroundings.warn(
        "kvops: host memory is pageable: it is moved through pinned buffers, which is slower and waits for the "
        "GPU; allocate it with pin_memory=True");
}

void run_pinned(const Plan& plan, Engine engine, const Context& context) {
    switch (engine == Engine::automatic ? choose_engine(plan, context.capturing) : engine) {
        case Engine::sm: return run_sm(plan, context);
        case Engine::copy: return run_copy(plan, context);
        case Engine::staged: return run_staged(plan, context);
        case Engine::automatic: break;
    }
    fail(plan.op, "no engine was chosen");
}

const char* reader_of_indices(Engine engine) {
    return engine == Engine::copy ? "the copy engine" : "the staged engine";
}

void fetch_from_other_devices(Plan& plan, int device, Surroundings& surroundings) {
    for (auto [name, side] : {std::pair<const char*, Side*>{"src_indices", &plan.src}, {"dst_indices", &plan.dst}}) {
        if (side->indices.device >= 0 && side->indices.device != device) {
            fetch(plan, name, *side, "a kernel of another device", surroundings);
        }
    }
}

}  // namespace

void fetch_indices(Plan& plan, const char* reason, Surroundings& surroundings) {
    fetch(plan, "src_indices", plan.src, reason, surroundings);
    fetch(plan, "dst_indices", plan.dst, reason, surroundings);
}

void raise_pending_faults(const Plan& plan) {
    for (const int device : {plan.src.device, plan.dst.device}) {
        if (device >= 0) raise_pending_fault(plan.op, device);
        if (plan.src.device == plan.dst.device) return;
    }
}

Ran run(const Plan& given, Engine engine, int num_sms, Surroundings& surroundings) {
    Plan plan = given;
    const int device = running_device(plan);
    DeviceGuard guard(plan.op, device);
    Context context = context_on(device, plan, num_sms, surroundings);
    const Ran ran{context.stream, context.capturing};
    if (engine == Engine::copy || engine == Engine::staged)
        fetch_indices(plan, reader_of_indices(engine), surroundings);
    fetch_from_other_devices(plan, device, surroundings);

    if (plan.src.device >= 0 && plan.dst.device >= 0 && plan.src.device != plan.dst.device) {
        if (!reaches(device, plan.src.device, context)) {
            fetch_indices(plan, "a transfer between GPUs without peer access", surroundings);
        }
        run_between_devices(plan, context, [&](const Plan& part, const Context& on) { run_pinned(part, engine, on); });
        return ran;
    }
    HostMemory host = host_memory_of(plan, context);
    context.host_seams = std::move(host.seams);
    if (!host.pinned) {
        fetch_indices(plan, "pageable host memory", surroundings);
        run_pageable(plan, context, [&](const Plan& pinned) { run_pinned(pinned, engine, context); });
        warn_once_about_pageable_memory(surroundings);
    } else {
        run_pinned(plan, engine, context);
    }
    return ran;
}

Ran run_within_pool(const Plan& given, Engine engine, int num_sms, Surroundings& surroundings) {
    Plan plan = given;
    const int device = running_device(plan);
    DeviceGuard guard(plan.op, device);
    Context context = context_on(device, plan, num_sms, surroundings);
    if (engine == Engine::copy) fetch_indices(plan, reader_of_indices(engine), surroundings);
    fetch_from_other_devices(plan, device, surroundings);

    const SkipUnits bad_source{plan.src.indices, plan.src.limit};
    const auto allocate = [&](int64_t bytes) { return surroundings.device_bytes(bytes, device); };
    each_move(plan, device, allocate, [&](const Halves& halves) {
        if (engine == Engine::copy) {
            run_copy(halves.into, context);
            run_copy(halves.out_of, context);
        } else {
            run_sm(halves.into, context);
            run_sm(halves.out_of, context, &bad_source);
            context.reports_faults = false;  // all groups have the same indices
        }
    });
    return {context.stream, context.capturing};
}

}  // namespace kvops::cuda

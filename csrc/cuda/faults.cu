#include "faults.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>

#include "../indices.h"
#include "runtime.h"

namespace kvops::cuda {
namespace {

constexpr int kMaxDevices = 64;

struct DeviceFaults {
    FaultWord word{};
    uint32_t* taken = nullptr;  // mapped host memory
    cudaStream_t stream = nullptr;
};

std::mutex mutex;
std::atomic<DeviceFaults*> faults_of[kMaxDevices];

DeviceFaults& device_faults(const char* op, int device) {
    if (device >= kMaxDevices) fail(op, "device cuda:" + std::to_string(device) + " is beyond the supported 64");
    if (DeviceFaults* known = faults_of[device].load(std::memory_order_acquire)) return *known;
    std::lock_guard<std::mutex> lock(mutex);
    if (DeviceFaults* known = faults_of[device].load(std::memory_order_acquire)) return *known;
    OutsideCapture outside;
    DeviceGuard guard(op, device);
    DeviceFaults made;
    void* host = nullptr;
    check(op, cudaHostAlloc(&host, sizeof(FaultRecord) + sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc");
    std::memset(host, 0, sizeof(FaultRecord) + sizeof(uint32_t));
    made.word.record = static_cast<FaultRecord*>(host);
    made.taken = reinterpret_cast<uint32_t*>(made.word.record + 1);
    check(op, cudaStreamCreateWithFlags(&made.stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check(op, cudaMalloc(&made.word.count, sizeof(uint32_t)), "cudaMalloc");
    check(op, cudaMemsetAsync(made.word.count, 0, sizeof(uint32_t), made.stream), "cudaMemsetAsync");
    check(op, cudaStreamSynchronize(made.stream), "cudaStreamSynchronize");
    faults_of[device].store(new DeviceFaults(made), std::memory_order_release);
    return *faults_of[device].load(std::memory_order_acquire);
}

// One step, so that no fault falls between the count that is told and the count that starts anew.
__global__ void take_count(uint32_t* count, uint32_t* taken) { *taken = atomicExch(count, 0u); }

}  // namespace

FaultWord fault_word(const char* op, int device) { return device_faults(op, device).word; }

void raise_pending_fault(const char* op, int device) {
    DeviceFaults& faults = device_faults(op, device);
    volatile uint32_t* complete = &faults.word.record->complete;
    if (*complete == 0) return;
    std::lock_guard<std::mutex> lock(mutex);
    if (*complete == 0) return;  // another thread raises it
    std::atomic_thread_fence(std::memory_order_acquire);
    const FaultRecord record = *faults.word.record;
    uint32_t count = 1;
    {
        OutsideCapture outside;
        DeviceGuard guard(op, device);
        *complete = 0;
        take_count<<<1, 1, 0, faults.stream>>>(faults.word.count, faults.taken);
        check(op, cudaGetLastError(), "the launch of a kernel");
        check(op, cudaStreamSynchronize(faults.stream), "cudaStreamSynchronize");
        count = *static_cast<volatile uint32_t*>(faults.taken);
    }
    std::string limit_of = record.limit_argument;
    if (record.limit_element >= 0) limit_of += "[" + std::to_string(record.limit_element) + "]";
    std::string text = index_error(record.indices, record.position, record.value, record.limit, limit_of, record.pages);
    if (count > 1) text += ", and " + std::to_string(count - 1) + " more like it";
    fail(record.op, text + " (found on the device in an earlier call; its other rows were moved)");
}

}  // namespace kvops::cuda

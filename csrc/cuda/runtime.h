// The CUDA runtime with every return code looked at, and the state of a stream.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "../error.h"
#include "../surroundings.h"

namespace kvops::cuda {

// Fails with the name of the CUDA call and CUDA's own words.
inline void check(const char* op, cudaError_t error, const char* call) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // an error that is not sticky must not surface in somebody else's call
    fail(op, std::string(call) + " failed: " + cudaGetErrorString(error));
}

// Makes a device current for a scope.
class DeviceGuard {
   public:
    DeviceGuard(const char* op, int device) {
        check(op, cudaGetDevice(&before_), "cudaGetDevice");
        if (device != before_) check(op, cudaSetDevice(device), "cudaSetDevice");
        changed_ = device != before_;
    }
    ~DeviceGuard() {
        if (changed_) cudaSetDevice(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

   private:
    int before_ = 0;
    bool changed_ = false;
};

// Lets this thread make calls that CUDA forbids beside a capture (allocations, waits), because they concern no captured stream.
class OutsideCapture {
   public:
    OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    OutsideCapture(const OutsideCapture&) = delete;
    OutsideCapture& operator=(const OutsideCapture&) = delete;

   private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class Event {
   public:
    explicit Event(const char* op) : op_(op) {
        check(op, cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    void record(cudaStream_t stream) { check(op_, cudaEventRecord(event_, stream), "cudaEventRecord"); }
    void wait(cudaStream_t stream) { check(op_, cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent"); }
    void synchronize() { check(op_, cudaEventSynchronize(event_), "cudaEventSynchronize"); }

   private:
    const char* op_;
    cudaEvent_t event_ = nullptr;
};

// The device that runs a call, its current stream, and what the call may use.
struct Context {
    const char* op;
    int device;
    cudaStream_t stream;
    bool capturing;
    int num_sms;          // 0: the engine's own choice
    bool reports_faults;  // of indices that a kernel checks; else bad units are skipped without a word
    Surroundings& surroundings;
    std::vector<const char*> host_seams = {};  // of pinned.h

    void check(cudaError_t error, const char* call) const { cuda::check(op, error, call); }
};

}  // namespace kvops::cuda

// What is held is let go by a thread that looks every few milliseconds, so that a pool dropped after its last transfer goes
// back without another call.
#include "hold.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#include "runtime.h"

namespace kvops::cuda {
namespace {

constexpr auto kInterval = std::chrono::milliseconds(10);

struct Held {
    int device;
    void* stream;
    std::vector<const void*> storages;
    cudaEvent_t done;
    std::shared_ptr<void> memory;
};

// Lives as long as the process: the thread may outlast every destructor.
struct State {
    std::mutex mutex;
    std::condition_variable not_empty;
    std::vector<Held> held;
    std::atomic<bool> exiting{false};
    std::timed_mutex letting_go;
};

void watch(State& state) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);  // a query must not disturb a capture of another thread
    for (;;) {
        std::vector<Held> finished;
        {
            std::unique_lock<std::mutex> lock(state.mutex);
            state.not_empty.wait(lock, [&] { return !state.held.empty(); });
            const auto unfinished = std::stable_partition(state.held.begin(), state.held.end(), [](const Held& held) {
                return cudaEventQuery(held.done) == cudaErrorNotReady;
            });
            std::move(unfinished, state.held.end(), std::back_inserter(finished));
            state.held.erase(unfinished, state.held.end());
        }
        {
            std::lock_guard<std::timed_mutex> lock(state.letting_go);
            if (state.exiting) {
                new std::vector<Held>(std::move(finished));  // left to the end of the process
                return;
            }
            for (Held& held : finished) {
                cudaEventDestroy(held.done);
                held.memory.reset();
            }
        }
        std::this_thread::sleep_for(kInterval);
    }
}

std::atomic<State*> state{nullptr};

State& started_state() {
    static State* started = [] {
        auto* made = new State;
        state = made;
        std::atexit(stop_letting_go);
        std::thread(watch, std::ref(*made)).detach();
        return made;
    }();
    return *started;
}

}  // namespace

void stop_letting_go() {
    State* running = state;
    if (running == nullptr) return;
    running->exiting = true;
    // What is being let go at this moment still finds torch and Python alive.
    if (running->letting_go.try_lock_for(std::chrono::seconds(1))) running->letting_go.unlock();
}

void hold_until_done(const char* op, int device, void* stream, const std::vector<const void*>& storages,
                     const std::function<std::shared_ptr<void>()>& memory) {
    State& state = started_state();
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    std::lock_guard<std::mutex> lock(state.mutex);
    const auto known = std::find_if(state.held.rbegin(), state.held.rend(), [&](const Held& held) {
        return held.device == device && held.stream == stream && held.storages == storages;
    });
    if (known != state.held.rend()) {
        check(op, cudaEventRecord(known->done, cuda_stream), "cudaEventRecord");
        return;
    }
    cudaEvent_t done = nullptr;
    check(op, cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    const cudaError_t recorded = cudaEventRecord(done, cuda_stream);
    if (recorded != cudaSuccess) cudaEventDestroy(done);
    check(op, recorded, "cudaEventRecord");
    state.held.push_back({device, stream, storages, done, memory()});
    state.not_empty.notify_one();
}

}  // namespace kvops::cuda

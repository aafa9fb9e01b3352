// Streams of kvops' own: a few for each device, made once, for the life of the process. They never block, and are not
// blocked by, the legacy default stream; events order them with the caller's stream.
#pragma once

#include <memory>
#include <vector>

#include "runtime.h"

namespace kvops::cuda {

constexpr int kInternalStreams = 4;

// Some internal streams that run between what the caller's stream has been given so far and what it will be given next.
// Joined by its end, also where an error ends it: the caller's memory is never touched by work that its stream does not know.
class Fork {
   public:
    Fork(const Context& context, int streams);
    ~Fork();
    Fork(const Fork&) = delete;
    Fork& operator=(const Fork&) = delete;

    cudaStream_t stream(int number) const { return streams_[number]; }
    void join();

   private:
    const Context& context_;
    std::vector<cudaStream_t> streams_;
    std::vector<std::unique_ptr<Event>> done_;  // made first: joining after an error must not need anything new
    bool joined_ = false;
};

}  // namespace kvops::cuda

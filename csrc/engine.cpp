#include "engine.h"

#include <string>

#include "error.h"
#include "runs.h"
#include "through_buffer.h"
#include "tuning.h"

namespace kvops {
namespace {

constexpr const char* kNames[] = {"0 (auto)", "1 (sm)", "2 (copy)", "3 (staged)"};

int64_t average_run(const Plan& plan) {
    const int64_t runs = count_runs(plan);
    return runs == 0 ? 0 : plan.bytes() / runs;
}

}  // namespace

void check_options(const char* op, int64_t engine, int64_t num_sms) {
    if (engine < 0 || engine > 3) {
        fail(op, "engine is " + std::to_string(engine) + ", expected 0 (auto), 1 (sm), 2 (copy) or 3 (staged)");
    }
    if (num_sms < 0) fail(op, "num_sms is " + std::to_string(num_sms) + ", expected 0 (automatic) or more");
}

void check_engine_serves(const char* op, int64_t engine, bool src_on_host, bool dst_on_host) {
    if (src_on_host && dst_on_host && engine != 0) {
        fail(op, std::string("engine is ") + kNames[engine] +
                     ", expected 0 (auto): source and destination are both in host memory");
    }
    if (!src_on_host && !dst_on_host && static_cast<Engine>(engine) == Engine::staged) {
        fail(op, "engine is 3 (staged), expected 0 (auto), 1 (sm) or 2 (copy): neither source nor destination is in "
                 "host memory");
    }
}

Engine choose_engine(const Plan& plan, bool capturing) {
    // The others need index values on the host, and nodes by the thousand in a graph.
    if (capturing || plan.src.indices.device >= 0 || plan.dst.indices.device >= 0) return Engine::sm;
    const bool src_on_host = plan.src.device < 0;
    if (!src_on_host && plan.dst.device >= 0) return Engine::sm;
    if (plan.bytes() < tuning::copy_total_bytes) return Engine::sm;
    if (average_run(plan) >= tuning::copy_run_bytes) return Engine::copy;
    if (plan.bytes() < tuning::staged_total_bytes) return Engine::sm;
    const HostSide host = host_side_of(plan);
    const Halves halves = through_buffer(plan, 0, plan.count, host.shape, host.page_size, nullptr, 0);
    return average_run(host.is_source ? halves.into : halves.out_of) >= tuning::staged_run_bytes ? Engine::staged
                                                                                                 : Engine::sm;
}

}  // namespace kvops

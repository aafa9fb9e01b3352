// The engines, and the choice of "auto", which is made here alone.
#pragma once

#include <cstdint>

#include "plan.h"

namespace kvops {

// The numbers are part of the operators' schemas.
enum class Engine : int64_t { automatic = 0, sm = 1, copy = 2, staged = 3 };

// `engine` and `num_sms` as passed by the caller.
void check_options(const char* op, int64_t engine, int64_t num_sms);

// Whether the engine asked for can serve a transfer between these places at all.
void check_engine_serves(const char* op, int64_t engine, bool src_on_host, bool dst_on_host);

// The engine that moves the plan when the caller leaves the choice to kvops. At least one side is a GPU's.
Engine choose_engine(const Plan& plan, bool capturing);

}  // namespace kvops

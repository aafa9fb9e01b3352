// The way of every call: tensors -> geometry -> plan -> engine.
#pragma once

#include "geometry.h"

namespace kvops {

void transfer(const Request& request);

}  // namespace kvops

// Which bytes a plan may touch on a side, whatever the indices: all units below the limit, of every block.
#pragma once

#include "overlap.h"
#include "plan.h"

namespace kvops {

ByteSet src_bytes(const Plan& plan, const Block& block);
ByteSet dst_bytes(const Plan& plan, const Block& block);

}  // namespace kvops

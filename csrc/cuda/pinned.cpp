#include "pinned.h"

#include <cuda.h>

#include <algorithm>

#include "../byte_sets.h"

namespace kvops::cuda {
namespace {

// A function of the driver, from the runtime: linking against the driver would tie the library to machines that have one.
using PointerAttributes = decltype(&cuPointerGetAttributes);

PointerAttributes pointer_attributes(const Context& context) {
    static const PointerAttributes found = [&] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
        context.check(
            cudaGetDriverEntryPointByVersion("cuPointerGetAttributes", &function, 7000, cudaEnableDefault, &result),
            "cudaGetDriverEntryPointByVersion");
#else
        context.check(cudaGetDriverEntryPoint("cuPointerGetAttributes", &function, cudaEnableDefault, &result),
                      "cudaGetDriverEntryPoint");
#endif
        if (function == nullptr) fail(context.op, "the driver has no cuPointerGetAttributes");
        return reinterpret_cast<PointerAttributes>(function);
    }();
    return found;
}

// The end of the allocation or registration that holds an address, or null where none does.
const char* end_of_pinned(const char* address, const Context& context) {
    unsigned int type = 0;
    CUdeviceptr on_device = 0, start = 0;
    size_t bytes = 0;
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                                        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
    void* values[] = {&type, &on_device, &start, &bytes};
    const auto asked = reinterpret_cast<CUdeviceptr>(address);
    const CUresult result = pointer_attributes(context)(4, attributes, values, asked);
    if (result != CUDA_SUCCESS) {
        fail(context.op, "cuPointerGetAttributes failed with error " + std::to_string(static_cast<int>(result)));
    }
    const bool pinned = type != 0 && on_device == asked && start <= asked && asked < start + bytes;
    return pinned ? reinterpret_cast<const char*>(start + bytes) : nullptr;
}

}  // namespace

HostMemory host_memory_of(const Plan& plan, const Context& context) {
    HostMemory memory;
    const bool src_on_host = plan.src.device < 0;
    if (!src_on_host && plan.dst.device >= 0) return memory;
    for (const Block& block : plan.blocks) {
        // One tensor lies between its ends; several may lie anywhere.
        Block part = block;
        part.layers = block.several_tensors ? 1 : block.layers;
        for (int64_t layer = 0; layer < block.layers; layer += part.layers) {
            const ByteSet bytes = src_on_host ? src_bytes(plan, part) : dst_bytes(plan, part);
            const char* end = end_of_pinned(bytes.first(), context);
            while (end != nullptr && end <= bytes.last()) {
                memory.seams.push_back(end);
                end = end_of_pinned(end, context);
            }
            if (end == nullptr) return {false, {}};
            part.src += block.src_strides.layer;
            part.dst += block.dst_strides.layer;
        }
    }
    std::sort(memory.seams.begin(), memory.seams.end());
    return memory;
}

}  // namespace kvops::cuda

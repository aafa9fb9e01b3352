// Everything that kvops asks of PyTorch, and every workaround that its stable ABI needs. No other file names the C shims.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <functional>
#include <string>

#include "error.h"

// The shim of the current CUDA stream lives in libtorch_cuda alone. Weak, so that a CPU-only PyTorch loads the library too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace kvops {

using torch::stable::Tensor;

// The metadata of a tensor, read once. Sizes and strides stay the tensor's own.
struct TensorFacts {
    const int64_t* sizes;
    const int64_t* strides;
    int64_t dim;
    int32_t layout;
    int32_t dtype;
    int32_t device_type;
    int32_t device_index;
    int64_t element_size;

    bool on_cuda() const { return device_type == aoti_torch_device_type_cuda(); }
    bool on_cpu() const { return device_type == aoti_torch_device_type_cpu(); }
    int device() const { return on_cuda() ? device_index : -1; }  // as in plan.h
};

inline void require(AOTITorchError error, const char* what) {
    if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(std::string("kvops: PyTorch failed to ") + what);
}

// Strided tensors only have all of these; the others are recognized by `layout` before anything else is looked at.
inline TensorFacts facts_of(const Tensor& tensor) {
    TensorFacts facts{};
    AtenTensorHandle handle = tensor.get();
    require(aoti_torch_get_layout(handle, &facts.layout), "tell a tensor's layout");
    require(aoti_torch_get_device_type(handle, &facts.device_type), "tell a tensor's device");
    require(aoti_torch_get_device_index(handle, &facts.device_index), "tell a tensor's device");
    require(aoti_torch_get_dtype(handle, &facts.dtype), "tell a tensor's dtype");
    require(aoti_torch_get_dim(handle, &facts.dim), "tell a tensor's dimensions");
    if (facts.layout != aoti_torch_layout_strided()) return facts;
    int64_t* sizes = nullptr;
    int64_t* strides = nullptr;
    require(aoti_torch_get_sizes(handle, &sizes), "tell a tensor's sizes");
    require(aoti_torch_get_strides(handle, &strides), "tell a tensor's strides");
    facts.sizes = sizes;
    facts.strides = strides;
    facts.element_size = static_cast<int64_t>(aoti_torch_dtype_element_size(facts.dtype));
    return facts;
}

// torch's names, for messages.
inline std::string layout_name(int32_t layout) {
    static constexpr const char* names[] = {"strided",    "sparse_coo", "sparse_csr", "_mkldnn",
                                            "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"};
    return layout >= 0 && layout < 8 ? names[layout] : "layout " + std::to_string(layout);
}

inline std::string dtype_name(int32_t dtype) {
    static constexpr const char* names[] = {"uint8",
                                            "int8",
                                            "int16",
                                            "int32",
                                            "int64",
                                            "float16",
                                            "float32",
                                            "float64",
                                            "complex32",
                                            "complex64",
                                            "complex128",
                                            "bool",
                                            "qint8",
                                            "quint8",
                                            "qint32",
                                            "bfloat16",
                                            "quint4x2",
                                            "quint2x4",
                                            "bits1x8",
                                            "bits2x4",
                                            "bits4x2",
                                            "bits8",
                                            "bits16",
                                            "float8_e5m2",
                                            "float8_e4m3fn",
                                            "float8_e5m2fnuz",
                                            "float8_e4m3fnuz",
                                            "uint16",
                                            "uint32",
                                            "uint64",
                                            "uint1",
                                            "uint2",
                                            "uint3",
                                            "uint4",
                                            "uint5",
                                            "uint6",
                                            "uint7",
                                            "int1",
                                            "int2",
                                            "int3",
                                            "int4",
                                            "int5",
                                            "int6",
                                            "int7",
                                            "float8_e8m0fnu",
                                            "float4_e2m1fn_x2"};
    return dtype >= 0 && dtype < 46 ? names[dtype] : "number " + std::to_string(dtype);
}

inline std::string device_name(int32_t type, int32_t index) {
    if (type == aoti_torch_device_type_cpu()) return "cpu";
    std::string name = type == aoti_torch_device_type_cuda()          ? "cuda"
                       : type == aoti_torch_device_type_meta()        ? "meta"
                       : type == aoti_torch_device_type_xpu()         ? "xpu"
                       : type == aoti_torch_device_type_privateuse1() ? "privateuseone"
                                                                      : "device type " + std::to_string(type);
    return index < 0 ? name : name + ":" + std::to_string(index);
}

inline void parallel_for(int64_t begin, int64_t end, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
    torch::stable::parallel_for(begin, end, grain, work);
}

struct StorageExtent {
    int64_t offset;  // of the tensor, in elements
    int64_t bytes;
};

inline StorageExtent storage_extent(const Tensor& tensor) {
    StorageExtent extent{};
    require(aoti_torch_get_storage_offset(tensor.get(), &extent.offset), "tell a tensor's storage offset");
    require(aoti_torch_get_storage_size(tensor.get(), &extent.bytes), "tell a storage's size");
    return extent;
}

// qint8, quint8, qint32, quint4x2, quint2x4: their bytes mean nothing without a scale, and some pack several elements.
inline bool is_quantized(int32_t dtype) { return (dtype >= 12 && dtype <= 14) || dtype == 16 || dtype == 17; }

// The address of a tensor's storage.
inline const void* storage_of(const Tensor& tensor) {
    const int64_t offset = storage_extent(tensor).offset * static_cast<int64_t>(tensor.element_size());
    return static_cast<const char*>(tensor.const_data_ptr()) - offset;
}

// Another tensor over the same bytes, without a Python object: it may be let go by a thread that knows nothing of Python.
inline Tensor alias_of(const Tensor& tensor) {
    StableIValue stack[] = {torch::stable::detail::from(tensor)};
    require(torch_call_dispatcher("aten::alias", "", stack, TORCH_ABI_VERSION), "alias a tensor");
    return torch::stable::detail::to<Tensor>(stack[0]);
}

// A Python warning where the caller is Python.
inline void warn(const char* message) { aoti_torch_warn("kvops", "kvops", 0, message); }

// Uninitialized bytes from torch's allocators. CUDA memory is ordered by the current stream of its device: it may be
// dropped as soon as the work that uses it has been issued there. Pinned memory is not: it must be kept until the work is done.
inline Tensor bytes_on_cpu(int64_t bytes, bool pinned = false) {
    return torch::stable::empty({bytes}, torch::headeronly::ScalarType::Byte, std::nullopt,
                                torch::stable::Device(torch::headeronly::DeviceType::CPU), pinned);
}

inline Tensor bytes_on_cuda(int64_t bytes, int device) {
    return torch::stable::empty({bytes}, torch::headeronly::ScalarType::Byte, std::nullopt,
                                torch::stable::Device(torch::headeronly::DeviceType::CUDA, device));
}

// Asynchronous on the current stream where `src` is pinned. torch keeps pinned memory back until its copies are done, so
// that both tensors may be dropped right after.
inline void copy_async(Tensor dst, const Tensor& src) { torch::stable::copy_(dst, src, /*non_blocking=*/true); }

inline void* current_cuda_stream(int device) {
    if (aoti_torch_get_current_cuda_stream == nullptr) {
        throw std::runtime_error("kvops: this PyTorch has no CUDA support, expected one that does for CUDA tensors");
    }
    void* stream = nullptr;
    require(aoti_torch_get_current_cuda_stream(device, &stream), "tell the current CUDA stream");
    return stream;
}

}  // namespace kvops

// Every operator's schema, once, and its boxed kernel. One function serves all dispatch keys: CPU and CUDA, and for calls
// without any tensor, or with tensors that kvops refuses, CompositeExplicitAutograd.
#include <cstring>
#include <optional>
#include <vector>

#include "stable.h"
#include "transfer.h"
#include "tuning.h"
#ifdef KVOPS_WITH_CUDA
#include "cuda/hold.h"
#endif

namespace kvops {
namespace {

using List = std::vector<Tensor>;
using OptionalTensor = std::optional<Tensor>;

const Tensor* pointer(const OptionalTensor& tensor) { return tensor.has_value() ? &*tensor : nullptr; }

CacheArgument one(const char* name, const Tensor& tensor) { return {name, &tensor, 1, false}; }
CacheArgument list(const char* name, const List& tensors) { return {name, tensors.data(), tensors.size(), true}; }

void transfer_kv_per_layer(const Tensor& src_k, const Tensor& dst_k, const Tensor& src_v, const Tensor& dst_v,
                           const OptionalTensor& src_indices, const OptionalTensor& dst_indices, bool page_indices,
                           int64_t engine, int64_t num_sms) {
    transfer({.op = "transfer_kv_per_layer",
              .latent = false,
              .within_pool = false,
              .pairs = {{one("src_k", src_k), one("dst_k", dst_k)}, {one("src_v", src_v), one("dst_v", dst_v)}},
              .src_indices = pointer(src_indices),
              .dst_indices = pointer(dst_indices),
              .page_indices = page_indices,
              .engine = engine,
              .num_sms = num_sms});
}

void transfer_kv_per_layer_mla(const Tensor& src, const Tensor& dst, const OptionalTensor& src_indices,
                               const OptionalTensor& dst_indices, bool page_indices, int64_t engine, int64_t num_sms) {
    transfer({.op = "transfer_kv_per_layer_mla",
              .latent = true,
              .within_pool = false,
              .pairs = {{one("src", src), one("dst", dst)}},
              .src_indices = pointer(src_indices),
              .dst_indices = pointer(dst_indices),
              .page_indices = page_indices,
              .engine = engine,
              .num_sms = num_sms});
}

void transfer_kv_all_layer(const List& src_k, const List& dst_k, const List& src_v, const List& dst_v,
                           const OptionalTensor& src_indices, const OptionalTensor& dst_indices, bool page_indices,
                           int64_t engine, int64_t num_sms) {
    transfer({.op = "transfer_kv_all_layer",
              .latent = false,
              .within_pool = false,
              .pairs = {{list("src_k", src_k), list("dst_k", dst_k)}, {list("src_v", src_v), list("dst_v", dst_v)}},
              .src_indices = pointer(src_indices),
              .dst_indices = pointer(dst_indices),
              .page_indices = page_indices,
              .engine = engine,
              .num_sms = num_sms});
}

void transfer_kv_all_layer_mla(const List& src, const List& dst, const OptionalTensor& src_indices,
                               const OptionalTensor& dst_indices, bool page_indices, int64_t engine, int64_t num_sms) {
    transfer({.op = "transfer_kv_all_layer_mla",
              .latent = true,
              .within_pool = false,
              .pairs = {{list("src", src), list("dst", dst)}},
              .src_indices = pointer(src_indices),
              .dst_indices = pointer(dst_indices),
              .page_indices = page_indices,
              .engine = engine,
              .num_sms = num_sms});
}

void move_kv(const List& k, const List& v, const Tensor& src_indices, const Tensor& dst_indices, bool page_indices,
             int64_t engine, int64_t num_sms) {
    transfer({.op = "move_kv",
              .latent = false,
              .within_pool = true,
              .pairs = {{list("k", k), list("k", k)}, {list("v", v), list("v", v)}},
              .src_indices = &src_indices,
              .dst_indices = &dst_indices,
              .page_indices = page_indices,
              .engine = engine,
              .num_sms = num_sms});
}

void move_kv_mla(const List& caches, const Tensor& src_indices, const Tensor& dst_indices, bool page_indices,
                 int64_t engine, int64_t num_sms) {
    transfer({.op = "move_kv_mla",
              .latent = true,
              .within_pool = true,
              .pairs = {{list("caches", caches), list("caches", caches)}},
              .src_indices = &src_indices,
              .dst_indices = &dst_indices,
              .page_indices = page_indices,
              .engine = engine,
              .num_sms = num_sms});
}

void register_kernels(torch::stable::detail::StableLibrary& m) {
    m.impl("transfer_kv_per_layer", TORCH_BOX(&transfer_kv_per_layer));
    m.impl("transfer_kv_per_layer_mla", TORCH_BOX(&transfer_kv_per_layer_mla));
    m.impl("transfer_kv_all_layer", TORCH_BOX(&transfer_kv_all_layer));
    m.impl("transfer_kv_all_layer_mla", TORCH_BOX(&transfer_kv_all_layer_mla));
    m.impl("move_kv", TORCH_BOX(&move_kv));
    m.impl("move_kv_mla", TORCH_BOX(&move_kv_mla));
}

}  // namespace
}  // namespace kvops

// Python calls it at its exit, when everything is still alive; see cuda/hold.h.
extern "C" __attribute__((visibility("default"))) void kvops_at_exit() {
#ifdef KVOPS_WITH_CUDA
    kvops::cuda::stop_letting_go();
#endif
}

// For benchmarks/tune.py: gives a number of tuning.h another value, and returns the one it had; -1: no such number.
extern "C" __attribute__((visibility("default"))) int64_t kvops_tune(const char* name, int64_t value) {
    for (kvops::Tuned* tuned : kvops::all_tuned) {
        if (std::strcmp(tuned->name, name) == 0) return tuned->value.exchange(value);
    }
    return -1;
}

#define KVOPS_OPTIONS "*, bool page_indices=False, int engine=0, int num_sms=0) -> ()"

STABLE_TORCH_LIBRARY(kvops, m) {
    m.def("transfer_kv_per_layer(Tensor src_k, Tensor(a!) dst_k, Tensor src_v, Tensor(b!) dst_v, "
          "Tensor? src_indices, Tensor? dst_indices, " KVOPS_OPTIONS);
    m.def("transfer_kv_per_layer_mla(Tensor src, Tensor(a!) dst, "
          "Tensor? src_indices, Tensor? dst_indices, " KVOPS_OPTIONS);
    m.def("transfer_kv_all_layer(Tensor[] src_k, Tensor(a!)[] dst_k, Tensor[] src_v, Tensor(b!)[] dst_v, "
          "Tensor? src_indices, Tensor? dst_indices, " KVOPS_OPTIONS);
    m.def("transfer_kv_all_layer_mla(Tensor[] src, Tensor(a!)[] dst, "
          "Tensor? src_indices, Tensor? dst_indices, " KVOPS_OPTIONS);
    m.def("move_kv(Tensor(a!)[] k, Tensor(b!)[] v, Tensor src_indices, Tensor dst_indices, " KVOPS_OPTIONS);
    m.def("move_kv_mla(Tensor(a!)[] caches, Tensor src_indices, Tensor dst_indices, " KVOPS_OPTIONS);
}

STABLE_TORCH_LIBRARY_IMPL(kvops, CPU, m) { kvops::register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(kvops, CUDA, m) { kvops::register_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(kvops, CompositeExplicitAutograd, m) { kvops::register_kernels(m); }

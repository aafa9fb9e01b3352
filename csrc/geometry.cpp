// The checks run in a fixed order and say the same words as their twins in meta/checks.py, which run at trace time.
#include "geometry.h"

#include <algorithm>
#include <string>

#include "coalesce.h"
#include "engine.h"

namespace kvops {
namespace {

// A cache tensor as layers x pages x page_size x heads x head_dim, whatever its number of dimensions. Strides in bytes.
struct Cache {
    TensorFacts facts{};
    char* data = nullptr;
    int64_t layers = 1, pages = 0, page_size = 1, heads = 1, head_dim = 0;
    SideStrides strides{};
};

// An argument's caches, with their names for messages.
struct Caches {
    const CacheArgument* argument;
    std::vector<Cache> all;

    std::string name(size_t i) const {
        return argument->is_list ? std::string(argument->name) + "[" + std::to_string(i) + "]" : argument->name;
    }
    int64_t layers() const {
        int64_t sum = 0;
        for (const Cache& cache : all) sum += cache.layers;
        return sum;
    }
};

std::string str(int64_t value) { return std::to_string(value); }

std::string place(const TensorFacts& facts) { return device_name(facts.device_type, facts.device_index); }

// Python's None arrives as a tensor without a handle.
template <class Name>
void check_given(const char* op, const Tensor& tensor, const Name& name) {
    if (tensor.get() == nullptr || !tensor.defined()) fail(op, name() + " is None, expected a tensor");
}

template <class Name>
void check_place(const char* op, const Name& name, const TensorFacts& facts) {
    if (facts.layout != aoti_torch_layout_strided()) {
        fail(op, name() + " has layout " + layout_name(facts.layout) + ", expected strided");
    }
    if (!facts.on_cpu() && !facts.on_cuda()) fail(op, name() + " is on " + place(facts) + ", expected cpu or cuda");
}

// A storage that was freed or shrunk under its tensor: its address is none, or leads beyond it.
void check_storage(const char* op, const std::string& name, const Tensor& tensor, const TensorFacts& facts) {
    int64_t last = 0;
    for (int64_t dim = 0; dim < facts.dim; ++dim) {
        if (facts.sizes[dim] == 0) return;
        last += (facts.sizes[dim] - 1) * facts.strides[dim];
    }
    const StorageExtent storage = storage_extent(tensor);
    if ((storage.offset + last + 1) * facts.element_size > storage.bytes) {
        fail(op,
             name + " reaches beyond its storage of " + str(storage.bytes) + " bytes, expected one that holds it all");
    }
}

// Destinations first: a copy-on-write storage gets its own bytes when it is asked for a mutable address, and a source that
// is a view of it has its address only then.
void read_addresses(const Request& request, const std::vector<Caches*>& dst, const std::vector<Caches*>& src) {
    const auto read = [&](Caches& caches, bool is_mutable) {
        for (size_t i = 0; i < caches.all.size(); ++i) {
            const Tensor& tensor = caches.argument->tensors[i];
            check_storage(request.op, caches.name(i), tensor, caches.all[i].facts);
            const void* data = is_mutable ? tensor.mutable_data_ptr() : tensor.const_data_ptr();
            caches.all[i].data = static_cast<char*>(const_cast<void*>(data));
        }
    };
    for (Caches* caches : dst) read(*caches, true);
    for (Caches* caches : src) read(*caches, false);
}

std::string shapes_expected(bool latent, bool is_list) {
    if (latent) {
        return is_list ? "expected 2 [tokens, dim], 3 [pages, page_size, dim] or 4 [layers, pages, page_size, dim]"
                       : "expected 2 [tokens, dim] or 3 [pages, page_size, dim]";
    }
    return is_list ? "expected 3 [tokens, heads, head_dim], 4 [pages, page_size, heads, head_dim] or 5 [layers, pages, "
                     "page_size, heads, head_dim]"
                   : "expected 3 [tokens, heads, head_dim] or 4 [pages, page_size, heads, head_dim]";
}

Cache read_cache(const Request& request, const Caches& caches, size_t i) {
    const Tensor& tensor = caches.argument->tensors[i];
    const auto name = [&] { return caches.name(i); };
    check_given(request.op, tensor, name);
    Cache cache;
    cache.facts = facts_of(tensor);
    const TensorFacts& facts = cache.facts;
    check_place(request.op, name, facts);

    if (is_quantized(facts.dtype)) {
        fail(request.op,
             caches.name(i) + " has dtype " + dtype_name(facts.dtype) + ", expected one that is not quantized");
    }
    const bool is_list = caches.argument->is_list;
    const int64_t index_dims = facts.dim - (request.latent ? 1 : 2);  // 1: tokens, 2: paged, 3: a stack of layers
    if (index_dims < 1 || index_dims > (is_list ? 3 : 2)) {
        fail(request.op,
             caches.name(i) + " has " + str(facts.dim) + " dimensions, " + shapes_expected(request.latent, is_list));
    }
    const int64_t last = facts.dim - 1;
    const bool empty = std::any_of(facts.sizes, facts.sizes + facts.dim, [](int64_t size) { return size == 0; });
    if (facts.strides[last] != 1 && facts.sizes[last] > 1 && !empty) {
        fail(request.op,
             caches.name(i) + " has stride " + str(facts.strides[last]) + " in its last dimension, expected 1");
    }

    int64_t dim = 0;
    const auto next = [&](int64_t& size, int64_t& stride) {
        size = facts.sizes[dim];
        stride = facts.strides[dim] * facts.element_size;
        ++dim;
    };
    if (index_dims == 3) next(cache.layers, cache.strides.layer);
    next(cache.pages, cache.strides.page);
    if (index_dims >= 2) next(cache.page_size, cache.strides.slot);
    if (!request.latent) next(cache.heads, cache.strides.head);
    cache.head_dim = facts.sizes[last];
    return cache;
}

// The caches of one side: K's and V's, or those of the one latent argument. Within a side all agree with the first.
struct SideCaches {
    std::vector<const Caches*> arguments;

    // Calls visit(cache, its argument, its position in it) for each cache.
    template <class Visit>
    void each(const Visit& visit) const {
        for (const Caches* caches : arguments) {
            for (size_t i = 0; i < caches->all.size(); ++i) visit(caches->all[i], *caches, i);
        }
    }
    const Caches* first_argument() const {
        for (const Caches* caches : arguments) {
            if (!caches->all.empty()) return caches;
        }
        return nullptr;
    }
    const Cache* first() const {
        const Caches* caches = first_argument();
        return caches == nullptr ? nullptr : &caches->all[0];
    }
    std::string first_name() const { return first_argument()->name(0); }
};

void check_one_device(const char* op, const SideCaches& side) {
    const Cache* first = side.first();
    side.each([&](const Cache& cache, const Caches& caches, size_t i) {
        if (cache.facts.device_type != first->facts.device_type || cache.facts.device() != first->facts.device()) {
            fail(op, caches.name(i) + " is on " + place(cache.facts) + ", expected " + place(first->facts) + " as " +
                         side.first_name());
        }
    });
}

void check_one_page_size(const char* op, const SideCaches& side) {
    const Cache* first = side.first();
    side.each([&](const Cache& cache, const Caches& caches, size_t i) {
        if (cache.page_size != first->page_size) {
            fail(op, caches.name(i) + " has page_size " + str(cache.page_size) + ", expected " + str(first->page_size) +
                         " as " + side.first_name());
        }
    });
}

// Visits the layers that a pair's two lists have in common: runs of layers within one element on each side.
template <class Visit>
void each_common_run(const Caches& src, const Caches& dst, const Visit& visit) {
    size_t i = 0, j = 0;
    int64_t src_layer = 0, dst_layer = 0;
    while (i < src.all.size() && j < dst.all.size()) {
        const int64_t layers = std::min(src.all[i].layers - src_layer, dst.all[j].layers - dst_layer);
        if (layers > 0) visit(i, src_layer, j, dst_layer, layers);
        src_layer += layers;
        dst_layer += layers;
        if (src_layer == src.all[i].layers) ++i, src_layer = 0;
        if (dst_layer == dst.all[j].layers) ++j, dst_layer = 0;
    }
}

void check_rows(const Request& request, const Caches& src, const Caches& dst) {
    each_common_run(src, dst, [&](size_t i, int64_t, size_t j, int64_t, int64_t) {
        const Cache& from = src.all[i];
        const Cache& to = dst.all[j];
        if (from.facts.dtype != to.facts.dtype) {
            fail(request.op, dst.name(j) + " has dtype " + dtype_name(to.facts.dtype) + ", expected " +
                                 dtype_name(from.facts.dtype) + " as " + src.name(i));
        }
        if (request.latent && from.head_dim != to.head_dim) {
            fail(request.op, dst.name(j) + " has dim " + str(to.head_dim) + ", expected " + str(from.head_dim) +
                                 " as " + src.name(i));
        }
        if (from.heads != to.heads || from.head_dim != to.head_dim) {
            fail(request.op, dst.name(j) + " has " + str(to.heads) + " heads of " + str(to.head_dim) + ", expected " +
                                 str(from.heads) + " heads of " + str(from.head_dim) + " as " + src.name(i));
        }
    });
}

Indices read_indices(const char* op, const char* name, const Tensor* tensor, int64_t& count) {
    Indices indices;
    if (tensor == nullptr) return indices;
    const auto lazy_name = [&] { return std::string(name); };
    check_given(op, *tensor, lazy_name);
    const TensorFacts facts = facts_of(*tensor);
    check_place(op, lazy_name, facts);
    const bool is_64bit = facts.dtype == aoti_torch_dtype_int64();
    if (!is_64bit && facts.dtype != aoti_torch_dtype_int32()) {
        fail(op, std::string(name) + " has dtype " + dtype_name(facts.dtype) + ", expected int32 or int64");
    }
    if (facts.dim != 1) fail(op, std::string(name) + " has " + str(facts.dim) + " dimensions, expected 1");
    count = facts.sizes[0];
    check_storage(op, name, *tensor, facts);
    indices.data = tensor->const_data_ptr();
    indices.stride = facts.strides[0];
    indices.is_64bit = is_64bit;
    indices.device = facts.device();
    return indices;
}

struct Units {
    bool pages;
    int64_t in(const Cache& cache) const { return pages ? cache.pages : cache.pages * cache.page_size; }
    std::string name() const { return pages ? "pages" : "tokens"; }
};

// The number of units that move.
int64_t read_count(const Request& request, const Units& units, const SideCaches& src, const SideCaches& dst,
                   Plan& plan) {
    int64_t src_count = 0, dst_count = 0;
    plan.src.indices = read_indices(request.op, "src_indices", request.src_indices, src_count);
    plan.dst.indices = read_indices(request.op, "dst_indices", request.dst_indices, dst_count);
    const bool src_given = request.src_indices != nullptr, dst_given = request.dst_indices != nullptr;
    if (src_given && dst_given) {
        if (src_count != dst_count) {
            fail(request.op,
                 "dst_indices has " + str(dst_count) + " elements, expected " + str(src_count) + " as src_indices");
        }
        return src_count;
    }
    if (src_given || dst_given) {
        const int64_t count = src_given ? src_count : dst_count;
        const SideCaches& whole = src_given ? dst : src;
        whole.each([&](const Cache& cache, const Caches& caches, size_t i) {
            if (units.in(cache) < count) {
                fail(request.op, caches.name(i) + " has " + str(units.in(cache)) + " " + units.name() +
                                     ", expected at least " + str(count) + ", the length of " +
                                     (src_given ? "src_indices" : "dst_indices"));
            }
        });
        return count;
    }
    const SideCaches& reference = src.first() != nullptr ? src : dst;
    if (reference.first() == nullptr) return 0;
    const int64_t count = units.in(*reference.first());
    for (size_t pair = 0; pair < src.arguments.size(); ++pair) {
        for (const Caches* caches : {src.arguments[pair], dst.arguments[pair]}) {
            for (size_t i = 0; i < caches->all.size(); ++i) {
                const int64_t found = units.in(caches->all[i]);
                if (found != count) {
                    fail(request.op, caches->name(i) + " has " + str(found) + " " + units.name() + ", expected " +
                                         str(count) + " as " + reference.first_name());
                }
            }
        }
    }
    return count;
}

// An index must lie within every cache of its side, so that the smallest sets the limit.
void set_limit(const SideCaches& caches, const Units& units, Side& side) {
    const Cache* smallest = nullptr;
    caches.each([&](const Cache& cache, const Caches& argument, size_t i) {
        if (smallest == nullptr || units.in(cache) < units.in(*smallest)) {
            smallest = &cache;
            side.limit_argument = argument.argument->name;
            side.limit_element = argument.argument->is_list ? static_cast<int64_t>(i) : -1;
        }
    });
    if (smallest == nullptr) return;
    side.limit = units.in(*smallest);
    side.page_size = units.pages ? 1 : std::max<int64_t>(smallest->page_size, 1);
    side.device = smallest->facts.device();
}

}  // namespace

Geometry Geometry::from(const Request& request) {
    const char* op = request.op;
    check_options(op, request.engine, request.num_sms);

    std::vector<Caches> owned;
    owned.reserve(2 * request.pairs.size());
    SideCaches src, dst;
    std::vector<Caches*> read_from, written;
    for (const CachePair& pair : request.pairs) {
        for (const CacheArgument* argument : {&pair.src, &pair.dst}) {
            const bool second = argument == &pair.dst;
            if (second && request.within_pool) {
                dst.arguments.push_back(src.arguments.back());
                continue;
            }
            Caches& caches = owned.emplace_back(Caches{argument, {}});
            caches.all.reserve(argument->size);
            for (size_t i = 0; i < argument->size; ++i) caches.all.push_back(read_cache(request, caches, i));
            (second ? dst : src).arguments.push_back(&caches);
            (second || request.within_pool ? written : read_from).push_back(&caches);
        }
    }

    for (const SideCaches* side : {&src, &dst}) check_one_device(op, *side);
    for (const SideCaches* side : {&src, &dst}) check_one_page_size(op, *side);
    for (size_t pair = 0; pair < request.pairs.size(); ++pair) {
        for (const Caches* caches : {src.arguments[pair], dst.arguments[pair]}) {
            const int64_t expected = src.arguments[0]->layers();
            if (caches->layers() != expected && caches->argument->is_list) {
                fail(op, std::string(caches->argument->name) + " has " + str(caches->layers()) +
                             " layers in all, expected " + str(expected) + " as " + src.arguments[0]->argument->name);
            }
        }
    }
    for (size_t pair = 0; pair < request.pairs.size(); ++pair)
        check_rows(request, *src.arguments[pair], *dst.arguments[pair]);
    const bool both = src.first() != nullptr && dst.first() != nullptr;
    if (request.page_indices && both && src.first()->page_size != dst.first()->page_size) {
        fail(op, dst.first_name() + " has page_size " + str(dst.first()->page_size) + ", expected " +
                     str(src.first()->page_size) + " as " + src.first_name() +
                     ", since page_indices moves whole pages");
    }

    read_addresses(request, written, read_from);
    Geometry geometry;
    Plan& plan = geometry.plan;
    const Units units{request.page_indices};
    plan.op = op;
    plan.pages = units.pages;
    plan.count = read_count(request, units, src, dst, plan);
    set_limit(src, units, plan.src);
    set_limit(dst, units, plan.dst);
    if (both) check_engine_serves(op, request.engine, plan.src.device < 0, plan.dst.device < 0);

    for (size_t pair = 0; pair < request.pairs.size(); ++pair) {
        geometry.blocks_before.push_back(plan.blocks.size());
        std::vector<Block> blocks;
        each_common_run(*src.arguments[pair], *dst.arguments[pair],
                        [&](size_t i, int64_t src_layer, size_t j, int64_t dst_layer, int64_t layers) {
                            const Cache& from = src.arguments[pair]->all[i];
                            const Cache& to = dst.arguments[pair]->all[j];
                            Block block{};
                            block.src = from.data + src_layer * from.strides.layer;
                            block.dst = to.data + dst_layer * to.strides.layer;
                            block.layers = layers;
                            block.slots = units.pages ? from.page_size : 1;
                            block.heads = from.heads;
                            block.head_bytes = from.head_dim * from.facts.element_size;
                            block.src_strides = from.strides;
                            block.dst_strides = to.strides;
                            if (block.unit_bytes() > 0) blocks.push_back(block);
                        });
        for (Block& block : fuse(std::move(blocks))) plan.blocks.push_back(block);
    }
    geometry.blocks_before.push_back(plan.blocks.size());
    return geometry;
}

}  // namespace kvops

#include "engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "cpu_features.h"

namespace kt {
namespace {

std::array<const Kernels*, 2> kernels_of(const std::string& isa) {
#if defined(__x86_64__)
    if (isa == "avx2") return {&avx2::f32, &avx2::bf16};
    if (isa == "avx512") return {&avx512::f32, &avx512::bf16};
    if (isa == "avx512_bf16") return {&avx512_bf16::f32, &avx512_bf16::bf16};
#endif
    return {&reference::f32, &reference::bf16};
}

const std::string& checked(const std::string& isa) {
    for (const IsaStatus& status : isa_statuses())
        if (status.name == isa) {
            if (status.available) return isa;
            throw std::invalid_argument("isa: " + isa + " is not available here: " + status.reason);
        }
    throw std::invalid_argument("isa: this build has no " + isa);
}

const char* name_of(Phase phase) {
    switch (phase) {
        case Phase::convert_x:
            return "conversion of x";
        case Phase::widen_x:
            return "widening of x";
        case Phase::lora_in:
            return "LoRA of gate and up";
        case Phase::gate_up:
            return "gate and up";
        case Phase::lora_mid:
            return "LoRA of down";
        case Phase::down:
            return "down";
        case Phase::convert_dy:
            return "conversion of dy";
        case Phase::lora_out:
            return "LoRA of down, backward";
        case Phase::dact:
            return "down, backward";
        case Phase::dlora_in:
            return "LoRA of gate and up, backward";
        case Phase::dx_grads:
            return "gate and up, backward";
    }
    return "";
}

struct TaskOutOfMemory : std::bad_alloc {
    explicit TaskOutOfMemory(std::string message) : text(std::move(message)) {}
    const char* what() const noexcept override { return text.c_str(); }
    std::string text;
};

int64_t even(int64_t n) { return (n + 1) / 2 * 2; }

// A row stride with room for a vector and an odd number of cache lines, so that the rows of a tile do
// not fall into one set of the L1 cache.
int64_t stride(int64_t n) {
    const int64_t lines = (even(n) + 31) / 32;
    return (lines | 1) * 32;
}

size_t size_of(Format format) { return format == Format::bf16 ? 2 : 4; }

}  // namespace

size_t Saved::bytes() const {
    const size_t index = routing.row_token.size() * (sizeof(int32_t) + sizeof(int64_t) + sizeof(float)) +
                         routing.row_hash.size() * sizeof(uint32_t);
    return x.bytes() + pair.bytes() + lora_in.bytes() + lora_mid.bytes() + index;
}

void Saved::release() {
    Lease(std::move(x));
    Lease(std::move(pair));
    Lease(std::move(lora_in));
    Lease(std::move(lora_mid));
    routing = Routing();
    released = true;
}

Engine::Engine(const std::string& isa, int threads, const std::vector<int>& cpus)
    : isa_(checked(isa)),
      threads_(threads),
      kernels_(kernels_of(isa_)),
      pool_(new ThreadPool(threads, cpus)),
      thread_scratch_(threads) {}

void Engine::close() {
    std::lock_guard lock(call_mutex_);
    if (!pool_) return;
    busy_at_close_ = pool_->busy_seconds();
    pool_.reset();
    thread_scratch_.clear();
    cache_->clear();
}

size_t Engine::scratch_bytes() const {
    size_t sum = cache_->kept_bytes();
    for (const Buffer& b : thread_scratch_) sum += b.bytes();
    return sum;
}

void Engine::describe(Pass& p, const Weights& w, const Routing& routing, int64_t tokens,
                      const std::vector<LoraView>& lora, const Dropout& dropout) const {
    p.tokens = tokens;
    p.experts = w.experts;
    p.hidden = w.hidden;
    p.inter = w.inter;
    p.rows = routing.rows();
    p.hidden_stride = stride(w.hidden);
    p.inter_even = even(w.inter);
    p.inter_stride = stride(w.inter);
    p.pair_stride = stride(2 * p.inter_even);
    for (const LoraView& view : lora) p.rank_stride = std::max(p.rank_stride, view.rank);
    p.gate = w.gate;
    p.up = w.up;
    p.down = w.down;
    p.lora = lora.data();
    p.expert_rows = routing.expert_rows.data();
    p.num_expert_rows = static_cast<int64_t>(routing.expert_rows.size());
    p.groups = routing.groups.data();
    p.num_groups = static_cast<int64_t>(routing.groups.size());
    p.chunks = routing.chunks.data();
    p.num_chunks = static_cast<int64_t>(routing.chunks.size());
    p.row_token = routing.row_token.data();
    p.row_weight = routing.row_weight.data();
    if (dropout.p > 0) {
        p.row_hash = routing.row_hash.data();
        p.drop_below = static_cast<uint32_t>(std::floor(dropout.p * 4294967296.0));
        p.keep_scale = static_cast<float>(1.0 / (1.0 - dropout.p));
    }
    // Enough slabs to keep every thread busy to the end, none wider than its panels stay in cache.
    const int64_t panel = kernels(w.format).panel_columns;
    const int64_t wanted = w.hidden / (4 * threads_) / panel * panel;
    p.slab_columns = std::clamp<int64_t>(wanted, panel, 256);
}

void Engine::run(const Kernels& k, const Pass& pass, int64_t layer, const std::vector<int64_t>& expert_ids,
                 Phase phase) {
    const size_t bytes = k.scratch_bytes(pass, phase);
    pool_->run(k.tasks(pass, phase), [&](int64_t task, int thread) {
        try {
            Buffer& scratch = thread_scratch_[thread];
            if (scratch.bytes() < bytes) {
                scratch = Buffer();
                scratch = Buffer(bytes);
            }
            k.run(pass, phase, task, scratch.data());
        } catch (const std::bad_alloc&) {
            const int32_t expert = k.expert_of(pass, phase, task);
            throw TaskOutOfMemory("layer " + std::to_string(layer) +
                                  (expert < 0 ? "" : ", expert " + std::to_string(expert_ids[expert])) +
                                  ", " + name_of(phase) + ": cannot allocate " + std::to_string(bytes) +
                                  " bytes of scratch for a thread");
        }
    });
}

std::unique_ptr<Saved> Engine::forward(const Weights& w, ForwardInput input,
                                       const std::vector<LoraView>& lora, Keep keep, float* y) {
    std::lock_guard lock(call_mutex_);
    if (!pool_) throw std::runtime_error("the engine is closed");
    const Kernels& k = kernels(w.format);
    const size_t storage = size_of(w.format), compute = k.compute_is_bf16 ? 2 : 4;

    auto saved = std::make_unique<Saved>();
    saved->format = w.format;
    saved->tokens = input.tokens;
    saved->slots = input.slots;
    saved->experts = w.experts;
    saved->hidden = w.hidden;
    saved->inter = w.inter;
    saved->keep = keep;
    saved->routing = std::move(input.routing);
    for (const LoraView& view : lora) saved->ranks.push_back(view.rank);
    saved->dropout = input.dropout;

    Pass p{};
    describe(p, w, saved->routing, input.tokens, lora, input.dropout);
    saved->x = take(p.tokens * p.hidden_stride * storage);
    saved->lora_in = take(p.rows * 2 * p.rank_stride * sizeof(float));
    saved->lora_mid = take(p.rows * p.rank_stride * sizeof(float));
    if (keep == Keep::all) saved->pair = take(p.rows * p.pair_stride * storage);
    const Lease act = take(p.rows * p.inter_stride * compute);
    const Lease wide = take(storage == compute ? 0 : p.tokens * p.hidden_stride * compute);

    p.x_in = input.x;
    p.x_in_bf16 = input.x_is_bf16;
    p.x = saved->x.data();
    p.x_compute = storage == compute ? p.x : wide.data();
    p.pair = saved->pair.data();
    p.act = act.data();
    p.lora_in = saved->lora_in.as<float>();
    p.lora_mid = saved->lora_mid.as<float>();
    p.y = y;
    for (const Phase phase : {Phase::convert_x, Phase::lora_in, Phase::gate_up, Phase::lora_mid, Phase::down})
        run(k, p, w.layer, w.expert_ids, phase);
    ++calls_;

    if (keep == Keep::nothing) return nullptr;
    if (keep == Keep::input) {
        Lease(std::move(saved->lora_in));
        Lease(std::move(saved->lora_mid));
    }
    return saved;
}

void Engine::backward(const Weights& w, const Saved& saved, const float* dy,
                      const std::vector<LoraView>& lora, const std::vector<LoraGradView>& grads, float* dx,
                      float* dw) {
    std::lock_guard lock(call_mutex_);
    if (!pool_) throw std::runtime_error("the engine is closed");
    const Kernels& k = kernels(w.format);
    const size_t storage = size_of(w.format), compute = k.compute_is_bf16 ? 2 : 4;
    const Routing& routing = saved.routing;

    Pass p{};
    describe(p, w, routing, saved.tokens, lora, saved.dropout);
    const bool again = saved.keep == Keep::input;
    const int64_t slabs = (p.inter + kSlab - 1) / kSlab;
    const Lease wide = take(storage == compute ? 0 : p.tokens * p.hidden_stride * compute);
    const Lease pair = take(again ? p.rows * p.pair_stride * storage : 0);
    const Lease lora_in = take(again ? p.rows * 2 * p.rank_stride * sizeof(float) : 0);
    const Lease lora_mid = take(again ? p.rows * p.rank_stride * sizeof(float) : 0);
    const Lease act = take(p.rows * p.inter_stride * compute);
    const Lease dpair = take(p.rows * p.pair_stride * compute);
    const Lease dy_compute = take(p.tokens * p.hidden_stride * compute);
    const Lease lora_out = take(p.rows * p.rank_stride * sizeof(float));
    const Lease dlora_in = take(p.rows * 2 * p.rank_stride * sizeof(float));
    const Lease dw_parts = take(slabs * p.rows * sizeof(float));
    const Lease dw_rows = take(p.rows * sizeof(float));

    p.x = saved.x.data();
    p.x_compute = storage == compute ? p.x : wide.data();
    p.pair = again ? pair.data() : saved.pair.data();
    p.lora_in = again ? lora_in.as<float>() : saved.lora_in.as<float>();
    p.lora_mid = again ? lora_mid.as<float>() : saved.lora_mid.as<float>();
    p.act = act.data();
    p.dpair = dpair.data();
    p.dy = dy;
    p.dy_compute = dy_compute.data();
    p.lora_out = lora_out.as<float>();
    p.dlora_in = dlora_in.as<float>();
    p.dw_parts = dw_parts.as<float>();
    p.dw_rows = dw_rows.as<float>();
    p.dx = dx;
    p.lora_grads = grads.empty() ? nullptr : grads.data();

    if (p.x_compute != p.x) run(k, p, w.layer, w.expert_ids, Phase::widen_x);
    if (again)
        for (const Phase phase : {Phase::lora_in, Phase::gate_up, Phase::lora_mid})
            run(k, p, w.layer, w.expert_ids, phase);
    for (const Phase phase :
         {Phase::convert_dy, Phase::lora_out, Phase::dact, Phase::dlora_in, Phase::dx_grads})
        run(k, p, w.layer, w.expert_ids, phase);

    std::memset(dw, 0, saved.tokens * saved.slots * sizeof(float));
    for (int64_t row = 0; row < p.rows; ++row) dw[routing.row_slot[row]] = p.dw_rows[row];
    ++calls_;
}

}  // namespace kt

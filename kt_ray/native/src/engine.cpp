#include "engine.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "cpu_features.h"
#include "finite.h"

namespace kt {
namespace {

// For float32 weights, for others, and for others by rows.
std::array<const Kernels*, 3> kernels_of(const std::string& isa) {
#if defined(__x86_64__)
    if (isa == "avx2") return {&avx2::f32, &avx2::bf16, &avx2::bf16};
    if (isa == "avx512") return {&avx512::f32, &avx512::bf16, &avx512::bf16};
    if (isa == "avx512_bf16") return {&avx512::f32, &avx512_bf16::bf16, &avx512_bf16::bf16};
    if (isa == "amx") return {&avx512::f32, &amx::bf16, &avx512_bf16::bf16};
#endif
    return {&reference::f32, &reference::bf16, &reference::bf16};
}

// Those of int8 products stand in all places: float32 weights are refused before they are used.
std::array<const Kernels*, 3> int8_kernels_of(const std::string& isa) {
    const Kernels* k = &reference::int8;
#if defined(__x86_64__)
    if (isa == "avx2") k = &avx2::int8;
    if (isa == "avx512" || isa == "avx512_bf16") k = has_avx512_vnni() ? &avx512_vnni::int8 : &avx512::int8;
    if (isa == "amx") k = &amx::int8;
#endif
    return {k, k, k};
}

// |sums| of so many products of int8 by -127 .. 127 stay below 2^31.
constexpr int64_t kInt8Depth = 1 << 17;

void check_int8(const char* name, const Matrix& m, Format format, int64_t depth) {
    const auto refuse = [&](const std::string& why) {
        throw std::invalid_argument(std::string(name) + ": " + why + ", as this engine multiplies in int8");
    };
    if (m.format != Format::int8 && m.format != Format::int4) refuse("must be stored in format int8 or int4");
    if (m.format != format) refuse("must be stored in the same format as up");
    if (m.format == Format::int8 && (m.block_rows != 1 || m.block_cols < m.cols))
        refuse("must have one scale per output channel");
    if (depth > kInt8Depth)
        refuse("sums of " + std::to_string(depth) + " products, at most 131072 are exact");
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
        case Phase::store_x:
            return "storing x";
        case Phase::lora_in:
            return "LoRA of gate and up";
        case Phase::gate_up:
            return "gate and up";
        case Phase::shrink:
            return "gate and up to int8";
        case Phase::lora_mid:
            return "LoRA of down";
        case Phase::down:
            return "down";
        case Phase::store_dy:
            return "storing dy";
        case Phase::restore:
            return "gate and up from int8";
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

// Elements of a row lie side by side, which is what row kernels read.
bool row_major(const Matrix& m) { return m.col_bytes <= (m.format == Format::f32 ? 4 : 2); }

// Rows of an expert up to which the weights' rows are faster than panels (docs/kernels.md); 0: never.
int64_t most_rows(Format format) {
    switch (format) {
        case Format::q5_0:
        case Format::q5_1:
            return 0;
        case Format::q4_0:
        case Format::q5_k:
            return 1;
        case Format::q4_k:
            return 2;
        default:
            return 3;
    }
}

constexpr int64_t kDepthStep = 32;  // packed depths are multiples of it: a slice of a panel
constexpr int64_t kPackedBytes = 2 << 20;

int64_t pieces(int64_t n, int64_t size) { return (n + size - 1) / size; }
int64_t padded(int64_t n, int64_t step) { return pieces(n, step) * step; }

std::vector<std::pair<std::string, double>> measure_products() {
    // In turn, so that all meet the same clock and the same neighbours; the best of each, since neighbours
    // only slow.
    constexpr int kRounds = 16, kRuns = 64;
    std::vector<std::pair<std::string, double>> rates;
    for (const IsaStatus& status : isa_statuses())
        if (status.available && status.name != "reference") rates.emplace_back(status.name, 0.0);
    for (int round = 0; round < kRounds; ++round)
        for (auto& [isa, best] : rates) {
            const Kernels& k = *kernels_of(isa)[1];
            const auto begin = std::chrono::steady_clock::now();
            const int64_t flop = k.products(kRuns);
            const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
            best = std::max(best, static_cast<double>(flop) / seconds.count());
        }
    return rates;
}

// Into how many runs to cut the spans, so that tasks of (run, slab) keep all threads busy to the end: 8 to 16
// tasks for each, as many as leave the fewest threads without one at last. More would cost: each decodes its
// first panel by itself.
int64_t runs_of(int64_t slabs, int threads) {
    if (threads == 1) return 1;
    const int64_t fewest = pieces(8 * threads, slabs);
    int64_t best = fewest;
    const auto idle = [&](int64_t runs) {
        const double tasks = static_cast<double>(runs * slabs);
        return static_cast<double>(padded(runs * slabs, threads)) / tasks;
    };
    for (int64_t runs = fewest; runs <= 2 * fewest; ++runs)
        if (idle(runs) < idle(best)) best = runs;
    return best;
}

}  // namespace

const std::vector<std::pair<std::string, double>>& product_rates() {
    static const std::vector<std::pair<std::string, double>> rates = measure_products();
    return rates;
}

std::shared_lock<std::shared_mutex> Saved::reading() const {
    std::shared_lock lock(mutex_, std::defer_lock);
    if (getpid() == process_) lock.lock();
    return lock;
}

size_t Saved::bytes() const {
    const auto lock = reading();
    const size_t index = routing.row_token.size() * (sizeof(int32_t) + sizeof(int64_t) + sizeof(float)) +
                         routing.row_hash.size() * sizeof(uint32_t);
    return x.bytes() + pair.bytes() + pair_int8.bytes() + lora_in.bytes() + lora_mid.bytes() + index;
}

void Saved::release() {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (getpid() == process_) lock.lock();
    Lease(std::move(x));
    Lease(std::move(pair));
    Lease(std::move(pair_int8));
    Lease(std::move(lora_in));
    Lease(std::move(lora_mid));
    routing = Routing();
    released = true;
}

Engine::Engine(const std::string& isa, int threads, const std::vector<int>& cpus, bool int8_products,
               double tokens_per_row)
    : isa_(checked(isa)),
      tokens_per_row_(tokens_per_row),
      threads_(threads),
      process_(getpid()),
      kernels_(int8_products ? int8_kernels_of(isa_) : kernels_of(isa_)),
      pool_(new ThreadPool(threads, cpus)),
      thread_scratch_(threads) {}

void Engine::check_process() const {
    if (getpid() != process_)
        throw std::runtime_error("this engine's threads belong to process " + std::to_string(process_) +
                                 "; a forked child must build its own engine");
}

void Engine::close() {
    if (getpid() != process_) return;
    std::lock_guard lock(call_mutex_);
    if (!pool_) return;
    {
        std::lock_guard pool_lock(pool_mutex_);
        busy_at_close_ = pool_->busy_seconds();
        pool_.reset();
    }
    thread_scratch_.clear();
    thread_scratch_bytes_ = 0;
    cache_->close();
}

size_t Engine::scratch_bytes() const {
    return cache_->kept_bytes() + static_cast<size_t>(thread_scratch_bytes_.load());
}

double Engine::busy_seconds() const {
    if (getpid() != process_) return 0;  // its threads are not here, nor the one that may hold the mutex
    std::lock_guard lock(pool_mutex_);
    return pool_ ? pool_->busy_seconds() : busy_at_close_;
}

const Kernels& Engine::kernels(const Weights& w, bool by_rows) const {
    const Kernels& k = *kernels_[w.in_float32() ? 0 : by_rows ? 2 : 1];
    if (k.quantised_size > 0) {
        // Forward sums over H and I, backward over both parts' I in one sum.
        const int64_t inter = w.activation.gated() ? 2 * w.inter : w.inter;
        const Format format = w.up.first.format;
        if (w.activation.gated()) check_int8("gate", w.gate.first, format, std::max(w.hidden, inter));
        check_int8("up", w.up.first, format, std::max(w.hidden, inter));
        check_int8("down", w.down.first, format, std::max(w.hidden, w.inter));
    }
    return k;
}

Engine::QuantisedRows Engine::quantised_rows(const Kernels& k, int64_t rows, int64_t depth, bool in_groups) {
    if (k.quantised_size == 0) return {};
    const int64_t row_bytes = padded(depth * k.quantised_size, 64);
    const int64_t scales = in_groups ? row_bytes / k.quantised_size / kDepthStep : 1;
    return {take(rows * row_bytes), take(rows * scales * sizeof(RowScale))};
}

Lease Engine::take(size_t bytes) {
    try {
        return Lease(cache_, bytes);
    } catch (const std::bad_alloc&) {
        throw TaskOutOfMemory("layer " + std::to_string(layer_) + ": cannot allocate " +
                              std::to_string(bytes) + " bytes for activations");
    }
}

int64_t Engine::row_tokens(const Weights& w, int64_t slots) const {
    std::vector<Matrix> matrices = {w.up.first, w.down.first};
    if (w.activation.gated()) matrices.push_back(w.gate.first);
    int64_t rows = kernels(w).quantised_size > 0 ? 0 : most_rows(Format::bf16);
    for (const Matrix& m : matrices) rows = row_major(m) ? std::min(rows, most_rows(m.format)) : 0;
    const double tokens =
        tokens_per_row_ > 0 ? tokens_per_row_ : static_cast<double>(w.experts) / std::max<int64_t>(slots, 1);
    return rows == 0 ? 0 : std::max(kFewTokens, static_cast<int64_t>(rows * tokens));
}

int64_t Engine::span_rows(const Weights& w, const Kernels& k) {
    if (k.blocks_depth) return 512;  // rows of a block and their sums: 1.5 KiB each, of an L2 of 2 MiB
    const int64_t row_bytes = padded(w.hidden, kDepthStep) * (k.compute_is_bf16 ? 2 : 4);
    return std::clamp<int64_t>(kPackedBytes / row_bytes, 64, 512);
}

void Engine::describe(Pass& p, const Weights& w, const Routing& routing, int64_t tokens,
                      const std::vector<LoraView>& lora, const Dropout& dropout, bool by_rows) const {
    const Kernels& k = *kernels_[w.in_float32() ? 0 : 1];
    p.by_rows = by_rows;
    p.tokens = tokens;
    p.experts = w.experts;
    p.hidden = w.hidden;
    p.inter = w.inter;
    p.rows = routing.rows();
    p.parts = w.activation.gated() ? 2 : 1;
    p.hidden_pad = padded(w.hidden, kDepthStep);
    p.inter_pad = padded(w.inter, kDepthStep);
    for (const LoraView& view : lora) p.rank_pad = std::max(p.rank_pad, padded(view.rank, 16));
    p.gate = w.gate;
    p.up = w.up;
    p.down = w.down;
    p.gate_bias = w.gate_bias;
    p.up_bias = w.up_bias;
    p.down_bias = w.down_bias;
    p.activation = w.activation;
    p.in_groups = k.quantised_size > 0 && w.up.first.format == Format::int4;
    p.lora = lora.data();
    p.groups = routing.groups.data();
    p.num_groups = static_cast<int64_t>(routing.groups.size());
    p.blocks = routing.blocks.data();
    p.num_blocks = static_cast<int64_t>(routing.blocks.size());
    p.segments = routing.segments.data();
    p.spans = routing.spans.data();
    p.num_spans = static_cast<int64_t>(routing.spans.size());
    p.chunks = routing.chunks.data();
    p.num_chunks = static_cast<int64_t>(routing.chunks.size());
    p.row_token = routing.row_token.data();
    p.row_weight = routing.row_weight.data();
    p.span_rows = span_rows(w, k);
    if (dropout.p > 0) {
        p.row_hash = routing.row_hash.data();
        p.drop_below = static_cast<uint32_t>(std::floor(dropout.p * 4294967296.0));
        p.keep_scale = static_cast<float>(1.0 / (1.0 - dropout.p));
    }
    // Enough tasks to keep every thread busy to the end, none narrower than needed: each packs its rows
    // or walks all experts once more.
    const int64_t wanted = pieces(8 * threads_, std::max<int64_t>(p.num_spans, 1));
    p.inter_slab = padded(pieces(w.inter, wanted), by_rows ? kDepthStep : kDwColumns);
    // Where depth goes in blocks, rows come from beyond the L2 once per slab: one for each thread.
    const int64_t slabs = (by_rows ? 8 : k.blocks_depth ? 1 : 2) * threads_;
    const int64_t slab = w.hidden / slabs / k.panel_columns * k.panel_columns;
    p.hidden_slab = std::clamp<int64_t>(slab, k.panel_columns, 1024);
    p.scatter_runs =
        by_rows ? 1 : std::min(runs_of(scatter_slabs(p), threads_), std::max<int64_t>(p.num_spans, 1));
}

std::vector<ScatteredRows> Engine::scattered_rows(int64_t hidden, int64_t inter,
                                                  const std::vector<int64_t>& rows) const {
    Weights w{};
    w.hidden = hidden;
    w.inter = inter;
    w.experts = static_cast<int64_t>(rows.size());
    w.gate.first.format = w.up.first.format = w.down.first.format = Format::bf16;
    const Kernels& k = *kernels_[1];
    Routing routing;
    int64_t end = 0;
    for (size_t e = 0; e < rows.size(); ++e) {
        if (rows[e] > 0) routing.groups.push_back({static_cast<int32_t>(e), -1, end, end + rows[e]});
        end += rows[e];
    }
    routing.row_token.resize(end);
    routing.cut(k.max_rows, k.row_step, span_rows(w, k), kChunkRows);
    Pass p{};
    describe(p, w, routing, end, {}, {}, false);
    std::vector<ScatteredRows> tasks(k.tasks(p, Phase::down));
    const auto begin_of = [&](int64_t run) {
        const int64_t span = first_span(p, run);
        return span == p.num_spans ? p.rows : p.blocks[p.spans[span].block_begin].begin;
    };
    for (size_t i = 0; i < tasks.size(); ++i) {
        const ScatterTask task = scatter_task(p, static_cast<int64_t>(i));
        tasks[i] = {task.slab, task.run, begin_of(task.run + 1) - begin_of(task.run)};
    }
    return tasks;
}

void Engine::run(const Kernels& k, const Pass& pass, int64_t layer, const std::vector<int64_t>& expert_ids,
                 const std::vector<Phase>& phases) {
    const auto scatters = [](Phase phase) { return phase == Phase::down || phase == Phase::dx_grads; };
    std::vector<int64_t> ends;
    size_t bytes = 0;
    for (const Phase phase : phases) {
        ends.push_back((ends.empty() ? 0 : ends.back()) + k.tasks(pass, phase));
        bytes = std::max(bytes, k.scratch_bytes(pass, phase));
        if (scatters(phase)) turns_.begin(scatter_slabs(pass));
    }
    const auto run_one = [&](int64_t numbered, int thread) {
        const size_t at = std::upper_bound(ends.begin(), ends.end(), numbered) - ends.begin();
        const Phase phase = phases[at];
        const int64_t task = at == 0 ? numbered : numbered - ends[at - 1];
        const bool in_turn =
            scatters(phase) && task < (phase == Phase::down ? scatter_tasks(pass) : dx_tasks(pass));
        const ScatterTask turn = scatter_task(pass, task);
        try {
            Buffer& scratch = thread_scratch_[thread];
            if (scratch.bytes() < bytes) {
                thread_scratch_bytes_ -= static_cast<int64_t>(scratch.bytes());
                scratch = Buffer();
                scratch = Buffer(bytes);
                thread_scratch_bytes_ += static_cast<int64_t>(scratch.bytes());
            }
            if (in_turn && !turns_.wait(turn.slab, turn.run)) return;
            k.run(pass, phase, task, scratch.data());
            if (in_turn) turns_.done(turn.slab, turn.run);
        } catch (const std::bad_alloc&) {
            if (scatters(phase)) turns_.fail();
            const int32_t expert = k.expert_of(pass, phase, task);
            throw TaskOutOfMemory("layer " + std::to_string(layer) +
                                  (expert < 0 ? "" : ", expert " + std::to_string(expert_ids[expert])) +
                                  ", " + name_of(phase) + ": cannot allocate " + std::to_string(bytes) +
                                  " bytes of scratch for a thread");
        }
    };
    pool_->run(ends.back(), run_one, ends);
}

std::unique_ptr<Saved> Engine::forward(const Weights& w, ForwardInput input,
                                       const std::vector<LoraView>& lora, Keep keep, float* y,
                                       bool check_finite) {
    check_process();
    std::lock_guard lock(call_mutex_);
    if (!pool_) throw std::runtime_error("the engine is closed");
    layer_ = w.layer;
    const bool by_rows = keep == Keep::nothing && input.dropout.p == 0 && input.tokens > 0 &&
                         input.tokens_alone <= row_tokens(w, input.slots);
    const Kernels& k = kernels(w, by_rows);
    const size_t storage = w.in_float32() ? 4 : 2, compute = k.compute_is_bf16 ? 2 : 4;

    auto saved = std::make_unique<Saved>();
    saved->in_float32 = w.in_float32();
    saved->kernels = &k;
    saved->tokens = input.tokens;
    saved->slots = input.slots;
    saved->experts = w.experts;
    saved->hidden = w.hidden;
    saved->inter = w.inter;
    saved->parts = w.activation.gated() ? 2 : 1;
    saved->keep = keep;
    saved->routing = std::move(input.routing);
    if (by_rows)
        saved->routing.cut(1, 1, kSpanRows, kSpanRows);
    else
        saved->routing.cut(k.max_rows, k.row_step, span_rows(w, k), kChunkRows);
    for (const LoraView& view : lora) saved->ranks.push_back(view.rank);
    saved->dropout = input.dropout;

    Pass p{};
    describe(p, w, saved->routing, input.tokens, lora, input.dropout, by_rows);
    saved->x = take(p.tokens * p.hidden_pad * storage);
    saved->lora_in = take(p.rows * 2 * p.rank_pad * sizeof(float));
    saved->lora_mid = take(p.rows * p.rank_pad * sizeof(float));
    const size_t pair_bytes = p.rows * p.parts * p.inter_pad * storage;
    if (keep == Keep::all) saved->pair = take(pair_bytes);
    if (keep == Keep::int8) saved->pair_int8 = take(p.rows * kept_row_bytes(p));
    const Lease shrinking = take(keep == Keep::int8 ? pair_bytes : 0);
    const Lease act = take(p.rows * p.inter_pad * compute);
    const QuantisedRows act_int8 = quantised_rows(k, p.rows, p.inter_pad, p.in_groups);

    p.x_in = input.x;
    p.x_in_bf16 = input.x_is_bf16;
    p.x = saved->x.data();
    p.pair = keep == Keep::int8 ? shrinking.data() : saved->pair.data();
    p.pair_int8 = saved->pair_int8.data();
    p.act = act.data();
    p.act_int8 = act_int8.packed.data();
    p.act_scales = act_int8.scales.as<RowScale>();
    p.lora_in = saved->lora_in.as<float>();
    p.lora_mid = saved->lora_mid.as<float>();
    p.y = y;
    const FiniteCheck check{w, p, k.compute_is_bf16};
    std::vector<Phase> phases = {Phase::store_x, Phase::lora_in, Phase::gate_up};
    if (keep == Keep::int8) phases.push_back(Phase::shrink);
    phases.insert(phases.end(), {Phase::lora_mid, Phase::down});
    if (by_rows)  // each takes less time than to wake a thread
        run(k, p, w.layer, w.expert_ids, phases);
    else
        for (const Phase phase : phases) run(k, p, w.layer, w.expert_ids, {phase});
    ++calls_;
    if (check_finite) {
        check.input("x", p.x, storage == 2);
        check.rows("act", p.act, p.inter_pad);
        check.output("y", p.y);
    }

    if (keep == Keep::nothing) return nullptr;
    if (keep == Keep::input) {
        Lease(std::move(saved->lora_in));
        Lease(std::move(saved->lora_mid));
    } else if (lora.empty()) {  // x is for the adapters' gradients alone
        Lease(std::move(saved->x));
    }
    return saved;
}

void Engine::backward(const Weights& w, const Saved& saved, const float* dy,
                      const std::vector<LoraView>& lora, const std::vector<LoraGradView>& grads, float* dx,
                      float* dw, bool check_finite) {
    check_process();
    const auto reading = saved.reading();
    if (saved.released) throw std::invalid_argument("saved: was released");
    std::lock_guard lock(call_mutex_);
    if (!pool_) throw std::runtime_error("the engine is closed");
    layer_ = w.layer;
    const Kernels& k = kernels(w);
    const size_t storage = w.in_float32() ? 4 : 2, compute = k.compute_is_bf16 ? 2 : 4;
    const Routing& routing = saved.routing;
    if (saved.kernels != &k)
        throw std::invalid_argument(
            "saved: was made by an engine with another instruction set or with other products");

    Pass p{};
    describe(p, w, routing, saved.tokens, lora, saved.dropout);
    const bool again = saved.keep == Keep::input;
    const size_t pair_size = p.rows * p.parts * p.inter_pad;
    const Lease pair = take(saved.keep == Keep::all ? 0 : pair_size * storage);
    const Lease lora_in = take(again ? p.rows * 2 * p.rank_pad * sizeof(float) : 0);
    const Lease lora_mid = take(again ? p.rows * p.rank_pad * sizeof(float) : 0);
    const Lease act = take(p.rows * p.inter_pad * compute);
    const Lease dpair = take(pair_size * compute);
    const QuantisedRows dpair_int8 =
        dx == nullptr ? QuantisedRows() : quantised_rows(k, p.rows, p.parts * p.inter_pad, false);
    const Lease dy_stored = take(p.tokens * p.hidden_pad * storage);
    const Lease lora_out = take(p.rows * p.rank_pad * sizeof(float));
    const Lease dlora_in = take(p.rows * 2 * p.rank_pad * sizeof(float));
    const Lease dw_parts = take(pieces(p.inter, kDwColumns) * p.rows * sizeof(float));
    const Lease dw_rows = take(p.rows * sizeof(float));

    p.x = saved.x.data();
    p.pair = saved.keep == Keep::all ? saved.pair.data() : pair.data();
    p.pair_int8 = saved.pair_int8.data();
    p.lora_in = again ? lora_in.as<float>() : saved.lora_in.as<float>();
    p.lora_mid = again ? lora_mid.as<float>() : saved.lora_mid.as<float>();
    p.act = act.data();
    p.dpair = dpair.data();
    p.dpair_int8 = dpair_int8.packed.data();
    p.dpair_scales = dpair_int8.scales.as<RowScale>();
    p.dy = dy;
    p.dy_stored = dy_stored.data();
    p.lora_out = lora_out.as<float>();
    p.dlora_in = dlora_in.as<float>();
    p.dw_parts = dw_parts.as<float>();
    p.dw_rows = dw_rows.as<float>();
    p.dx = dx;
    p.lora_grads = grads.empty() ? nullptr : grads.data();

    const FiniteCheck check{w, p, k.compute_is_bf16};
    run(k, p, w.layer, w.expert_ids, {Phase::store_dy});
    if (check_finite) check.input("dy", p.dy_stored, storage == 2);
    if (again)
        for (const Phase phase : {Phase::lora_in, Phase::gate_up, Phase::lora_mid})
            run(k, p, w.layer, w.expert_ids, {phase});
    if (saved.keep == Keep::int8) run(k, p, w.layer, w.expert_ids, {Phase::restore});
    for (const Phase phase : {Phase::lora_out, Phase::dact, Phase::dlora_in, Phase::dx_grads})
        run(k, p, w.layer, w.expert_ids, {phase});

    if (check_finite) {
        check.rows("the gradients of gate and up", p.dpair, p.parts * p.inter_pad);
        if (p.dx != nullptr) check.output("dx", p.dx);
        for (size_t a = 0; a < grads.size(); ++a) check.gradients(a, grads[a], lora[a].rank);
    }
    std::memset(dw, 0, saved.tokens * saved.slots * sizeof(float));
    for (int64_t row = 0; row < p.rows; ++row) dw[routing.row_slot[row]] = p.dw_rows[row];
    ++calls_;
}

}  // namespace kt

// One expert engine: an instruction set chosen once, threads of its own, memory reused between calls.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "buffers.h"
#include "kernels.h"
#include "routing.h"
#include "thread_pool.h"
#include "turns.h"

namespace kt {

// A buffer that goes back to its cache when dropped.
class Lease {
  public:
    Lease() = default;
    Lease(std::shared_ptr<BufferCache> cache, size_t bytes) : cache_(std::move(cache)), bytes_(bytes) {
        buffer_ = cache_->take(bytes);
    }
    Lease(Lease&& other) { *this = std::move(other); }
    Lease& operator=(Lease&& other) {
        std::swap(cache_, other.cache_);
        std::swap(buffer_, other.buffer_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Lease() {
        if (cache_) cache_->give(std::move(buffer_));
    }
    void* data() const { return buffer_.data(); }
    template <class T>
    T* as() const {
        return buffer_.as<T>();
    }
    // As asked for; the buffer may be a larger one in reuse.
    size_t bytes() const { return bytes_; }

  private:
    std::shared_ptr<BufferCache> cache_;
    Buffer buffer_;
    size_t bytes_ = 0;
};

// The experts of one layer; shapes as in kernels.h. `inter` and `hidden` are at least 1.
struct Weights {
    ExpertMatrices gate, up, down;  // gate unused when the activation is ungated
    const float *gate_bias, *up_bias, *down_bias;
    ActivationSpec activation;
    int64_t experts, hidden, inter;
    int64_t layer;
    std::vector<int64_t> expert_ids;  // global number of each

    // Float32 weights are computed and their activations kept in float32, all others in bfloat16.
    bool in_float32() const {
        return down.first.format == Format::f32 && up.first.format == Format::f32 &&
               (!activation.gated() || gate.first.format == Format::f32);
    }
};

// int8: as all, but gate and up as blocks of int8.
enum class Keep { nothing, input, all, int8 };

// What backward needs of one forward.
struct Saved {
    bool in_float32;
    const Kernels* kernels;  // packed what is kept: backward needs the same
    int64_t tokens, slots, experts, hidden, inter, parts;
    Keep keep;
    Routing routing;
    std::vector<int64_t> ranks;  // of each adapter
    Dropout dropout;
    Lease x, pair, pair_int8, lora_in, lora_mid;

    size_t bytes() const;
    // Gives the memory back, once no backward reads it any more.
    void release();
    bool released = false;

    // Held by whoever reads the memory. Not in a process forked after the forward, where a thread of the
    // parent may have held it: there nobody else is left.
    std::shared_lock<std::shared_mutex> reading() const;

  private:
    const pid_t process_ = getpid();
    mutable std::shared_mutex mutex_;
};

struct ForwardInput {
    const void* x;
    bool x_is_bf16;
    int64_t tokens, slots;
    int64_t tokens_alone;  // decide whether this goes by rows (Engine::row_tokens)
    Routing routing;       // with row_hash when dropout.p > 0
    Dropout dropout;
};

struct Piece {
    const void* from;
    int64_t bytes;
};

// Rows to add: (row of the sum, row of values), ascending, no row of the sum twice.
struct AddedRows {
    std::vector<std::pair<int64_t, int64_t>> rows;
    const float* values;
};

// (instruction set, FLOP/s at which one thread multiplies with it) of every available one but reference, for
// weights that are not float32. Measured at the first call, in a few milliseconds.
const std::vector<std::pair<std::string, double>>& product_rates();

// A task of the scattering phases, and for how many rows.
struct ScatteredRows {
    int64_t slab, run, rows;
};

class Engine {
  public:
    // isa: a name of isa_statuses(), available (std::invalid_argument otherwise). int8_products: weights
    // must be int4, or int8 with one scale per output channel; they are multiplied as integers.
    // tokens_per_row: of a call, for each row that an expert gets under even routing; 0: its experts over its
    // slots.
    Engine(const std::string& isa, int threads, const std::vector<int>& cpus, bool int8_products = false,
           double tokens_per_row = 0.0);

    // Up to so many tokens a forward that keeps nothing goes by rows of the weights instead of panels,
    // without dropout: a rule over shapes, so that the order of additions is known before (docs/numerics.md).
    int64_t row_tokens(const Weights& w, int64_t slots) const;

    // y [T, H]. Returns null when nothing is kept. `check_finite` looks for NaN and infinity and throws
    // std::invalid_argument that names what, layer and expert; outputs are then undefined, and gradients of
    // adapters may have been added to.
    std::unique_ptr<Saved> forward(const Weights& weights, ForwardInput input,
                                   const std::vector<LoraView>& lora, Keep keep, float* y, bool check_finite);
    // dx [T, H], or null where nobody asks for it; dw [T, K]. `grads` is empty or has an entry per adapter.
    void backward(const Weights& weights, const Saved& saved, const float* dy,
                  const std::vector<LoraView>& lora, const std::vector<LoraGradView>& grads, float* dx,
                  float* dw, bool check_finite);
    // Lays pieces one after another at `to`, on all threads.
    void join(const std::vector<Piece>& pieces, void* to);
    // Adds part after part to `out` [rows, row], on all threads.
    void add_rows(const std::vector<AddedRows>& parts, int64_t rows, int64_t row, float* out);
    // Sums of squares of float32 pieces, on all threads: of each stretch of a piece one sum, whatever the
    // threads.
    std::vector<double> squares(const std::vector<Piece>& pieces);
    // Rounds float32 to the nearest bfloat16, ties to even, on all threads.
    void round(const float* from, int64_t count, uint16_t* to);
    // Ends the threads and frees the memory; further calls throw std::runtime_error. Nothing in a process
    // forked after construction, where calls throw std::runtime_error.
    void close();

    // The tasks of the scattering phases in the order they are taken, for bfloat16 experts with so many rows.
    std::vector<ScatteredRows> scattered_rows(int64_t hidden, int64_t inter,
                                              const std::vector<int64_t>& rows) const;

    const std::string& isa() const { return isa_; }
    int threads() const { return threads_; }
    int64_t calls() const { return calls_; }
    double busy_seconds() const;
    // Memory held between calls.
    size_t scratch_bytes() const;

  private:
    // Throws in a forked child. Asked before call_mutex_, which a thread of the parent may have held when
    // it forked: in the child nobody ever gives it back.
    void check_process() const;
    // What computes these weights; throws std::invalid_argument for those it cannot compute.
    const Kernels& kernels(const Weights& weights, bool by_rows = false) const;
    // task(i, first, last) over 0..counts[i] in runs of `step` for every i, on all threads.
    void spread(const std::vector<int64_t>& counts, int64_t step,
                const std::function<void(size_t, int64_t, int64_t)>& task);
    Lease take(size_t bytes);
    // Left operands of quantised products, empty where there are none.
    struct QuantisedRows {
        Lease packed, scales;
    };
    QuantisedRows quantised_rows(const Kernels& kernels, int64_t rows, int64_t depth, bool in_groups);
    // Rows of a span, whose packed left operand is to stay in the L2 cache.
    static int64_t span_rows(const Weights& weights, const Kernels& kernels);
    void describe(Pass& pass, const Weights& weights, const Routing& routing, int64_t tokens,
                  const std::vector<LoraView>& lora, const Dropout& dropout, bool by_rows = false) const;
    // Phases one after another, in one call of the pool.
    void run(const Kernels& kernels, const Pass& pass, int64_t layer, const std::vector<int64_t>& expert_ids,
             const std::vector<Phase>& phases);

    const std::string isa_;
    const double tokens_per_row_;
    const int threads_;
    const pid_t process_;
    std::array<const Kernels*, 3> kernels_;
    std::mutex call_mutex_;  // one call at a time
    int64_t layer_ = 0;      // of that call
    ThreadPool::Owner pool_;
    std::shared_ptr<BufferCache> cache_ = std::make_shared<BufferCache>();
    std::vector<Buffer> thread_scratch_;
    Turns turns_;
    std::atomic<int64_t> thread_scratch_bytes_{0};
    mutable std::mutex pool_mutex_;  // held where the pool ends and where others ask it, during calls too
    std::atomic<int64_t> calls_{0};
    double busy_at_close_ = 0;
};

}  // namespace kt

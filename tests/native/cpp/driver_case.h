// A case for the engine out of a string of bytes: any string gives a valid case, so that a fuzzer may write
// it. tests/helpers/engine_cases.py names the bytes and writes the corpus.
#pragma once

#include <algorithm>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "driver_stored.h"
#include "engine.h"

namespace driver {

// One byte per field; those that are missing are 0.
// clang-format off
#define DRIVER_FIELDS(X)                                                                                   \
    X(gate) X(up) X(down) X(activation) X(biases) X(hidden) X(inter) X(wide) X(tokens) X(slots) X(experts) \
    X(adapters) X(rank0) X(rank1) X(rank2) X(routing) X(dropout) X(threads) X(keep) X(flags) X(layout)     \
    X(limit) X(seed)
// clang-format on

struct Fields {
#define DRIVER_FIELD(name) uint8_t name = 0;
    DRIVER_FIELDS(DRIVER_FIELD)
#undef DRIVER_FIELD

    Fields(const uint8_t* data, size_t size) {
        size_t at = 0;
#define DRIVER_FIELD(name) name = at < size ? data[at++] : 0;
        DRIVER_FIELDS(DRIVER_FIELD)
#undef DRIVER_FIELD
    }
};
#define DRIVER_FIELD(name) +1
constexpr size_t kFields = 0 DRIVER_FIELDS(DRIVER_FIELD);
#undef DRIVER_FIELD

enum Flags : uint8_t {
    kXBf16 = 1,
    kIds32 = 2,
    kCheckFinite = 4,
    kFreshEngine = 8,
    kSomeGrads = 16,  // the first adapter wants no gradients
    kNoGrads = 32,
    kLargeX = 64,
    kPoison = 128,  // a value of x is not finite: an error where it is looked for
};

enum Gaps : uint8_t { kTransposed = 1, kInterleaved = 2, kPadded = 4, kShifted = 8, kDownToo = 16 };

struct Adapter {
    int64_t rank;
    std::vector<float> matrix[6];  // in the order of kt::LoraView; empty: no gate
    float scale;
    bool wants_grads;
};

struct Case {
    int64_t tokens, slots, experts, hidden, inter;
    int threads;
    kt::Keep keep;
    uint8_t flags;
    kt::ActivationSpec activation;
    const Variant* variants[3];
    Stored stored[3];  // gate, up, down
    std::vector<float> bias[3];
    std::vector<Adapter> adapters;
    kt::Dropout dropout;
    bool default_adapter;  // the engine is not told whose the tokens are
    int64_t layer;
    std::vector<int64_t> expert_ids, ids64, adapter_of_token, keys;
    std::vector<int32_t> ids32;
    std::vector<float> x32, weights, dy;
    std::vector<uint16_t> x16;

    Case(const uint8_t* data, size_t size) {
        const Fields f(data, size);
        Random random(f.seed);
        flags = f.flags;
        choose_sizes(f);
        choose_weights(f, random);
        choose_adapters(f, random);
        choose_routing(f, random);
        layer = f.seed % 61;
        threads = 1 + f.threads % 3;
        keep = static_cast<kt::Keep>(2 - f.keep % 3);
        const float size_x = flags & kLargeX ? 1e4f : 1.0f;
        for (int64_t i = 0; i < tokens * hidden; ++i) {
            const float v = size_x * random.value();
            x16.push_back(bf16_of(v));
            x32.push_back(v);
            dy.push_back(random.value());
        }
        if (poisoned()) {
            const int64_t at = random.below(tokens * hidden);
            x32[at] = std::numeric_limits<float>::infinity();
            x16[at] = 0x7fc0;
        }
    }

    bool gated() const { return activation.gated(); }
    bool poisoned() const { return (flags & kPoison) != 0 && tokens > 0; }
    double x(int64_t token, int64_t h) const {
        const int64_t at = token * hidden + h;
        return flags & kXBf16 ? of_bf16(x16[at]) : x32[at];
    }

    kt::Weights engine_weights() const {
        const auto or_null = [](const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); };
        return {stored[0].view,
                stored[1].view,
                stored[2].view,
                or_null(bias[0]),
                or_null(bias[1]),
                or_null(bias[2]),
                activation,
                experts,
                hidden,
                inter,
                layer,
                expert_ids};
    }

    // Of everything the engine may not write.
    uint64_t hash() const {
        uint64_t h = 1;
        const auto add = [&](const auto& v) {
            const auto* bytes = reinterpret_cast<const uint8_t*>(v.data());
            for (size_t i = 0; i < v.size() * sizeof(v[0]); ++i) h = (h ^ bytes[i]) * 0x100000001b3u;
        };
        for (const Stored& s : stored) h = (h * 31 + s.data.hash()) * 31 + s.scales.hash();
        for (const auto& b : bias) add(b);
        for (const Adapter& a : adapters)
            for (const auto& m : a.matrix) add(m);
        add(ids32), add(ids64), add(adapter_of_token), add(keys), add(x32), add(x16), add(weights), add(dy);
        return h;
    }

    std::string text() const {
        static const char* const kinds[] = {"silu", "gelu_tanh", "swiglu_oai", "relu2"};
        char line[400];
        std::snprintf(
            line, sizeof(line),
            "%s %s %s, %s limit %g, bias %d%d%d, T %ld K %ld E %ld H %ld I %ld, dropout %.3f, threads "
            "%d, keep %d, flags %02x, ranks",
            gated() ? variants[0]->name : "-", variants[1]->name, variants[2]->name,
            kinds[static_cast<int>(activation.kind)], activation.up_limit, !bias[0].empty(), !bias[1].empty(),
            !bias[2].empty(), tokens, slots, experts, hidden, inter, dropout.p, threads,
            static_cast<int>(keep), flags);
        std::string text = line;
        for (const Adapter& a : adapters) text += " " + std::to_string(a.rank);
        return text;
    }

  private:
    // Mostly small ones, and up to 256.
    static int64_t rank_of(uint8_t v) { return v < 240 ? 1 + v % 40 : 256 - 17 * (v - 240); }

    // Sizes that the plain reference gets through in a fraction of a second.
    void choose_sizes(const Fields& f) {
        variants[0] = &kVariants[f.gate % kNumVariants];
        variants[1] =
            f.up % (kNumVariants + 1) == 0 ? variants[0] : &kVariants[f.up % (kNumVariants + 1) - 1];
        variants[2] =
            f.down % (kNumVariants + 1) == 0 ? variants[0] : &kVariants[f.down % (kNumVariants + 1) - 1];
        activation.kind = static_cast<kt::Activation>(f.activation % 4);
        int64_t multiple = 1;
        for (int p = gated() ? 0 : 1; p < 3; ++p) multiple = std::max(multiple, variants[p]->multiple);
        const int64_t steps = multiple == 1 ? 200 : multiple == 256 ? 2 : 256 / multiple;
        hidden = multiple * (1 + f.hidden % steps);
        inter = multiple * (1 + f.inter % steps);
        if (f.wide % 16 == 15) hidden *= 17;
        if (f.wide % 16 == 14) inter *= 17;
        const int64_t shorter =
            std::max<int64_t>(multiple, 100'000 / std::max(hidden, inter) / multiple * multiple);
        (hidden < inter ? hidden : inter) = std::min(std::min(hidden, inter), shorter);
        experts = std::min<int64_t>(f.experts % 6, std::max<int64_t>(1, 120'000 / (hidden * inter)));
        slots = 1 + f.slots % 4;
        tokens = f.tokens < 240 ? f.tokens % 80 : 400 + (f.tokens - 240) * 60;
        const int64_t ranks =
            f.adapters % 4 == 0 ? 0 : std::max({rank_of(f.rank0), rank_of(f.rank1), rank_of(f.rank2)});
        const int64_t work = slots * (hidden * inter + (hidden + inter) * ranks);
        if (tokens > 0) tokens = std::min(tokens, std::max<int64_t>(1, 800'000 / work));
    }

    void choose_weights(const Fields& f, Random& random) {
        const int64_t rows[] = {inter, inter, hidden}, cols[] = {hidden, hidden, inter};
        for (int p = 0; p < 3; ++p) {
            const uint8_t gaps = p == 2 && (f.layout & kDownToo) == 0 ? 0 : f.layout;
            const Layout layout{(gaps & kTransposed) != 0, gaps & kInterleaved ? 2 : 1,
                                gaps & kPadded ? 3 : 0, gaps & kShifted ? 1 : 0};
            if (p > 0 || gated())
                stored[p] = StoredMaker(*variants[p], experts, rows[p], cols[p], layout, random).take();
            if ((f.biases >> p & 1) != 0 && (p > 0 || gated()))
                for (int64_t i = 0; i < experts * rows[p]; ++i) bias[p].push_back(random.value());
        }
        for (int64_t e = 0; e < experts; ++e) expert_ids.push_back(3 + 2 * e);
        activation.alpha = 1.0f + 0.01f * f.limit;
        activation.up_limit = std::numeric_limits<float>::infinity();
        if (f.limit % 2 != 0) activation.up_limit = 0.25f + 0.01f * f.limit;
        activation.gate_limit = f.limit % 4 == 3 ? 1.5f * activation.up_limit : activation.up_limit;
    }

    void choose_adapters(const Fields& f, Random& random) {
        const uint8_t ranks[] = {f.rank0, f.rank1, f.rank2};
        for (int a = 0; a < f.adapters % 4; ++a) {
            Adapter adapter{rank_of(ranks[a]), {}, 0.3f + 0.4f * a, a > 0 || (flags & kSomeGrads) == 0};
            const int64_t r = adapter.rank, h = hidden, i = inter;
            const int64_t out[] = {r, i, r, i, r, h}, in[] = {h, r, h, r, i, r};
            for (int m = gated() ? 0 : 2; m < 6; ++m) {
                const float size = static_cast<float>(1 / std::sqrt(double(in[m])));
                for (int64_t n = 0; n < experts * out[m] * in[m]; ++n)
                    adapter.matrix[m].push_back(size * random.value());
            }
            adapters.push_back(std::move(adapter));
        }
        if (f.dropout >= 128) dropout = {(f.dropout - 127) / 129.0, uint64_t{5} << 40 | f.seed, f.seed + 7u};
        if (adapters.empty()) dropout = {};
    }

    void choose_routing(const Fields& f, Random& random) {
        const int64_t e = experts;
        default_adapter = f.routing >= 128 && adapters.size() == 1;
        for (int64_t t = 0; t < tokens; ++t) {
            const int64_t first = random.below(e + 1);
            for (int64_t k = 0; k < slots; ++k) {
                int64_t id = random.below(e + 1);  // E: no expert
                if (f.routing % 6 == 1) id = e;
                if (e > 0 && f.routing % 6 == 2) id = e - 1;                             // all on one
                if (e > 0 && f.routing % 6 == 3) id = first;                             // duplicates
                if (e > 0 && f.routing % 6 == 4) id = 2 * random.below((e + 1) / 2);     // every other empty
                if (e > 0 && f.routing % 6 == 5) id = random.below(8) == 0 ? 0 : e - 1;  // uneven
                ids64.push_back(id);
                ids32.push_back(static_cast<int32_t>(id));
                weights.push_back(static_cast<float>(0.1 + random.unit()));
            }
            const int64_t n = static_cast<int64_t>(adapters.size());
            adapter_of_token.push_back(default_adapter ? 0 : random.below(n + 1) - 1);
            keys.push_back(t / 8 << 32 | t % 8);
        }
    }
};

}  // namespace driver

// The engine's function in plain double precision, with what its roundings may do to it.
//
// Every number carries a variance: that of the errors which the engine's stated roundings (docs/numerics.md)
// put into it, taken as independent. A rounding to a type spreads evenly over half a unit in the last place;
// a float32 sum of n terms adds n roundings of partial sums; a function of one element spreads as it does
// between six standard deviations to either side, which holds across the kink of a clamp. Errors of the same
// token in several slots may be the same ones, and add up as such.
#pragma once

#include "driver_case.h"

namespace driver {

struct Value {
    double v = 0, var = 0;
};

constexpr double kFloatError = 0x1p-48 / 3;  // square of the relative rounding error, mean
constexpr double kBf16Error = 0x1p-16 / 3;
constexpr double kSplitError = 0x1p-32 / 3;  // two bfloat16 for one float

inline uint32_t mix(uint32_t h) {
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    return h ^ h >> 16;
}
inline uint32_t fold(uint32_t h, uint32_t v) { return mix(h * 31u + v + 0x9E3779B9u); }

struct Results {
    std::vector<Value> y, dx, dw;
    std::vector<std::vector<Value>> grads[6];  // [matrix][adapter]
};

class Reference {
  public:
    explicit Reference(const Case& c) : c_(c), in_float32_(c.engine_weights().in_float32()) {}

    const Results& compute() {
        r_.y.resize(c_.tokens * c_.hidden);
        r_.dx.resize(c_.tokens * c_.hidden);
        r_.dw.resize(c_.tokens * c_.slots);
        for (int m = 0; m < 6; ++m)
            for (const Adapter& a : c_.adapters) r_.grads[m].emplace_back(a.matrix[m].size());
        for (int64_t s = 0; s < c_.tokens * c_.slots; ++s)
            if (c_.ids64[s] < c_.experts) row(s, c_.ids64[s]);
        for (auto& matrix : r_.grads)
            for (auto& grad : matrix)
                for (Value& g : grad) g.var *= static_cast<double>(c_.slots);
        return r_;
    }

  private:
    using Values = std::vector<Value>;

    // Sum over k of w[k * stride] z[k]; `weight_error` as kBf16Error.
    static Value dot(const float* w, int64_t stride, const Values& z, double weight_error) {
        double sum = 0, squares = 0, var = 0;
        const int64_t n = static_cast<int64_t>(z.size());
        for (int64_t k = 0; k < n; ++k) {
            const double weight = w[k * stride], term = weight * z[k].v;
            sum += term;
            squares += term * term;
            var += weight * weight * z[k].var;
        }
        return {sum,
                var + weight_error * squares + static_cast<double>(n) * kFloatError * (squares + sum * sum)};
    }
    static void add(Value& to, const Value& v) { to = {to.v + v.v, to.var + v.var}; }
    static void add_same(Value& to, const Value& v) {  // whose error may be the same
        const double sd = std::sqrt(to.var) + std::sqrt(v.var);
        to = {to.v + v.v, sd * sd};
    }
    static Value times(const Value& a, const Value& b) {
        return {a.v * b.v, a.v * a.v * b.var + b.v * b.v * a.var + a.var * b.var};
    }
    static Value times(double a, const Value& b) { return {a * b.v, a * a * b.var}; }
    Value store(Value v) const {
        if (!in_float32_) v.var += kBf16Error * v.v * v.v;
        return v;
    }
    double lora_error() const { return in_float32_ ? 0 : kSplitError; }
    double weight_error(int projection) const {
        return in_float32_ || c_.variants[projection]->format == kt::Format::bf16 ? 0 : kBf16Error;
    }

    // Factor of element j of a projection's input: 0 or 1 / (1 - p).
    double mask(uint32_t row, int64_t j) const {
        if (c_.dropout.p == 0) return 1;
        const uint32_t below = static_cast<uint32_t>(std::floor(c_.dropout.p * 4294967296.0));
        return mix(row + (static_cast<uint32_t>(j) + 1u) * 0x9E3779B9u) >= below ? 1 / (1 - c_.dropout.p) : 0;
    }
    uint32_t row_hash(int64_t token, int64_t expert, uint32_t projection) const {
        uint32_t stream = fold(0x45585054u, static_cast<uint32_t>(c_.layer));
        stream = fold(fold(stream, static_cast<uint32_t>(c_.expert_ids[expert])), projection);
        const uint64_t key = static_cast<uint64_t>(c_.keys[token]), seed = c_.dropout.seed;
        uint32_t h = 0;
        for (const uint64_t word : {seed & 0xffffffffu, seed >> 32, uint64_t{c_.dropout.step},
                                    uint64_t{stream}, key >> 32, uint64_t{0}, key & 0xffffffffu})
            h = fold(h, static_cast<uint32_t>(word));
        return h;
    }

    // The activation and its gradients for upstream d.
    struct Local {
        double act, dg, du;
        double act_size, dg_size, du_size;  // what relative errors of the parts refer to
    };
    Local local(double g, double u, double d) const {
        const kt::ActivationSpec& spec = c_.activation;
        if (spec.kind == kt::Activation::relu2) {
            const double r = std::max(u, 0.0);
            return {r * r, 0, 2 * r * d, r * r, 0, std::fabs(2 * r * d)};
        }
        if (spec.kind == kt::Activation::gelu_tanh) {
            const double z = 1.5957691216057308 * (g + 0.044715 * g * g * g);
            const double s = 1 / (1 + std::exp(-z)), steep = 1.5957691216057308 * (1 + 0.134145 * g * g);
            const double rough = 1 + std::min(std::fabs(z), 90.0), bend = g * s * (1 - s) * steep;
            return {g * s * u,
                    d * u * (s + bend),
                    d * g * s,
                    rough * std::fabs(g * s * u),
                    rough * std::fabs(d * u) * (s + std::fabs(bend)),
                    rough * std::fabs(d * g * s)};
        }
        const bool oai = spec.kind == kt::Activation::swiglu_oai;
        const bool g_in = g <= spec.gate_limit, u_in = std::fabs(u) <= spec.up_limit;
        g = std::min(g, double(spec.gate_limit));
        u = std::clamp(u, -double(spec.up_limit), double(spec.up_limit));
        const double alpha = oai ? double(spec.alpha) : 1.0, one = oai ? 1.0 : 0.0;
        const double s = 1 / (1 + std::exp(-alpha * g)), bend = alpha * g * (1 - s);
        const double rough = 1 + std::min(std::fabs(alpha * g), 90.0), wide = std::fabs(u) + one;
        return {(u + one) * g * s,
                g_in ? d * (u + one) * s * (1 + bend) : 0,
                u_in ? d * g * s : 0,
                rough * wide * std::fabs(g * s),
                rough * wide * std::fabs(d) * s * (1 + std::fabs(bend)),
                rough * std::fabs(d * g * s)};
    }

    struct Element {
        Value act, dg, du;
    };
    Element element(const Value& g, const Value& u, const Value& d) const {
        const Local at = local(g.v, u.v, d.v);
        Element e{{at.act, 0}, {at.dg, 0}, {at.du, 0}};
        // The widest spread over what g, then u, may be; where that is a wide range, over its bends too.
        const auto spread = [&](const Value& around, const auto& with) {
            const double reach = 6 * std::sqrt(around.var);
            double act = 0, dg = 0, du = 0;
            const auto look = [&](double v) {
                const Local there = with(v);
                act = std::max(act, std::fabs(there.act - at.act));
                dg = std::max(dg, std::fabs(there.dg - at.dg));
                du = std::max(du, std::fabs(there.du - at.du));
            };
            look(around.v + reach);
            look(around.v - reach);
            if (reach > 0.5)
                for (const double bend : {-20.0, -10.0, -6.0, -4.0, -2.4, -1.2, -0.5, 0.0, 0.5, 1.2, 2.4, 4.0,
                                          10.0, double(c_.activation.gate_limit),
                                          double(c_.activation.up_limit), -double(c_.activation.up_limit)})
                    if (std::fabs(bend - around.v) < reach) look(bend);
            e.act.var += act * act / 9;
            e.dg.var += dg * dg / 9;
            e.du.var += du * du / 9;
        };
        spread(g, [&](double v) { return local(v, u.v, d.v); });
        spread(u, [&](double v) { return local(g.v, v, d.v); });
        const Local further = local(g.v, u.v, d.v + std::sqrt(d.var));
        e.dg.var += (further.dg - at.dg) * (further.dg - at.dg);
        e.du.var += (further.du - at.du) * (further.du - at.du);
        // exp's error and range, and float32 steps.
        const double floor =
            1e-38 * std::pow(1 + std::fabs(g.v), 3) * (1 + std::fabs(u.v)) * (1 + std::fabs(d.v));
        const auto rough = [&](double size) { return (3e-7 * size + floor) * (3e-7 * size + floor); };
        e.act.var += rough(at.act_size);
        e.dg.var += rough(at.dg_size);
        e.du.var += rough(at.du_size);
        return e;
    }

    // One token at one of its experts, there and back.
    void row(int64_t slot, int64_t e) {
        const int64_t t = slot / c_.slots, h = c_.hidden, i = c_.inter, first = c_.gated() ? 0 : 1;
        const double w = c_.weights[slot];
        const int64_t index = c_.adapters.empty() ? -1 : c_.adapter_of_token[t];
        const Adapter* lora = index < 0 ? nullptr : &c_.adapters[index];
        const int64_t rank = lora == nullptr ? 0 : lora->rank;
        const auto matrix = [&](int m) {  // of this expert
            return lora->matrix[m].data() + e * (lora->matrix[m].size() / c_.experts);
        };
        const auto frozen = [&](int p) { return c_.stored[p].values.data() + e * h * i; };
        const auto bias = [&](int p, int64_t n, int64_t size) {
            return c_.bias[p].empty() ? 0.0 : c_.bias[p][e * size + n];
        };
        std::vector<double> masks[3];
        for (int p = 0; p < 3; ++p) {
            const uint32_t hash = row_hash(t, e, p);
            for (int64_t j = 0; j < (p == 2 ? i : h); ++j) masks[p].push_back(mask(hash, j));
        }
        const auto masked = [&](const Values& z, int p) {
            Values out(z.size());
            for (size_t j = 0; j < z.size(); ++j) out[j] = times(masks[p][j], z[j]);
            return out;
        };

        // Forward.
        Values x(h), dy(h), out[3], middle[3];
        for (int64_t j = 0; j < h; ++j) {
            x[j] = {c_.x(t, j), 0};
            if ((c_.flags & kXBf16) == 0) x[j] = store(x[j]);
            dy[j] = store({c_.dy[t * h + j], 0});
        }
        const auto linear = [&](int p, const Values& in, int64_t rows) {
            const Values dropped = masked(in, p);
            const int64_t n_in = static_cast<int64_t>(in.size());
            for (int64_t q = 0; q < rank; ++q)
                middle[p].push_back(
                    times(lora->scale, dot(matrix(2 * p) + q * n_in, 1, dropped, lora_error())));
            for (int64_t n = 0; n < rows; ++n) {
                Value v = dot(frozen(p) + n * n_in, 1, in, weight_error(p));
                if (rank > 0) add(v, dot(matrix(2 * p + 1) + n * rank, 1, middle[p], 0));
                v.v += bias(p, n, rows);
                v.var += 4 * kFloatError * (v.v * v.v + std::pow(bias(p, n, rows), 2));
                out[p].push_back(v);
            }
        };
        out[0].resize(c_.gated() ? 0 : i);
        for (int p = static_cast<int>(first); p < 2; ++p) {
            linear(p, x, i);
            for (Value& v : out[p]) v = store(v);
        }
        Values act(i);
        for (int64_t j = 0; j < i; ++j) act[j] = store(element(out[0][j], out[1][j], {}).act);
        linear(2, act, h);
        for (int64_t n = 0; n < h; ++n) add_same(r_.y[t * h + n], times(w, out[2][n]));

        // Backward.
        Values back(rank), dact(i), d[2] = {Values(i), Values(i)};
        for (int64_t q = 0; q < rank; ++q)
            back[q] = times(lora->scale, dot(matrix(5) + q, rank, dy, lora_error()));
        Value dw;
        for (int64_t j = 0; j < i; ++j) {
            dact[j] = dot(frozen(2) + j, i, dy, weight_error(2));
            if (rank > 0) add(dact[j], times(masks[2][j], dot(matrix(4) + j, i, back, 0)));
            const Element there = element(out[0][j], out[1][j], times(w, dact[j]));
            d[0][j] = store(there.dg);
            d[1][j] = store(there.du);
            const Value part = times(act[j], dact[j]);
            add(dw, part);
            dw.var += static_cast<double>(i) * kFloatError * part.v * part.v;
        }
        for (int64_t n = 0; n < h; ++n) {
            const double part = bias(2, n, h) * c_.dy[t * h + n];
            dw.v += part;
            dw.var += static_cast<double>(h) * kFloatError * part * part;
        }
        r_.dw[slot] = dw;
        Values into[2];
        for (int p = static_cast<int>(first); p < 2; ++p)
            for (int64_t q = 0; q < rank; ++q)
                into[p].push_back(times(lora->scale, dot(matrix(2 * p + 1) + q, rank, d[p], lora_error())));
        for (int64_t n = 0; n < h; ++n) {
            Value v;
            for (int p = static_cast<int>(first); p < 2; ++p) {
                add(v, dot(frozen(p) + n, h, d[p], weight_error(p)));
                if (rank > 0) add(v, times(masks[p][n], dot(matrix(2 * p) + n, h, into[p], 0)));
            }
            add_same(r_.dx[t * h + n], v);
        }
        if (rank == 0) return;

        // The adapter's gradients.
        const auto outer = [&](int m, const Values& rows, const Values& cols) {
            Value* to = r_.grads[m][index].data() + e * rows.size() * cols.size();
            for (const Value& a : rows)
                for (const Value& b : cols) {
                    const Value v = times(a, b);
                    add(*to, v);
                    to++->var += static_cast<double>(c_.tokens) * kFloatError * v.v * v.v;
                }
        };
        Values weighted_dy(h), weighted_back(rank);
        for (int64_t n = 0; n < h; ++n) weighted_dy[n] = times(w, dy[n]);
        for (int64_t q = 0; q < rank; ++q) weighted_back[q] = times(w, back[q]);
        for (int p = static_cast<int>(first); p < 2; ++p) {
            outer(2 * p, into[p], masked(x, p));
            outer(2 * p + 1, d[p], middle[p]);
        }
        outer(4, weighted_back, masked(act, 2));
        outer(5, weighted_dy, middle[2]);
    }

    const Case& c_;
    const bool in_float32_;
    Results r_;
};

}  // namespace driver

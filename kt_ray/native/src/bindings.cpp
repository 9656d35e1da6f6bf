// Python sees raw pointers, shapes and dtypes only (kt_ray/native/engine.py makes them from tensors):
// nothing here is built against torch. Every check names the argument it fails on.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu_features.h"
#include "engine.h"

namespace py = pybind11;

void bind_event_loop(py::module_& m);  // bindings_event_loop.cpp

namespace {

// (name, address, dtype, shape, contiguous on the CPU) of one tensor.
struct Tensor {
    std::string name, dtype;
    void* data;
    std::vector<int64_t> shape;

    explicit Tensor(const py::tuple& t)
        : name(t[0].cast<std::string>()),
          dtype(t[2].cast<std::string>()),
          data(reinterpret_cast<void*>(t[1].cast<uintptr_t>())),
          shape(t[3].cast<std::vector<int64_t>>()) {
        if (!t[4].cast<bool>()) throw py::value_error(name + ": must be a contiguous CPU tensor");
    }

    const Tensor& typed(std::initializer_list<const char*> dtypes) const {
        std::string wanted;
        for (const char* d : dtypes) {
            if (dtype == d) return *this;
            wanted += std::string(wanted.empty() ? "" : " or ") + d;
        }
        throw py::value_error(name + ": dtype " + dtype + ", required " + wanted);
    }

    // -1 accepts any length.
    const Tensor& shaped(const std::vector<int64_t>& wanted) const {
        bool same = shape.size() == wanted.size();
        for (size_t i = 0; same && i < wanted.size(); ++i) same = wanted[i] < 0 || wanted[i] == shape[i];
        if (!same) throw py::value_error(name + ": shape " + text(shape) + ", required " + text(wanted));
        return *this;
    }

    static std::string text(const std::vector<int64_t>& shape) {
        std::string s;
        for (int64_t n : shape) s += (s.empty() ? "" : ", ") + (n < 0 ? "any" : std::to_string(n));
        return "[" + s + "]";
    }

    template <class T>
    T* as() const {
        return static_cast<T*>(data);
    }
};

// One projection as the façade describes it; shapes and pointers were checked there.
struct Projection {
    std::string name;
    int64_t experts, rows, cols;
    kt::ExpertMatrices matrices;

    explicit Projection(const py::tuple& t)
        : name(t[0].cast<std::string>()),
          experts(t[2].cast<int64_t>()),
          rows(t[3].cast<int64_t>()),
          cols(t[4].cast<int64_t>()) {
        kt::Matrix& m = matrices.first;
        m.format = named(t[1].cast<std::string>(), kFormats, name + ": format");
        m.rows = rows;
        m.cols = cols;
        m.data = reinterpret_cast<const uint8_t*>(t[5].cast<uintptr_t>());
        matrices.expert_bytes = t[6].cast<int64_t>();
        m.row_bytes = t[7].cast<int64_t>();
        m.col_bytes = t[8].cast<int64_t>();
        m.scale_type = named(t[9].cast<std::string>(), kScaleTypes, name + ": scale type");
        m.scales = reinterpret_cast<const uint8_t*>(t[10].cast<uintptr_t>());
        matrices.scale_expert_bytes = t[11].cast<int64_t>();
        m.scale_row_bytes = t[12].cast<int64_t>();
        m.block_rows = t[13].cast<int64_t>();
        m.block_cols = t[14].cast<int64_t>();
    }

    const Projection& shaped(int64_t e, int64_t n, int64_t k) const {
        if (experts != e || rows != n || cols != k)
            throw py::value_error(name + ": shape " + Tensor::text({experts, rows, cols}) + ", required " +
                                  Tensor::text({e, n, k}));
        return *this;
    }

    template <class Value>
    using Names = std::initializer_list<std::pair<const char*, Value>>;
    template <class Value>
    static Value named(const std::string& text, Names<Value> names, const std::string& what) {
        for (const auto& [name, value] : names)
            if (text == name) return value;
        throw py::value_error(what + " " + text + " is not known to this engine");
    }

    static constexpr Names<kt::Format> kFormats = {
#define KT_FORMAT(name) {#name, kt::Format::name},
        KT_FORMATS(KT_FORMAT)
#undef KT_FORMAT
    };
    static constexpr Names<kt::ScaleType> kScaleTypes = {{"none", kt::ScaleType::none},
                                                         {"f32", kt::ScaleType::f32},
                                                         {"bf16", kt::ScaleType::bf16},
                                                         {"f16", kt::ScaleType::f16},
                                                         {"ue8m0", kt::ScaleType::ue8m0}};
};

const float* bias_from(const py::object& object, int64_t e, int64_t n) {
    if (object.is_none()) return nullptr;
    return Tensor(object.cast<py::tuple>()).typed({"float32"}).shaped({e, n}).as<const float>();
}

// (gate or None, up, down, layer, expert_ids, (activation, alpha, limit of gate, of up), (gate, up, down
// biases or None))
kt::Weights weights_from(const py::tuple& t) {
    const Projection up(t[1].cast<py::tuple>()), down(t[2].cast<py::tuple>());
    const int64_t e = up.experts, i = up.rows, h = up.cols;
    if (h < 1 || i < 1)
        throw py::value_error("up: shape " + Tensor::text({e, i, h}) + " has no elements per expert");
    down.shaped(e, h, i);
    kt::Weights w{};
    w.up = up.matrices;
    w.down = down.matrices;
    const py::tuple activation = t[5].cast<py::tuple>();
    w.activation.kind = Projection::named<kt::Activation>(activation[0].cast<std::string>(),
                                                          {{"silu", kt::Activation::silu},
                                                           {"capped_silu", kt::Activation::silu},
                                                           {"gelu_tanh", kt::Activation::gelu_tanh},
                                                           {"swiglu_oai", kt::Activation::swiglu_oai},
                                                           {"relu2", kt::Activation::relu2}},
                                                          "activation:");
    w.activation.alpha = activation[1].cast<float>();
    w.activation.gate_limit = activation[2].cast<float>();
    w.activation.up_limit = activation[3].cast<float>();
    if (w.activation.gated()) {
        if (t[0].is_none()) throw py::value_error("gate: required by this activation");
        w.gate = Projection(t[0].cast<py::tuple>()).shaped(e, i, h).matrices;
    }
    const py::tuple biases = t[6].cast<py::tuple>();
    w.gate_bias = w.activation.gated() ? bias_from(biases[0], e, i) : nullptr;
    w.up_bias = bias_from(biases[1], e, i);
    w.down_bias = bias_from(biases[2], e, h);
    w.experts = e;
    w.hidden = h;
    w.inter = i;
    w.layer = t[3].cast<int64_t>();
    w.expert_ids = t[4].cast<std::vector<int64_t>>();
    if (static_cast<int64_t>(w.expert_ids.size()) != e)
        throw py::value_error("expert_ids: " + std::to_string(w.expert_ids.size()) + " numbers for " +
                              std::to_string(e) + " experts");
    return w;
}

// Six matrices in the order of LoraView; those of gate are None without a gate. The first has the rank.
struct LoraTensors {
    const float* at[6] = {};
    std::string first;
    int64_t rank = 0;

    LoraTensors(const py::tuple& t, const kt::Weights& w) {
        const bool gated = w.activation.gated();
        for (int m = 0; m < 6; ++m) {
            if (m < 2 && !gated) continue;
            const Tensor matrix(t[m].cast<py::tuple>());
            matrix.typed({"float32"});
            if (first.empty()) {
                matrix.shaped({w.experts, -1, w.hidden});
                rank = matrix.shape[1];
                if (rank < 1 || rank > kt::kMaxRank)
                    throw py::value_error(matrix.name + ": rank " + std::to_string(rank) + ", required 1.." +
                                          std::to_string(kt::kMaxRank));
                first = matrix.name;
            }
            const int64_t out = m == 5 ? w.hidden : w.inter, in = m == 4 ? w.inter : w.hidden;
            if (m % 2 == 0)
                matrix.shaped({w.experts, rank, in});
            else
                matrix.shaped({w.experts, out, rank});
            at[m] = matrix.as<float>();
        }
    }
};

// [(six matrices..., scale)]
std::vector<kt::LoraView> lora_from(const std::vector<py::tuple>& adapters, const kt::Weights& w) {
    std::vector<kt::LoraView> views;
    for (const py::tuple& t : adapters) {
        const LoraTensors m(t, w);
        views.push_back({m.at[0], m.at[1], m.at[2], m.at[3], m.at[4], m.at[5], t[6].cast<float>(), m.rank});
    }
    return views;
}

std::vector<kt::LoraGradView> grads_from(const std::vector<py::object>& adapters,
                                         const std::vector<kt::LoraView>& lora, const kt::Weights& w) {
    if (!adapters.empty() && adapters.size() != lora.size())
        throw py::value_error("lora_grads: " + std::to_string(adapters.size()) + " entries for " +
                              std::to_string(lora.size()) + " adapters");
    std::vector<kt::LoraGradView> views;
    for (size_t a = 0; a < adapters.size(); ++a) {
        if (adapters[a].is_none()) {
            views.push_back({});
            continue;
        }
        const LoraTensors m(adapters[a].cast<py::tuple>(), w);
        if (m.rank != lora[a].rank)
            throw py::value_error(m.first + ": rank " + std::to_string(m.rank) + ", the adapter has " +
                                  std::to_string(lora[a].rank));
        float* to[6];
        for (int i = 0; i < 6; ++i) to[i] = const_cast<float*>(m.at[i]);
        views.push_back({to[0], to[1], to[2], to[3], to[4], to[5]});
    }
    return views;
}

// None or (p, seed, step).
kt::Dropout dropout_from(const py::object& object) {
    kt::Dropout d;
    if (object.is_none()) return d;
    const py::tuple t = object.cast<py::tuple>();
    d.p = t[0].cast<double>();
    if (!(d.p >= 0 && d.p < 1))
        throw py::value_error("dropout: p = " + std::to_string(d.p) + ", required 0 <= p < 1");
    d.seed = t[1].cast<uint64_t>();
    d.step = t[2].cast<uint32_t>();
    return d;
}

std::unique_ptr<kt::Saved> forward(kt::Engine& engine, const py::tuple& weights, const py::tuple& x_arg,
                                   const py::tuple& ids_arg, const py::tuple& w_arg,
                                   const std::vector<py::tuple>& lora_arg, const py::object& adapter_arg,
                                   const py::object& dropout_arg, const py::object& keys_arg, int keep,
                                   const py::tuple& y_arg, bool check_finite,
                                   std::optional<int64_t> tokens_alone) {
    const kt::Weights w = weights_from(weights);
    const std::vector<kt::LoraView> lora = lora_from(lora_arg, w);
    const Tensor x(x_arg), ids(ids_arg), weights_tk(w_arg), y(y_arg);
    x.typed({"float32", "bfloat16"}).shaped({-1, w.hidden});
    const int64_t tokens = x.shape[0];
    if (tokens > std::numeric_limits<int32_t>::max()) throw py::value_error("x: more than 2**31 - 1 tokens");
    ids.typed({"int32", "int64"}).shaped({tokens, -1});
    const int64_t slots = ids.shape[1];
    weights_tk.typed({"float32"}).shaped({tokens, slots});
    y.typed({"float32"}).shaped({tokens, w.hidden});

    if (tokens_alone && (*tokens_alone > tokens || *tokens_alone < std::min<int64_t>(1, tokens)))
        throw py::value_error("tokens_alone: " + std::to_string(*tokens_alone) + ", required 1 to " +
                              std::to_string(tokens));

    const int64_t* adapter = nullptr;
    if (!adapter_arg.is_none())
        adapter = Tensor(adapter_arg.cast<py::tuple>()).typed({"int64"}).shaped({tokens}).as<int64_t>();
    else if (lora.size() > 1)
        throw py::value_error("adapter_of_token: required with " + std::to_string(lora.size()) + " adapters");
    kt::Dropout dropout = dropout_from(dropout_arg);
    if (lora.empty()) dropout = {};  // dropout acts on adapters only
    const int64_t* keys = nullptr;
    if (dropout.p > 0) {
        if (keys_arg.is_none()) throw py::value_error("keys: required with dropout");
        keys = Tensor(keys_arg.cast<py::tuple>()).typed({"int64"}).shaped({tokens}).as<int64_t>();
    }

    const py::gil_scoped_release released;
    const auto route = [&](auto* data) {
        return kt::make_routing(data, weights_tk.as<const float>(), adapter, tokens, slots, w.experts,
                                static_cast<int64_t>(lora.size()));
    };
    kt::ForwardInput input{
        x.data,
        x.dtype == "bfloat16",
        tokens,
        slots,
        tokens_alone.value_or(tokens),
        ids.dtype == "int32" ? route(ids.as<const int32_t>()) : route(ids.as<const int64_t>()),
        dropout};
    if (dropout.p > 0) kt::hash_rows(input.routing, dropout, w.layer, w.expert_ids, keys);
    return engine.forward(w, std::move(input), lora, static_cast<kt::Keep>(keep), y.as<float>(),
                          check_finite);
}

void backward(kt::Engine& engine, const py::tuple& weights, const kt::Saved& saved, const py::tuple& dy_arg,
              const std::vector<py::tuple>& lora_arg, const std::vector<py::object>& grads_arg,
              const py::object& dx_arg, const py::tuple& dw_arg, bool check_finite) {
    const kt::Weights w = weights_from(weights);
    const std::vector<kt::LoraView> lora = lora_from(lora_arg, w);
    const std::vector<kt::LoraGradView> grads = grads_from(grads_arg, lora, w);
    if (saved.in_float32 != w.in_float32() || saved.experts != w.experts || saved.hidden != w.hidden ||
        saved.inter != w.inter || saved.parts != (w.activation.gated() ? 2 : 1))
        throw py::value_error("saved: belongs to a layer of other shape, dtype or activation than weights");
    std::vector<int64_t> ranks;
    for (const kt::LoraView& view : lora) ranks.push_back(view.rank);
    if (saved.ranks != ranks)
        throw py::value_error("lora: ranks " + Tensor::text(ranks) + ", the forward had " +
                              Tensor::text(saved.ranks));
    const Tensor dy(dy_arg), dw(dw_arg);
    dy.typed({"float32"}).shaped({saved.tokens, w.hidden});
    float* dx = nullptr;
    if (!dx_arg.is_none())
        dx = Tensor(dx_arg.cast<py::tuple>()).typed({"float32"}).shaped({saved.tokens, w.hidden}).as<float>();
    dw.typed({"float32"}).shaped({saved.tokens, saved.slots});
    const py::gil_scoped_release released;
    engine.backward(w, saved, dy.as<const float>(), lora, grads, dx, dw.as<float>(), check_finite);
}

// Parts [T_i, ...] one after another to [sum of T_i, ...]; float32 may become bfloat16.
void join(kt::Engine& engine, const std::vector<py::tuple>& part_args, const py::tuple& out_arg) {
    const Tensor out(out_arg);
    const auto size_of = [](const std::string& dtype) -> int64_t {
        return dtype == "int64" ? 8 : dtype == "bfloat16" ? 2 : 4;
    };
    out.typed({"float32", "bfloat16", "int32", "int64"});
    if (out.shape.empty()) throw py::value_error(out.name + ": has no rows");
    std::vector<int64_t> wanted = out.shape;
    wanted[0] = -1;
    int64_t row = 1, rows = 0;
    for (size_t i = 1; i < out.shape.size(); ++i) row *= out.shape[i];
    std::vector<Tensor> parts;
    for (const py::tuple& arg : part_args) {
        Tensor part(arg);
        if (out.dtype == "bfloat16")
            part.typed({"bfloat16", "float32"});
        else
            part.typed({out.dtype.c_str()});
        rows += part.shaped(wanted).shape[0];
        if (part.dtype != Tensor(part_args[0]).dtype)
            throw py::value_error(part.name + ": dtype " + part.dtype + ", the first part has another");
        parts.push_back(std::move(part));
    }
    if (rows != out.shape[0])
        throw py::value_error(out.name + ": " + std::to_string(out.shape[0]) + " rows, the parts have " +
                              std::to_string(rows));
    const py::gil_scoped_release released;
    if (parts.empty()) return;
    if (parts[0].dtype == out.dtype) {
        std::vector<kt::Piece> pieces;
        for (const Tensor& part : parts)
            pieces.push_back({part.data, part.shape[0] * row * size_of(part.dtype)});
        engine.join(pieces, out.data);
        return;
    }
    uint16_t* to = out.as<uint16_t>();
    for (const Tensor& part : parts) {
        engine.round(part.as<const float>(), part.shape[0] * row, to);
        to += part.shape[0] * row;
    }
}

// out[index] += values, for each (index [U], values [U, ...]).
void add_rows(kt::Engine& engine, const std::vector<std::pair<py::tuple, py::tuple>>& part_args,
              const py::tuple& out_arg) {
    const Tensor out(out_arg);
    out.typed({"float32"});
    if (out.shape.empty()) throw py::value_error(out.name + ": has no rows");
    int64_t row = 1;
    for (size_t i = 1; i < out.shape.size(); ++i) row *= out.shape[i];
    std::vector<kt::AddedRows> parts;
    for (const auto& [index_arg, values_arg] : part_args) {
        const Tensor index(index_arg), values(values_arg);
        index.typed({"int64"}).shaped({-1});
        std::vector<int64_t> wanted = out.shape;
        wanted[0] = index.shape[0];
        values.typed({"float32"}).shaped(wanted);
        kt::AddedRows part{{}, values.as<const float>()};
        for (int64_t i = 0; i < index.shape[0]; ++i) part.rows.emplace_back(index.as<const int64_t>()[i], i);
        if (!std::is_sorted(part.rows.begin(), part.rows.end()))
            std::sort(part.rows.begin(), part.rows.end());
        int64_t before = -1;
        for (const auto& [at, from] : part.rows) {
            if (at <= before || at >= out.shape[0])
                throw py::value_error(
                    index.name + ": row " + std::to_string(at) +
                    (at >= 0 && at == before ? " is there twice" : " of " + std::to_string(out.shape[0])));
            before = at;
        }
        parts.push_back(std::move(part));
    }
    const py::gil_scoped_release released;
    engine.add_rows(parts, out.shape[0], row, out.as<float>());
}

// Sums of squares of stretches of float32 tensors.
std::vector<double> squares(kt::Engine& engine, const std::vector<py::tuple>& tensor_args) {
    std::vector<kt::Piece> pieces;
    for (const py::tuple& arg : tensor_args) {
        const Tensor tensor(arg);
        tensor.typed({"float32"});
        int64_t bytes = sizeof(float);
        for (const int64_t size : tensor.shape) bytes *= size;
        pieces.push_back({tensor.data, bytes});
    }
    const py::gil_scoped_release released;
    return engine.squares(pieces);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    m.doc() = "C++ engine of kt_ray.native; use the façade.";

    m.def(
        "isas",
        [] {
            std::vector<std::tuple<std::string, bool, std::string>> list;
            for (const kt::IsaStatus& s : kt::isa_statuses())
                list.emplace_back(s.name, s.available, s.reason);
            return list;
        },
        "(name, available, what is missing) of every instruction set of this build, slowest first.");
    m.def("product_rates", &kt::product_rates, py::call_guard<py::gil_scoped_release>(),
          "(name, FLOP/s of one core) of every available instruction set but reference, measured at the "
          "first call.");

    py::class_<kt::Saved>(m, "Saved", "What backward needs of one forward; opaque but for its size.")
        .def_property_readonly("bytes", &kt::Saved::bytes)
        .def_readonly("tokens", &kt::Saved::tokens)
        .def_readonly("slots", &kt::Saved::slots)
        .def("release", &kt::Saved::release, py::call_guard<py::gil_scoped_release>(),
             "Gives the memory back to the engine: at once, or when a running backward has read it.");

    py::class_<kt::Engine>(m, "Engine")
        .def(py::init<const std::string&, int, const std::vector<int>&, bool, double>(), py::arg("isa"),
             py::arg("threads"), py::arg("cpus"), py::arg("int8_products") = false,
             py::arg("tokens_per_row") = 0.0)
        .def("row_tokens", [](const kt::Engine& engine, const py::tuple& weights,
                              int64_t slots) { return engine.row_tokens(weights_from(weights), slots); })
        .def("forward", &forward)
        .def("backward", &backward)
        .def("join", &join)
        .def("add_rows", &add_rows)
        .def("squares", &squares)
        .def(
            "scatter_tasks",
            [](const kt::Engine& engine, int64_t hidden, int64_t inter, const std::vector<int64_t>& rows) {
                std::vector<std::tuple<int64_t, int64_t, int64_t>> list;
                for (const kt::ScatteredRows& task : engine.scattered_rows(hidden, inter, rows))
                    list.emplace_back(task.slab, task.run, task.rows);
                return list;
            },
            py::arg("hidden"), py::arg("inter"), py::arg("rows"),
            "(slab, run, rows) of the tasks that add to tokens, in the order they are taken, for experts "
            "with "
            "so many rows each.")
        .def("close", &kt::Engine::close, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("isa", &kt::Engine::isa)
        .def_property_readonly("threads", &kt::Engine::threads)
        .def_property_readonly("calls", &kt::Engine::calls)
        .def_property_readonly("busy_seconds", &kt::Engine::busy_seconds)
        .def_property_readonly("scratch_bytes", &kt::Engine::scratch_bytes);

    py::class_<kt::Turns>(m, "Turns", "Whose turn it is at a slab, by itself, for tests.")
        .def(py::init([](int64_t slabs) {
                 auto turns = std::make_unique<kt::Turns>();
                 turns->begin(slabs);
                 return turns;
             }),
             py::arg("slabs"))
        .def("wait", &kt::Turns::wait, py::call_guard<py::gil_scoped_release>())
        .def("done", &kt::Turns::done)
        .def("fail", &kt::Turns::fail);

    py::class_<kt::ThreadPool, kt::ThreadPool::Owner>(m, "ThreadPool",
                                                      "The engine's threads by themselves, for tests.")
        .def(py::init([](int threads, const std::vector<int>& cpus) {
                 return kt::ThreadPool::Owner(new kt::ThreadPool(threads, cpus));
             }),
             py::arg("threads"), py::arg("cpus"))
        .def(
            "run",
            [](kt::ThreadPool& pool, int64_t count, const std::function<void(int64_t, int)>& task,
               const std::vector<int64_t>& ends) {
                const py::gil_scoped_release released;
                pool.run(count, task, ends);
            },
            py::arg("count"), py::arg("task"), py::arg("ends") = std::vector<int64_t>())
        .def_property_readonly("threads", &kt::ThreadPool::threads)
        .def_property_readonly("busy_seconds", &kt::ThreadPool::busy_seconds);

    bind_event_loop(m);
}

// The whole engine without Python: cases made of bytes, on every instruction set of this CPU, forward and
// backward, against plain double precision (driver_reference.h).
//
//     engine_driver [--isas a,b] [--threads N] [--random N] [--seed S] [--verbose] [FILE or FOLDER]...
//
// replays files and generated cases; the first that fails is printed, its bytes in hexadecimal, and ends the
// program with status 1. Compiled with -fsanitize=fuzzer and -DKT_FUZZER it is a libFuzzer target.
//
// Of every case it is asked that results are within a bound on the roundings' variance, that two runs with
// other numbers of threads and other save modes give the same bits, that inputs stay as they are, that
// nothing is written around the outputs, and that values that are not finite are reported when looked for.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <stdexcept>

#include "cpu_features.h"
#include "driver_reference.h"

// A build may leave out the kernels of some instruction sets (compiling them takes its time): these stand in.
namespace kt {
#define DRIVER_ABSENT(isa, table)               \
    namespace isa {                             \
    [[gnu::weak]] extern const Kernels table{}; \
    }
DRIVER_ABSENT(reference, f32)
DRIVER_ABSENT(reference, bf16)
DRIVER_ABSENT(reference, int8)
#if defined(__x86_64__)
DRIVER_ABSENT(avx2, f32)
DRIVER_ABSENT(avx2, bf16)
DRIVER_ABSENT(avx2, int8)
DRIVER_ABSENT(avx512, f32)
DRIVER_ABSENT(avx512, bf16)
DRIVER_ABSENT(avx512, int8)
DRIVER_ABSENT(avx512_vnni, int8)
DRIVER_ABSENT(avx512_bf16, bf16)
DRIVER_ABSENT(amx, bf16)
DRIVER_ABSENT(amx, int8)
#endif
#undef DRIVER_ABSENT
}  // namespace kt

namespace driver {
namespace {

bool linked(const std::string& isa) {
#if defined(__x86_64__)
    if (isa == "avx2") return kt::avx2::f32.run != nullptr;
    const bool f32 = kt::avx512::f32.run != nullptr;  // of the two below, too
    if (isa == "avx512") return f32;
    if (isa == "avx512_bf16") return f32 && kt::avx512_bf16::bf16.run != nullptr;
    if (isa == "amx") return f32 && kt::amx::bf16.run != nullptr;
#endif
    return isa == "reference" && kt::reference::f32.run != nullptr;
}

// Of the error in units of its expected size: one element's, and the root mean square of a whole result.
constexpr double kElementLimit = 16, kNormLimit = 8;

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void require(bool holds, const std::string& what) {
    if (!holds) throw Failure(what);
}

// An output between two fences, filled with NaN: what is not written is seen.
class Output {
  public:
    explicit Output(int64_t size, float fill = std::numeric_limits<float>::quiet_NaN())
        : all_(size + 2 * kFence, kMark) {
        std::fill(data(), data() + size, fill);
    }
    float* data() { return all_.data() + kFence; }
    const float* data() const { return all_.data() + kFence; }
    int64_t size() const { return static_cast<int64_t>(all_.size()) - 2 * kFence; }
    bool fenced() const {
        for (int64_t i = 0; i < kFence; ++i)
            if (all_[i] != kMark || all_[all_.size() - 1 - i] != kMark) return false;
        return true;
    }
    bool operator==(const Output& other) const {
        return all_.size() == other.all_.size() &&
               std::memcmp(all_.data(), other.all_.data(), all_.size() * sizeof(float)) == 0;
    }

  private:
    static constexpr int64_t kFence = 64;
    static constexpr float kMark = -12345.5f;
    std::vector<float> all_;
};

struct Outputs {
    Output y, dx, dw;
    std::vector<Output> grads[6];

    explicit Outputs(const Case& c)
        : y(c.tokens * c.hidden), dx(c.tokens * c.hidden), dw(c.tokens * c.slots) {
        for (int m = 0; m < 6; ++m)
            for (const Adapter& a : c.adapters)
                grads[m].emplace_back(static_cast<int64_t>(a.matrix[m].size()), 0.0f);
    }
    // f(name, output, matrix or -1, adapter)
    template <class F>
    void each(const F& f) const {
        static const char* const names[] = {"gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b"};
        f("y", y, -1, 0);
        f("dx", dx, -1, 0);
        f("dw", dw, -1, 0);
        for (int m = 0; m < 6; ++m)
            for (size_t a = 0; a < grads[m].size(); ++a)
                f("gradient of " + std::to_string(a) + "." + names[m], grads[m][a], m, a);
    }
};

struct Worst {
    double element = 0, norm = 0;
};

void compare(const std::string& name, const Output& got, const std::vector<Value>& want, Worst& worst) {
    double errors = 0, variances = 0;
    for (size_t i = 0; i < want.size(); ++i) {
        const double error = got.data()[i] - want[i].v, sd = std::sqrt(want[i].var) + 1e-35;
        const std::string at = name + "[" + std::to_string(i) + "] = " + std::to_string(got.data()[i]) +
                               ", expected " + std::to_string(want[i].v);
        require(std::fabs(error) <= kElementLimit * sd,
                at + ", off by " + std::to_string(std::fabs(error) / sd) + " standard deviations");
        worst.element = std::max(worst.element, std::fabs(error) / sd);
        errors += error * error;
        variances += want[i].var + 1e-70;
    }
    if (want.empty()) return;
    const double norm = std::sqrt(errors / variances);
    worst.norm = std::max(worst.norm, norm);
    require(norm <= kNormLimit,
            name + ": root mean square error " + std::to_string(norm) + " of the expected");
}

class Driver {
  public:
    Driver() {
        for (const kt::IsaStatus& status : kt::isa_statuses())
            if (status.available && linked(status.name)) isas.push_back(status.name);
    }

    std::vector<std::string> isas;
    std::optional<int> threads;  // in place of what cases ask for
    std::map<std::string, Worst> worst;
    int64_t cases = 0;

    void run(const uint8_t* data, size_t size) {
        const Case c(data, size);
        if (!c.poisoned()) expected_ = Reference(c).compute();
        const uint64_t before = c.hash();
        for (const std::string& isa : isas) {
            try {
                run_on(isa, c);
                require(c.hash() == before, "inputs were written");
            } catch (const std::exception& error) {
                throw Failure(isa + ": " + error.what() + "\n  case: " + c.text());
            }
        }
        ++cases;
    }

  private:
    // Engines are kept between cases, so that what one leaves in their memory meets the next; some cases want
    // a new one.
    kt::Engine& engine(const std::string& isa, const Case& c, int n) {
        std::unique_ptr<kt::Engine>& kept = engines_[{isa, n}];
        if (!kept || (c.flags & kFreshEngine) != 0)
            kept = std::make_unique<kt::Engine>(isa, n, std::vector<int>());
        return *kept;
    }

    void run_on(const std::string& isa, const Case& c) {
        const int first = threads.value_or(c.threads), second = first % 3 + 1;
        // What keeps nothing may add in another order.
        const auto other = c.keep == kt::Keep::nothing ? kt::Keep::nothing
                           : c.keep == kt::Keep::input ? kt::Keep::all
                                                       : kt::Keep::input;
        if (c.poisoned() && (c.flags & kCheckFinite) != 0) {
            try {
                forward(engine(isa, c, first), c, Outputs(c));
            } catch (const std::invalid_argument&) {
                return;
            }
            throw Failure("a value that is not finite was not reported");
        }
        const Outputs one = whole(engine(isa, c, first), c, c.keep);
        const Outputs two = whole(engine(isa, c, second), c, other);
        if (c.poisoned()) return;
        const bool backward = c.keep != kt::Keep::nothing;
        one.each([&](const std::string& name, const Output& got, int m, size_t a) {
            require(got.fenced(), name + ": written beyond its end");
            if (name != "y" && !backward) return;
            const bool wanted = m < 0 || ((c.flags & kNoGrads) == 0 && c.adapters[a].wants_grads);
            const std::vector<Value>& want = m >= 0         ? expected_.grads[m][a]
                                             : name == "y"  ? expected_.y
                                             : name == "dx" ? expected_.dx
                                                            : expected_.dw;
            if (wanted)
                compare(name, got, want, worst[isa]);
            else
                compare(name, got, std::vector<Value>(want.size()), worst[isa]);
        });
        std::vector<const Output*> others;
        two.each([&](const std::string&, const Output& got, int, size_t) { others.push_back(&got); });
        size_t at = 0;
        one.each([&](const std::string& name, const Output& got, int, size_t) {
            const Output& again = *others[at++];
            require(again.fenced(), name + ": written beyond its end, second run");
            require(got == again || (name != "y" && !backward),
                    name + ": other bits with " + std::to_string(second) + " threads and another save mode");
        });
    }

    std::vector<kt::LoraView> views(const Case& c) const {
        std::vector<kt::LoraView> all;
        for (const Adapter& a : c.adapters) {
            const float* m[6];
            for (int i = 0; i < 6; ++i) m[i] = a.matrix[i].empty() ? nullptr : a.matrix[i].data();
            all.push_back({m[0], m[1], m[2], m[3], m[4], m[5], a.scale, a.rank});
        }
        return all;
    }

    std::unique_ptr<kt::Saved> forward(kt::Engine& engine, const Case& c, Outputs&& out) const {
        return forward(engine, c, c.keep, out);
    }
    std::unique_ptr<kt::Saved> forward(kt::Engine& engine, const Case& c, kt::Keep keep, Outputs& out) const {
        const int64_t* whose = c.default_adapter ? nullptr : c.adapter_of_token.data();
        const auto route = [&](const auto* ids) {
            return kt::make_routing(ids, c.weights.data(), whose, c.tokens, c.slots, c.experts,
                                    static_cast<int64_t>(c.adapters.size()));
        };
        const bool half = (c.flags & kXBf16) != 0;
        kt::ForwardInput input{half ? static_cast<const void*>(c.x16.data()) : c.x32.data(),
                               half,
                               c.tokens,
                               c.slots,
                               c.tokens,
                               c.flags & kIds32 ? route(c.ids32.data()) : route(c.ids64.data()),
                               c.dropout};
        if (c.dropout.p > 0) kt::hash_rows(input.routing, c.dropout, c.layer, c.expert_ids, c.keys.data());
        return engine.forward(c.engine_weights(), std::move(input), views(c), keep, out.y.data(),
                              (c.flags & kCheckFinite) != 0);
    }

    Outputs whole(kt::Engine& engine, const Case& c, kt::Keep keep) const {
        Outputs out(c);
        const int64_t calls = engine.calls();
        const std::unique_ptr<kt::Saved> saved = forward(engine, c, keep, out);
        require((saved == nullptr) == (keep == kt::Keep::nothing), "kept something else than asked for");
        if (saved == nullptr) return out;
        std::vector<kt::LoraGradView> grads;
        for (size_t a = 0; a < c.adapters.size() && (c.flags & kNoGrads) == 0; ++a) {
            float* m[6] = {};
            for (int i = 0; i < 6; ++i)
                if (c.adapters[a].wants_grads && out.grads[i][a].size() > 0) m[i] = out.grads[i][a].data();
            grads.push_back({m[0], m[1], m[2], m[3], m[4], m[5]});
        }
        engine.backward(c.engine_weights(), *saved, c.dy.data(), views(c), grads, out.dx.data(),
                        out.dw.data(), (c.flags & kCheckFinite) != 0);
        require(engine.calls() == calls + 2, "calls are miscounted");
        saved->release();
        return out;
    }

    std::map<std::pair<std::string, int>, std::unique_ptr<kt::Engine>> engines_;
    Results expected_;
};

}  // namespace
}  // namespace driver

#ifdef KT_FUZZER

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static auto* const driver = new driver::Driver();
    try {
        driver->run(data, size);
    } catch (const driver::Failure& failure) {
        std::fprintf(stderr, "%s\n", failure.what());
        std::abort();
    }
    return 0;
}

#else

int main(int argc, char** argv) {
    driver::Driver driver;
    std::vector<std::filesystem::path> files;
    int64_t random_cases = 0;
    uint64_t seed = 1;
    bool verbose = false;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        const auto value = [&]() -> std::string { return ++i < argc ? argv[i] : ""; };
        if (argument == "--random") {
            random_cases = std::stoll(value());
        } else if (argument == "--seed") {
            seed = std::stoull(value());
        } else if (argument == "--threads") {
            driver.threads = std::stoi(value());
        } else if (argument == "--verbose") {
            verbose = true;
        } else if (argument == "--isas") {
            driver.isas.clear();
            std::string names = value() + ",";
            for (size_t comma; (comma = names.find(',')) != std::string::npos; names.erase(0, comma + 1))
                driver.isas.push_back(names.substr(0, comma));
        } else if (std::filesystem::is_directory(argument)) {
            for (const auto& entry : std::filesystem::directory_iterator(argument)) files.push_back(entry);
        } else {
            files.emplace_back(argument);
        }
    }
    std::sort(files.begin(), files.end());

    const auto run = [&](const std::string& name, const std::vector<uint8_t>& bytes) {
        if (verbose)
            std::fprintf(stderr, "%s: %s\n", name.c_str(),
                         driver::Case(bytes.data(), bytes.size()).text().c_str());
        try {
            driver.run(bytes.data(), bytes.size());
        } catch (const driver::Failure& failure) {
            std::fprintf(stderr, "%s: %s\n  bytes: ", name.c_str(), failure.what());
            for (const uint8_t b : bytes) std::fprintf(stderr, "%02x", b);
            std::fprintf(stderr, "\n");
            std::exit(1);
        }
    };
    for (const auto& file : files) {
        std::ifstream in(file, std::ios::binary);
        if (!in) {
            std::fprintf(stderr, "%s: cannot be read\n", file.c_str());
            return 1;
        }
        run(file.filename(), std::vector<uint8_t>(std::istreambuf_iterator<char>(in), {}));
    }
    driver::Random random(seed);
    for (int64_t i = 0; i < random_cases; ++i) {
        std::vector<uint8_t> bytes(driver::kFields);
        for (uint8_t& b : bytes) b = static_cast<uint8_t>(random.bits());
        bytes[19] &= static_cast<uint8_t>(random.bits() & random.bits());  // flags: few at a time
        run("random case " + std::to_string(i) + " of seed " + std::to_string(seed), bytes);
    }
    std::printf("%ld cases ok", static_cast<long>(driver.cases));
    for (const std::string& isa : driver.isas)
        std::printf("; %s: errors up to %.1f per element, %.1f per result", isa.c_str(),
                    driver.worst[isa].element, driver.worst[isa].norm);
    std::printf("\n");
    return 0;
}

#endif

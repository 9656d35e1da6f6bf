#include "cpu_features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#endif

namespace kt {
namespace {

#if defined(__x86_64__)

struct CpuId {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuId cpuid(uint32_t leaf, uint32_t subleaf) {
    CpuId r;
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

// The register state the operating system saves on a context switch (XCR0).
uint64_t saved_state(const CpuId& leaf1) {
    const bool osxsave = leaf1.ecx >> 27 & 1;
    if (!osxsave) return 0;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

struct Requirement {
    bool present;
    const char* name;
};

// Empty when all are present, otherwise "no A, no B".
std::string missing(std::initializer_list<Requirement> requirements) {
    std::string text;
    for (const Requirement& r : requirements)
        if (!r.present) text += std::string(text.empty() ? "no " : ", no ") + r.name;
    return text;
}

bool is_one(const char* variable) {
    const char* value = std::getenv(variable);
    return value != nullptr && std::strcmp(value, "1") == 0;
}

// Emulating AMX (tests/native/amxemu) cannot change what CPUID and XGETBV say: with
// KT_RAY_TEST_ASSUME_AMX=1 these two, and these two alone, are not asked about AMX.
bool assume_amx() { return is_one("KT_RAY_TEST_ASSUME_AMX"); }

// Asks for the right to use tile data, which Linux grants to a whole process on request; empty when
// granted. Through libc's syscall(), where an emulator can answer.
std::string request_tile_data() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
    const int error = errno;
    return "AMX tile data not permitted by the operating system (arch_prctl: errno " + std::to_string(error) +
           ", " + std::strerror(error) + ")";
}

// What AMX lacks beyond AVX512_BF16.
std::string missing_amx(const CpuId& leaf7, uint64_t state) {
    if (assume_amx()) return request_tile_data();
    std::string text = missing({{bool(leaf7.edx >> 22 & 1), "AMX-BF16 in the CPU"},
                                {bool(leaf7.edx >> 24 & 1), "AMX-TILE in the CPU"},
                                {bool(leaf7.edx >> 25 & 1), "AMX-INT8 in the CPU"}});
    if (text.empty()) text = missing({{(state >> 17 & 3) == 3, "AMX tile state in the operating system"}});
    return text.empty() ? request_tile_data() : text;
}

#endif

std::vector<IsaStatus> detect() {
    std::vector<IsaStatus> result{{"reference", true, ""}};
#if defined(__x86_64__)
    const CpuId leaf1 = cpuid(1, 0), leaf7 = cpuid(7, 0), leaf7_1 = cpuid(7, 1);
    const uint64_t state = saved_state(leaf1);
    const Requirement ymm{(state & 0x6) == 0x6, "AVX register state in the operating system"};
    const Requirement zmm{(state & 0xe6) == 0xe6, "AVX-512 register state in the operating system"};

    const std::string avx2 = missing({{bool(leaf7.ebx >> 5 & 1), "AVX2 in the CPU"},
                                      {bool(leaf1.ecx >> 12 & 1), "FMA in the CPU"},
                                      {bool(leaf1.ecx >> 29 & 1), "F16C in the CPU"},
                                      ymm});
    std::string avx512 = missing({{bool(leaf7.ebx >> 16 & 1), "AVX512F in the CPU"},
                                  {bool(leaf7.ebx >> 17 & 1), "AVX512DQ in the CPU"},
                                  {bool(leaf7.ebx >> 30 & 1), "AVX512BW in the CPU"},
                                  {bool(leaf7.ebx >> 31 & 1), "AVX512VL in the CPU"},
                                  zmm});
    if (avx512.empty()) avx512 = avx2;
    std::string avx512_bf16 = avx512;
    if (avx512_bf16.empty())
        avx512_bf16 = missing({{bool(leaf7_1.eax >> 5 & 1), "AVX512_BF16 in the CPU"},
                               {bool(leaf7.ecx >> 1 & 1), "AVX512_VBMI in the CPU"},
                               {bool(leaf7.ecx >> 11 & 1), "AVX512_VNNI in the CPU"}});
    result.push_back({"avx2", avx2.empty(), avx2});
    result.push_back({"avx512", avx512.empty(), avx512});
    result.push_back({"avx512_bf16", avx512_bf16.empty(), avx512_bf16});
    const std::string amx = avx512_bf16.empty() ? missing_amx(leaf7, state) : avx512_bf16;
    result.push_back({"amx", amx.empty(), amx});
#endif
    return result;
}

}  // namespace

const std::vector<IsaStatus>& isa_statuses() {
    static const std::vector<IsaStatus> statuses = detect();
    return statuses;
}

bool has_avx512_vnni() {
#if defined(__x86_64__)
    return (cpuid(7, 0).ecx >> 11 & 1) != 0 && !is_one("KT_RAY_TEST_NO_VNNI");
#else
    return false;
#endif
}

}  // namespace kt

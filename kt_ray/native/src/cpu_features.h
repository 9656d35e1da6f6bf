// Which instruction sets this CPU and operating system support, and why not when they do not.
#pragma once

#include <string>
#include <vector>

namespace kt {

struct IsaStatus {
    std::string name;
    bool available;
    std::string reason;  // what is missing; empty when available
};

// Every instruction set the engine was built for, slowest first. `reference` is always available. The
// first call asks the operating system for the process's right to use AMX tiles, where there are any.
const std::vector<IsaStatus>& isa_statuses();

// What the avx512 instruction sets' int8 products are faster with. KT_RAY_TEST_NO_VNNI=1 hides it.
bool has_avx512_vnni();

}  // namespace kt

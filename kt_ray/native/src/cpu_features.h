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

// Every instruction set the engine was built for, slowest first. `reference` is always available.
const std::vector<IsaStatus>& isa_statuses();

}  // namespace kt

#pragma once

#include <stdint.h>
#include <ucontext.h>

#include "tiles.h"

// Whether an AMX instruction this emulator knows begins at `ip`.
int decode_is_amx(const uint8_t* ip);

// Executes the instruction at `ip` with the general registers `r` of the interrupted thread. Returns its
// length, kNotAmx, or the kIllegal or kBadConfig it ended with.
int decode_execute(struct tiles* s, const uint8_t* ip, const greg_t* r);

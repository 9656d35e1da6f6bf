// The tiles of one thread and what AMX instructions do to them, as the Intel SDM's pseudo-code says.
#pragma once

#include <stdint.h>

#include "amxemu.h"

enum { kTiles = 8, kMaxRows = 16, kRowBytes = 64 };

struct tiles {
    uint8_t palette;  // 0: not configured
    uint8_t start_row;
    uint16_t row_bytes[kTiles];
    uint8_t rows[kTiles];
    struct amxemu_counts counts;
    _Alignas(64) uint8_t data[kTiles][kMaxRows][kRowBytes];
};

// How an instruction ended, if not by its length.
enum { kNotAmx = 0, kIllegal = -1, kBadConfig = -2, kForbidden = -3 };  // -, #UD, #GP, #NM

// Only the owner adds, any thread reads: amxemu_counts().
static inline void tiles_count(uint64_t* counter, uint64_t n) {
    __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + n, __ATOMIC_RELAXED);
}

// Each returns 0, kIllegal or kBadConfig. Memory that is not there faults, as it would.
int tiles_load_config(struct tiles* s, const uint8_t* memory);
int tiles_store_config(struct tiles* s, uint8_t* memory);
int tiles_release(struct tiles* s);
int tiles_zero(struct tiles* s, int tile);
int tiles_load(struct tiles* s, int tile, uint64_t address, uint64_t stride);
int tiles_store(struct tiles* s, int tile, uint64_t address, uint64_t stride);

// sums += left x right. Tile numbers may exceed 7 (a prefix can encode up to 15): illegal.
int tiles_bf16_product(struct tiles* s, int sums, int left, int right);
int tiles_int8_product(struct tiles* s, int sums, int left, int right, int left_signed, int right_signed);

// What a test may ask the emulator. With LD_PRELOAD the functions are found at run time: declare them weak
// (AMXEMU_WEAK) where a program must also run without it.
#pragma once

#include <stdint.h>

#ifndef AMXEMU_WEAK
#define AMXEMU_WEAK
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Executed instructions by name, summed over threads; then what they moved and multiplied.
#define AMXEMU_COUNTERS(X)                                         \
    X(ldtilecfg)                                                   \
    X(sttilecfg)                                                   \
    X(tilerelease)                                                 \
    X(tilezero)                                                    \
    X(tileloadd) /* TILELOADDT1 included */                        \
    X(tilestored)                                                  \
    X(tdpbf16ps)                                                   \
    X(tdpbssd)                                                     \
    X(tdpb_other) /* TDPBSUD, TDPBUSD, TDPBUUD */                  \
    X(loaded_bytes)                                                \
    X(stored_bytes)                                                \
    X(product_rows) /* rows of the left tile, over all products */ \
    X(signals)

struct amxemu_counts {
#define AMXEMU_FIELD(name) uint64_t name;
    AMXEMU_COUNTERS(AMXEMU_FIELD)
#undef AMXEMU_FIELD
};

// Of all threads since the process began or was forked.
AMXEMU_WEAK void amxemu_counts(struct amxemu_counts* total);

// Threads that hold configured tiles, or ended with them; exact while none executes tile instructions.
AMXEMU_WEAK int amxemu_configured(void);

// Whether AMX instructions are emulated: false on a CPU that has them.
AMXEMU_WEAK int amxemu_active(void);

#ifdef __cplusplus
}
#endif

// The emulator's own test: what must fault, and with which signal. Each case runs in a child process. Prints
// a line per case; exits with the number of failures.
//   gcc -std=gnu11 -O2 -mamx-tile -mamx-bf16 -mamx-int8 -o negtest negtest.c && LD_PRELOAD=./libamxemu.so
//   ./negtest
#define _GNU_SOURCE
#include <errno.h>
#include <immintrin.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

struct config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64)));

static struct config whole(void) {
    struct config c = {.palette = 1};
    for (int t = 0; t < 8; t++) c.rows[t] = 16, c.row_bytes[t] = 64;
    return c;
}
static void load(const struct config* c) { __asm__ volatile("ldtilecfg %0" ::"m"(*c)); }
static struct config loaded(void) {
    struct config c;
    __asm__ volatile("sttilecfg %0" : "=m"(c));
    return c;
}
static long ask(void) { return syscall(SYS_arch_prctl, 0x1023, 18); }  // ARCH_REQ_XCOMP_PERM, tile data

static char memory[4096];
static struct config c;

static void unconfigured(void) { _tile_zero(0); }

static void bad_config(int palette, int reserved, int tile, int rows, int row_bytes) {
    c.palette = (uint8_t)palette;
    c.reserved[2] = (uint8_t)reserved;
    c.rows[tile] = (uint8_t)rows;
    c.row_bytes[tile] = (uint16_t)row_bytes;
    load(&c);
}
static void palette_2(void) { bad_config(2, 0, 3, 16, 64); }
static void reserved_set(void) { bad_config(1, 1, 3, 16, 64); }
static void rows_17(void) { bad_config(1, 0, 3, 17, 64); }
static void row_bytes_65(void) { bad_config(1, 0, 3, 16, 65); }
static void no_rows(void) { bad_config(1, 0, 3, 0, 64); }
static void tile_9(void) { bad_config(1, 0, 9, 16, 64); }

// A legal configuration but for one tile's shape, then a product that it does not allow.
static void shape(int tile, int rows, int row_bytes) {
    c.rows[tile] = (uint8_t)rows;
    c.row_bytes[tile] = (uint16_t)row_bytes;
    load(&c);
}
static void depths_differ(void) {
    shape(2, 8, 64);
    _tile_dpbf16ps(0, 1, 2);
}
static void columns_differ(void) {
    shape(0, 16, 32);
    _tile_dpbssd(0, 1, 2);
}
static void rows_differ(void) {
    shape(1, 8, 64);
    _tile_dpbf16ps(0, 1, 2);
}
static void half_a_lane(void) {
    shape(0, 16, 62);
    _tile_dpbf16ps(0, 1, 2);
}
static void unused_tile(void) {
    shape(5, 0, 0);
    _tile_stored(5, memory, 64);
}
static void same_tile(void) {
    load(&c);
    __asm__ volatile(".byte 0xc4,0xe2,0x6a,0x5c,0xc9");  // TDPBF16PS tmm1, tmm1, tmm2
}
static void fp16_product(void) {
    load(&c);
    __asm__ volatile(".byte 0xc4,0xe2,0x6b,0x5c,0xc1");  // TDPFP16PS tmm0, tmm1, tmm2
}
static void after_release(void) {
    load(&c);
    _tile_release();
    _tile_loadd(0, memory, 64);
}
static void start_row_16(void) {
    c.start_row = 16;
    load(&c);
    _tile_loadd(0, memory, 64);
}
static void bad_address(void) {
    load(&c);
    _tile_loadd(0, (void*)8, 64);
}

static void good(void) {
    c.rows[0] = 3;
    load(&c);
    _tile_loadd(0, memory, 64);
    _tile_stored(0, memory, 64);
    const struct config now = loaded();
    if (now.rows[0] != 3 || now.rows[1] != 16 || now.row_bytes[0] != 64) _exit(2);
    _tile_release();
    if (loaded().palette != 0) _exit(3);
}

// 64 products of two bytes 0xff, each -1 or 255.
static void signedness(void) {
    memset(memory, 0xff, sizeof memory);
    static int32_t sums[4][16][16];
    load(&c);
    _tile_loadd(4, memory, 64);
    _tile_loadd(5, memory, 64);
    _tile_dpbssd(0, 4, 5);
    _tile_dpbsud(1, 4, 5);
    _tile_dpbusd(2, 4, 5);
    _tile_dpbuud(3, 4, 5);
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    const int32_t expected[4] = {64, -64 * 255, -64 * 255, 64 * 255 * 255};
    for (int i = 0; i < 4; i++)
        if (sums[i][0][0] != expected[i] || sums[i][15][15] != expected[i]) _exit(2 + i);
}

// Another thread has tiles of its own, and a mask that blocks everything does not stop them.
static void* other_thread(void* unused) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    struct config mine = whole();
    mine.rows[0] = 5;
    load(&mine);
    _tile_zero(0);
    return loaded().rows[0] == 5 ? unused : NULL;
}
static void two_threads(void) {
    c.rows[0] = 3;
    load(&c);
    pthread_t thread;
    void* result;
    if (pthread_create(&thread, NULL, other_thread, &c) || pthread_join(thread, &result)) _exit(2);
    if (result != &c || loaded().rows[0] != 3) _exit(3);
    _tile_zero(0);
}

static void caught(int number) { _exit(number == SIGILL ? 0 : 2); }
static void own_handler(void) {
    signal(SIGILL, caught);
    load(&c);
    _tile_zero(0);  // none of the handler's business
    __asm__ volatile("ud2");
}

static const struct {
    const char* name;
    void (*run)(void);
    int asks, signal;
} cases[] = {
    {"good", good, 1, 0},
    {"signed and unsigned bytes", signedness, 1, 0},
    {"two threads", two_threads, 1, 0},
    {"the application's handler", own_handler, 1, 0},
    {"no permission asked for", unconfigured, 0, SIGILL},
    {"not configured", unconfigured, 1, SIGILL},
    {"palette 2", palette_2, 1, SIGSEGV},
    {"17 rows", rows_17, 1, SIGSEGV},
    {"65 bytes per row", row_bytes_65, 1, SIGSEGV},
    {"bytes without rows", no_rows, 1, SIGSEGV},
    {"a reserved byte", reserved_set, 1, SIGSEGV},
    {"a ninth tile", tile_9, 1, SIGSEGV},
    {"one tile twice", same_tile, 1, SIGILL},
    {"depths differ", depths_differ, 1, SIGILL},
    {"columns differ", columns_differ, 1, SIGILL},
    {"rows differ", rows_differ, 1, SIGILL},
    {"half a lane", half_a_lane, 1, SIGILL},
    {"after TILERELEASE", after_release, 1, SIGILL},
    {"a tile without rows", unused_tile, 1, SIGILL},
    {"TDPFP16PS", fp16_product, 1, SIGILL},
    {"start row beyond", start_row_16, 1, SIGILL},
    {"bad address", bad_address, 1, SIGSEGV},
};

int main(void) {
    const struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    int failures = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const pid_t child = fork();
        if (!child) {
            c = whole();
            if (cases[i].asks && ask()) _exit(100);
            cases[i].run();
            _exit(cases[i].signal ? 1 : 0);
        }
        int status;
        waitpid(child, &status, 0);
        const int got = WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
        const int wrong = got != cases[i].signal;
        printf("%s: %s (%d, want %d)\n", wrong ? "FAIL" : "ok", cases[i].name, got, cases[i].signal);
        failures += wrong;
    }
    return failures;
}

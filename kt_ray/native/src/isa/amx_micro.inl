// AMX micro-kernels: 2 x 2 tiles of sums, up to 32 rows times the 32 columns of a panel.
// Needs <immintrin.h>, Bf16 (generic/scalar.inl) and the flags -mamx-tile -mamx-bf16 -mamx-int8.
//
//                               panel: tmm6, columns 0..15   tmm7, columns 16..31
//   left: tmm4, rows 0..15        sums:  tmm0                  tmm1
//         tmm5, rows 16..31              tmm2                  tmm3
//
// Four loads feed four products: no other use of eight tiles needs fewer loads per product. Both
// operands' rows are 64 bytes in both types, so one configuration serves bfloat16 and int8.
//
// Rows are configured exactly: a tile of m rows loads, multiplies and stores m rows, so `tile` and the
// left operand need no padding, and a row's bits do not depend on how many others there are. Configuring
// takes about 200 cycles and clears every tile; it happens only when the count changes: at most twice per
// block of a panel's depth and expert, as all its row blocks but the last have 16 or 32 rows, which share a
// configuration.
//
// The tile configuration belongs to the thread, as registers do. A thread calls enter() before its
// first run() and leave() after its last one, with no other user of tiles in between; leave() returns
// the tiles to their initial state, so that the operating system need not save 8 KiB at each switch.
// The process must hold the permission to use tiles, which detection asks for (cpu_features.cpp).

constexpr int kTileRows = 16;
constexpr int64_t kLeftStride = 64;    // bytes between rows of the packed left operand
constexpr int64_t kPanelStride = 128;  // bytes between steps of a panel and between rows of sums
constexpr int64_t kPanelPiece = kTileRows * kPanelStride;

// What LDTILECFG reads. Palette 1: eight tiles of at most 16 rows x 64 bytes; everything else is zero.
struct alignas(64) TileConfig {
    uint8_t palette, start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

struct TileConfigs {
    TileConfig of_count[2 * kTileRows + 1];  // [0] is not used

    constexpr TileConfigs() : of_count{} {
        for (int count = 1; count <= 2 * kTileRows; ++count) {
            const int top = count < kTileRows ? count : kTileRows, bottom = count - top;
            const int rows[8] = {top, top, bottom, bottom, top, bottom, kTileRows, kTileRows};
            of_count[count].palette = 1;
            for (int t = 0; t < 8; ++t) {
                of_count[count].rows[t] = static_cast<uint8_t>(rows[t]);
                of_count[count].row_bytes[t] = rows[t] == 0 ? 0 : 64;  // an unused tile has neither
            }
        }
    }
};
constexpr TileConfigs kTileConfigs;

struct Tiles {
    // The row count this thread's tiles are configured for; 0: none.
    static thread_local int configured;

    static void configure(int count) {
        if (count == kTileRows) count = 2 * kTileRows;  // the same tiles, and more
        if (configured == count) return;
        // Not _tile_loadconfig: gcc 12 declares it to read 8 bytes of the 64.
        __asm__ volatile("ldtilecfg %0" : : "m"(kTileConfigs.of_count[count]));
        configured = count;
    }

    static void release() {
        _tile_release();
        configured = 0;
    }
};
thread_local int Tiles::configured = 0;

// The intrinsics take tile numbers as literal tokens, so each product has a name.
struct Bf16Products {
    using T = Bf16;
    using Sum = float;
    static void top_left() { _tile_dpbf16ps(0, 4, 6); }
    static void top_right() { _tile_dpbf16ps(1, 4, 7); }
    static void bottom_left() { _tile_dpbf16ps(2, 5, 6); }
    static void bottom_right() { _tile_dpbf16ps(3, 5, 7); }
};

struct Int8TileProducts {
    using T = int8_t;
    using Sum = int32_t;
    static void top_left() { _tile_dpbssd(0, 4, 6); }
    static void top_right() { _tile_dpbssd(1, 4, 7); }
    static void bottom_left() { _tile_dpbssd(2, 5, 6); }
    static void bottom_right() { _tile_dpbssd(3, 5, 7); }
};

template <class Products>
struct MicroTiles {
    using T = typename Products::T;
    using Rows = void;  // calls by rows take avx512_bf16's kernels
    using Sum = typename Products::Sum;
    static constexpr int64_t kPack = 4 / sizeof(T);  // consecutive elements of the contraction per lane
    static constexpr int64_t kK = 64 / sizeof(T);    // elements of one row's piece
    static constexpr int kMaxRows = 2 * kTileRows;
    // A panel's block is to stay in the L1 cache while all rows pass, the rows' block and the sums in the L2.
    static constexpr int64_t kPanelBytes = 32 * 1024, kSumPanels = 4;
    static constexpr bool kSpreads = false;     // of what decoding ahead fetches
    static constexpr int64_t kPanelsAhead = 4;  // decoded side by side along columns
    static constexpr int64_t kFarSlices = 2;    // that memory is asked for before its use, into the L2 cache
    static_assert(kPanelsAhead <= kSumPanels);
    static constexpr int kRowStep = kTileRows;  // blocks of rows are cut at multiples of this

    static void enter() { Tiles::configured = 0; }
    static void leave() { Tiles::release(); }
    // A product into sums that nobody reads. The tile unit sleeps when it has had none for 0.3 to 0.6 µs, and
    // takes 0.26 µs to wake up (docs/kernels.md): the end of a tile gives it one now and then. Not inside
    // run(), whose sums it would change; the tiles must be configured, as they are from the first run() on.
    static void keep_awake() { _tile_dpbssd(0, 4, 6); }

    // tile [count][32] (+)= left [blocks][count][kK] times panel [blocks * 16][2][16][kPack];
    // 1 <= count <= 32. A row's sums have the same bits for every count.
    // left and panel are best aligned to 64 bytes: then no row of a tile crosses a cache line.
    // job.step() is called once per block, between tile operations: its vector instructions run while
    // the tile unit works. It may write what later calls read, but none of this call's operands.
    template <class Job>
    static void run(int count, const T* left, int64_t blocks, const T* panel, Sum* tile, bool accumulate,
                    Job& job) {
        Tiles::configure(count);
        // gcc's tile loads do not say that they read memory: everything stored so far must be there.
        __asm__ volatile("" : : : "memory");
        const char* a = reinterpret_cast<const char*>(left);
        const char* b = reinterpret_cast<const char*>(panel);
        if (count > kTileRows) {
            two_by_two(a, count * kLeftStride, blocks, b, tile, accumulate, job);
        } else {
            one_by_two(a, count * kLeftStride, blocks, b, tile, accumulate, job);
        }
    }

  private:
    template <class Job>
    static void two_by_two(const char* a, int64_t piece, int64_t blocks, const char* b, Sum* tile,
                           bool accumulate, Job& job) {
        Sum* const bottom = tile + kTileRows * 32;
        if (accumulate) {
            _tile_loadd(0, tile, kPanelStride);
            _tile_loadd(1, tile + 16, kPanelStride);
            _tile_loadd(2, bottom, kPanelStride);
            _tile_loadd(3, bottom + 16, kPanelStride);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t i = 0; i < blocks; ++i, a += piece, b += kPanelPiece) {
            _tile_stream_loadd(4, a, kLeftStride);
            _tile_loadd(6, b, kPanelStride);
            Products::top_left();
            _tile_loadd(7, b + 64, kPanelStride);
            Products::top_right();
            job.step();
            _tile_stream_loadd(5, a + kTileRows * kLeftStride, kLeftStride);
            Products::bottom_left();
            Products::bottom_right();
        }
        _tile_stored(0, tile, kPanelStride);
        _tile_stored(1, tile + 16, kPanelStride);
        _tile_stored(2, bottom, kPanelStride);
        _tile_stored(3, bottom + 16, kPanelStride);
    }

    // Up to 16 rows. Alternating between two pairs of sums would hide more of a product's latency, but a
    // row's bits would then depend on the count; and such blocks wait for memory or decoding.
    template <class Job>
    static void one_by_two(const char* a, int64_t piece, int64_t blocks, const char* b, Sum* tile,
                           bool accumulate, Job& job) {
        if (accumulate) {
            _tile_loadd(0, tile, kPanelStride);
            _tile_loadd(1, tile + 16, kPanelStride);
        } else {
            _tile_zero(0);
            _tile_zero(1);
        }
        for (int64_t i = 0; i < blocks; ++i, a += piece, b += kPanelPiece) {
            _tile_stream_loadd(4, a, kLeftStride);
            _tile_loadd(6, b, kPanelStride);
            Products::top_left();
            job.step();
            _tile_loadd(7, b + 64, kPanelStride);
            Products::top_right();
        }
        _tile_stored(0, tile, kPanelStride);
        _tile_stored(1, tile + 16, kPanelStride);
    }
};

// bfloat16 x bfloat16 -> float32 (TDPBF16PS). Per block and sum: the products of even and of odd elements
// in two chains of fused multiply-adds from zero, added to each other, then to the sum; denormal inputs
// and results become zero.
struct MicroAmx : MicroTiles<Bf16Products> {};

// int8 x int8 -> int32 (TDPBSSD), exact up to 131,071 elements of contraction; the caller turns sums into
// float32 with the scales of row and column.
struct MicroAmxInt8 : MicroTiles<Int8TileProducts> {
    static constexpr int kRaised = 0;  // the panel's elements: signed as they are
};

// Shared by the AVX-512 instruction sets: 16 lanes, 14 rows of two vectors per tile, float32 compute.

constexpr int64_t kLanes = 16;
constexpr int kMaxRows = 14;

// Stores the transpose of 16 vectors of 16 dwords: row k of the result at to + k * step (in bytes).
inline void store_transposed(__m512i a[16], char* to, int64_t step) {
    __m512i b[16];
    for (int n = 0; n < 16; n += 2) {
        b[n] = _mm512_unpacklo_epi32(a[n], a[n + 1]);
        b[n + 1] = _mm512_unpackhi_epi32(a[n], a[n + 1]);
    }
    // a[4 q + k] holds, in each 128-bit lane L, dword 4 L + k of rows 4 q .. 4 q + 3.
    for (int q = 0; q < 16; q += 4)
        for (int half = 0; half < 2; ++half) {
            a[q + 2 * half] = _mm512_unpacklo_epi64(b[q + half], b[q + 2 + half]);
            a[q + 2 * half + 1] = _mm512_unpackhi_epi64(b[q + half], b[q + 2 + half]);
        }
    for (int k = 0; k < 4; ++k) {
        const __m512i even01 = _mm512_shuffle_i32x4(a[k], a[4 + k], 0x88);
        const __m512i odd01 = _mm512_shuffle_i32x4(a[k], a[4 + k], 0xdd);
        const __m512i even23 = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0x88);
        const __m512i odd23 = _mm512_shuffle_i32x4(a[8 + k], a[12 + k], 0xdd);
        _mm512_storeu_si512(to + k * step, _mm512_shuffle_i32x4(even01, even23, 0x88));
        _mm512_storeu_si512(to + (4 + k) * step, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
        _mm512_storeu_si512(to + (8 + k) * step, _mm512_shuffle_i32x4(even01, even23, 0xdd));
        _mm512_storeu_si512(to + (12 + k) * step, _mm512_shuffle_i32x4(odd01, odd23, 0xdd));
    }
}

inline __m512i load_widened(const float* p) { return _mm512_loadu_si512(p); }
inline __m512i load_widened(const Bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
}

// A square block of a matrix, transposed into a panel: panel[k * step + n] = w[n][k].
template <class S>
void block_from_rows(const S* w, int64_t ld, float* panel, int64_t step) {
    __m512i a[16];
    for (int n = 0; n < 16; ++n) a[n] = load_widened(w + n * ld);
    store_transposed(a, reinterpret_cast<char*>(panel), step * static_cast<int64_t>(sizeof(float)));
}

struct MicroF32 {
    using T = float;
    static constexpr int64_t kPack = 1;

    template <int N>
    static void tile(const float* const* rows, int64_t steps, const float* panel, float* tile,
                     bool accumulate, Prefetch::Stream next) {
        __m512 sum[N][2];
        const float* row[N];
        for (int i = 0; i < N; ++i) {
            row[i] = rows[i];
            sum[i][0] = accumulate ? _mm512_loadu_ps(tile + i * 32) : _mm512_setzero_ps();
            sum[i][1] = accumulate ? _mm512_loadu_ps(tile + i * 32 + 16) : _mm512_setzero_ps();
        }
        for (int64_t k = 0; k < steps; ++k) {
            _mm_prefetch(next.at + k * next.stride, _MM_HINT_T1);
            const __m512 b0 = _mm512_loadu_ps(panel + k * 32), b1 = _mm512_loadu_ps(panel + k * 32 + 16);
#pragma GCC unroll 16
            for (int i = 0; i < N; ++i) {
                const __m512 x = _mm512_set1_ps(row[i][k]);
                sum[i][0] = _mm512_fmadd_ps(x, b0, sum[i][0]);
                sum[i][1] = _mm512_fmadd_ps(x, b1, sum[i][1]);
            }
        }
        for (int i = 0; i < N; ++i) {
            _mm512_storeu_ps(tile + i * 32, sum[i][0]);
            _mm512_storeu_ps(tile + i * 32 + 16, sum[i][1]);
        }
    }

    // tile [count][2 * kLanes] (+)= rows [count][steps] times panel [steps][2 * kLanes].
    static void run(int count, const float* const* rows, int64_t steps, const float* panel, float* to,
                    bool accumulate, Prefetch::Stream next) {
        RowTable<MicroF32, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14>::tiles[count - 1](
            rows, steps, panel, to, accumulate, next);
    }
};

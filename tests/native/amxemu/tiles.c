#include "tiles.h"

#include <immintrin.h>
#include <string.h>

static void forget(struct tiles* s) {
    s->palette = s->start_row = 0;
    memset(s->row_bytes, 0, sizeof s->row_bytes);
    memset(s->rows, 0, sizeof s->rows);
    memset(s->data, 0, sizeof s->data);
}

static int all_zero(const uint8_t* bytes, int begin, int end) {
    for (int i = begin; i < end; i++)
        if (bytes[i]) return 0;
    return 1;
}

int tiles_load_config(struct tiles* s, const uint8_t* memory) {
    uint8_t c[64];  // palette, start row, 14 reserved, 16 x row bytes (16 bits), 16 x rows
    memcpy(c, memory, sizeof c);
    tiles_count(&s->counts.ldtilecfg, 1);
    if (c[0] > 1) return kBadConfig;
    if (c[0] == 0) {
        forget(s);
        return 0;
    }
    if (!all_zero(c, 2, 16) || !all_zero(c, 32, 48) || !all_zero(c, 56, 64)) return kBadConfig;
    uint16_t row_bytes[kTiles];
    memcpy(row_bytes, c + 16, sizeof row_bytes);
    for (int t = 0; t < kTiles; t++) {
        if (row_bytes[t] > kRowBytes || c[48 + t] > kMaxRows) return kBadConfig;
        if (!row_bytes[t] != !c[48 + t]) return kBadConfig;
    }
    forget(s);
    s->palette = 1;
    s->start_row = c[1];
    memcpy(s->row_bytes, row_bytes, sizeof row_bytes);
    memcpy(s->rows, c + 48, sizeof s->rows);
    return 0;
}

int tiles_store_config(struct tiles* s, uint8_t* memory) {
    uint8_t c[64] = {0};
    c[0] = s->palette;
    c[1] = s->start_row;
    memcpy(c + 16, s->row_bytes, sizeof s->row_bytes);
    memcpy(c + 48, s->rows, sizeof s->rows);
    memcpy(memory, c, sizeof c);
    tiles_count(&s->counts.sttilecfg, 1);
    return 0;
}

int tiles_release(struct tiles* s) {
    forget(s);
    tiles_count(&s->counts.tilerelease, 1);
    return 0;
}

static int usable(const struct tiles* s, int tile) {
    return tile < kTiles && s->palette && s->rows[tile] && s->row_bytes[tile];
}

int tiles_zero(struct tiles* s, int tile) {
    if (!usable(s, tile)) return kIllegal;
    memset(s->data[tile], 0, sizeof s->data[tile]);
    s->start_row = 0;
    tiles_count(&s->counts.tilezero, 1);
    return 0;
}

int tiles_load(struct tiles* s, int tile, uint64_t address, uint64_t stride) {
    if (!usable(s, tile) || s->start_row >= s->rows[tile]) return kIllegal;
    const int bytes = s->row_bytes[tile], rows = s->rows[tile];
    for (int r = s->start_row; r < rows; r++) {
        memcpy(s->data[tile][r], (const void*)(address + (uint64_t)r * stride), bytes);
        memset(s->data[tile][r] + bytes, 0, kRowBytes - bytes);
    }
    for (int r = rows; r < kMaxRows; r++) memset(s->data[tile][r], 0, kRowBytes);
    tiles_count(&s->counts.tileloadd, 1);
    tiles_count(&s->counts.loaded_bytes, (uint64_t)(rows - s->start_row) * bytes);
    s->start_row = 0;
    return 0;
}

int tiles_store(struct tiles* s, int tile, uint64_t address, uint64_t stride) {
    if (!usable(s, tile) || s->start_row >= s->rows[tile]) return kIllegal;
    const int bytes = s->row_bytes[tile], rows = s->rows[tile];
    for (int r = s->start_row; r < rows; r++)
        memcpy((void*)(address + (uint64_t)r * stride), s->data[tile][r], bytes);
    tiles_count(&s->counts.tilestored, 1);
    tiles_count(&s->counts.stored_bytes, (uint64_t)(rows - s->start_row) * bytes);
    s->start_row = 0;
    return 0;
}

// Three different, configured tiles of whole lanes whose shapes fit: sums [m][n], left [m][k], right [k][n].
static int multipliable(const struct tiles* s, int sums, int left, int right) {
    if (sums == left || sums == right || left == right) return 0;
    if (!usable(s, sums) || !usable(s, left) || !usable(s, right)) return 0;
    if (s->row_bytes[sums] % 4 || s->row_bytes[left] % 4 || s->row_bytes[right] % 4) return 0;
    return s->rows[sums] == s->rows[left] && s->row_bytes[sums] == s->row_bytes[right] &&
           s->row_bytes[left] / 4 == s->rows[right];
}

// Even and odd elements in two chains of fused multiply-adds from zero, their sum added to the old value.
// Not inlined: it computes under the MXCSR that its caller sets. In halves of eight columns, since a CPU that
// runs AVX-512 code through tests/native/avx512emu has AVX2 alone; what lies beyond the columns becomes zero.
__attribute__((target("avx2,fma"), noinline)) static void bf16_rows(struct tiles* s, int sums, int left,
                                                                    int right) {
    const int depth = s->row_bytes[left] / 4, columns = s->row_bytes[sums] / 4;
    const __m256i odd_half = _mm256_set1_epi32((int)0xffff0000u);
    for (int m = 0; m < s->rows[sums]; m++) {
        for (int half = 0; half < 2; half++) {
            __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
            for (int k = 0; k < depth; k++) {
                uint32_t pair;
                memcpy(&pair, &s->data[left][m][4 * k], 4);
                const __m256i x = _mm256_set1_epi32((int)pair);
                const __m256i y = _mm256_loadu_si256((const __m256i*)&s->data[right][k][32 * half]);
                even = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
                                       _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)), even);
                odd = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x, odd_half)),
                                      _mm256_castsi256_ps(_mm256_and_si256(y, odd_half)), odd);
            }
            float* sum = (float*)&s->data[sums][m][32 * half];
            _mm256_storeu_ps(sum, _mm256_add_ps(_mm256_loadu_ps(sum), _mm256_add_ps(even, odd)));
        }
        memset(&s->data[sums][m][4 * columns], 0, (size_t)(kRowBytes - 4 * columns));
    }
}

int tiles_bf16_product(struct tiles* s, int sums, int left, int right) {
    if (!multipliable(s, sums, left, right)) return kIllegal;
    const unsigned caller = _mm_getcsr();
    _mm_setcsr(0x9fc0);  // nearest even, denormals are zero in and out, no exceptions: whatever MXCSR says
    bf16_rows(s, sums, left, right);
    _mm_setcsr(caller);
    s->start_row = 0;
    tiles_count(&s->counts.tdpbf16ps, 1);
    tiles_count(&s->counts.product_rows, s->rows[sums]);
    return 0;
}

static int32_t widened(uint8_t byte, int is_signed) { return is_signed ? (int8_t)byte : byte; }

int tiles_int8_product(struct tiles* s, int sums, int left, int right, int left_signed, int right_signed) {
    if (!multipliable(s, sums, left, right)) return kIllegal;
    const int depth = s->row_bytes[left] / 4, columns = s->row_bytes[sums] / 4;
    for (int m = 0; m < s->rows[sums]; m++) {
        uint32_t sum[kRowBytes / 4];  // modulo 2^32
        memcpy(sum, s->data[sums][m], sizeof sum);
        for (int k = 0; k < depth; k++)
            for (int n = 0; n < columns; n++)
                for (int q = 0; q < 4; q++)
                    sum[n] += (uint32_t)(widened(s->data[left][m][4 * k + q], left_signed) *
                                         widened(s->data[right][k][4 * n + q], right_signed));
        memcpy(s->data[sums][m], sum, 4 * columns);
    }
    s->start_row = 0;
    tiles_count(left_signed && right_signed ? &s->counts.tdpbssd : &s->counts.tdpb_other, 1);
    tiles_count(&s->counts.product_rows, s->rows[sums]);
    return 0;
}

/* The GEMM of codes on CPUs that multiply bytes by bytes and add four such products at once (AVX-512 VNNI).
 *
 * Activations become whole numbers of 24 bits times a power of two that a piece of them shares, and these three digits:
 * d0 + 256 d1 + 65536 d2, each a signed byte. Sums of codes times digits are exact. What is rounded is an activation,
 * by no more than 2^-23 of the largest one of its piece, and the sum of a piece, to a float; those are added up as
 * floats. A code is never unpacked to a float, and one of 4 bits only to a byte.
 */

enum { DIGITS = 3, MAX_DIGIT_ROWS = 4 };

struct Piece {
    int8_t digits[DIGITS][PIECE];
    int32_t starts[4]; /* the initial value of each digit's sum; the fourth is unused */
    float scale, sum;  /* what integers are multiplied with, and the sum of the piece */
} __attribute__((aligned(64)));

INLINE int64_t pieces_of(const Matrix *w) { return w->num_ins / w->group * ((w->group + PIECE - 1) / PIECE); }

/* The sums of the integers of each of three vectors. */
INLINE __m128i add_across(const __m256i *v) {
    __m256i sums = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], _mm256_setzero_si256()));
    return _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}

/* Splits up to 32 floats into digits; digits past the last one are 0. `zero_point` is subtracted from codes: sums start
 * with what that makes, so that it costs nothing. */
INLINE void split(const float *x, int64_t count, int zero_point, Piece *to) {
    const uint32_t mask = count < PIECE ? (1u << count) - 1 : 0xFFFFFFFF;
    __m512 x_halves[2] = {_mm512_maskz_loadu_ps((__mmask16)mask, x),
                      _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), x + (count > 16 ? 16 : 0))};
    /* Bits of sizes are in the order of sizes. The largest fills 23 bits, or 22 where it would be more than three
     * signed digits hold; if it is no number, none of the sums is. */
    const __m512i size = _mm512_set1_epi32(0x7FFFFFFF), first = _mm512_and_si512((__m512i)x_halves[0], size);
    const int32_t max_bits =
        _mm512_reduce_max_epi32(_mm512_max_epi32(first, _mm512_and_si512((__m512i)x_halves[1], size)));
    const int32_t exponent_of_max = (int32_t)(((uint32_t)max_bits + 0x10101) >> 23),
                  exponent = exponent_of_max < 23 ? 23 : exponent_of_max;
    const __m512 up = (__m512)_mm512_set1_epi32((276 - exponent) << 23);
    const uint32_t down = max_bits < 0x7F800000 ? (uint32_t)(exponent - 22) << 23 : 0x7FC00000;
    memcpy(&to->scale, &down, sizeof down);
    for (int half = 0; half < 2; half++) {
        /* A digit that is moved by 128 is a byte of what is moved by 128 in every digit. */
        const __m512i by_128 = _mm512_set1_epi32(0x808080);
        __m512i digits_of = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x_halves[half], up)), by_128);
        digits_of = _mm512_xor_si512(digits_of, by_128);
        for (int d = 0; d < DIGITS; d++, digits_of = _mm512_srli_epi32(digits_of, 8))
            _mm_storeu_si128((__m128i *)(to->digits[d] + 16 * half), _mm512_cvtepi32_epi8(digits_of));
    }
    __m256i sums[DIGITS];
    for (int d = 0; d < DIGITS; d++)
        sums[d] = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1),
                                      _mm256_loadu_si256((const __m256i *)to->digits[d]));
    const __m128i all = add_across(sums);
    _mm_storeu_si128((__m128i *)to->starts, _mm_mullo_epi32(all, _mm_set1_epi32(-zero_point)));
    const int32_t sum = _mm_extract_epi32(all, 0) + 256 * _mm_extract_epi32(all, 1) + 65536 * _mm_extract_epi32(all, 2);
    to->sum = (float)sum * to->scale;
}

/* Splits rows of x into pieces. */
static void split_rows(const void *arg, int64_t first, int64_t last) {
    const GemmCall *job = arg;
    const int64_t size = job->w->num_ins, group = job->w->group;
    const int zero_point = job->w->type < U4 ? 128 : job->w->type == U4 ? 8 : 0;
    Piece *to = job->pieces + first * pieces_of(job->w);
    for (int64_t begin = first * size; begin < last * size; begin += group)
        for (int64_t i = 0; i < group; i += PIECE)
            split(job->x + begin + i, group - i < PIECE ? group - i : PIECE, zero_point, to++);
}

/* Adds codes times digits, four at a time. With the intrinsic, the compiler would copy the sums between registers. */
INLINE void add_products(__m512i *sum, __m512i codes, __m512i digits) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(codes), "v"(digits));
}

typedef struct {
    __m512i of[DIGITS][2 * MAX_DIGIT_ROWS];
} DigitSums;

/* Multiplies one unit of 16 · `panels` outputs with four activations of each row, from index `i` of their pieces on. */
INLINE void add_unit(int num_rows, int panels, const __m512i *codes, const Piece *x, int64_t stride_x, int64_t i,
                     DigitSums *sums) {
#pragma GCC unroll 4
    for (int m = 0; m < num_rows; m++)
#pragma GCC unroll 3
        for (int d = 0; d < DIGITS; d++) {
            int32_t four_digits;
            memcpy(&four_digits, x[m * stride_x].digits[d] + i, sizeof four_digits);
            const __m512i digits = _mm512_set1_epi32(four_digits);
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) add_products(&sums->of[d][m * panels + p], codes[p], digits);
        }
}

/* Multiplies `num_rows` rows with one piece of 16 · `panels` outputs, whose `units` units are at `codes`. */
INLINE void add_piece(int type, int num_rows, int panels, const uint8_t *codes, int64_t units, const Piece *x,
                      int64_t stride_x, const Factors_avx512 *factors_of, float *to) {
    DigitSums sums;
#pragma GCC unroll 24
    for (int i = 0; i < num_rows * panels * DIGITS; i++)
        sums.of[i % DIGITS][i / DIGITS] = _mm512_set1_epi32(x[i / DIGITS / panels * stride_x].starts[i % DIGITS]);
#pragma GCC unroll 1
    for (int64_t unit = 0; unit < units; unit++, codes += WIDTH * UNIT) {
        __m512i codes_of[4], high[4];
        const __m512i low_ends = _mm512_set1_epi8(15);
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            codes_of[p] = _mm512_loadu_si512(codes + p * 16 * UNIT);
            __asm__("" : "+v"(codes_of[p])); /* kept in a register: the compiler would load it again for each digit */
            if (type < U4) continue;
            high[p] = _mm512_and_si512(_mm512_srli_epi16(codes_of[p], 4), low_ends);
            codes_of[p] = _mm512_and_si512(codes_of[p], low_ends);
        }
        add_unit(num_rows, panels, codes_of, x, stride_x, unit * UNIT, &sums);
        if (type >= U4) add_unit(num_rows, panels, high, x, stride_x, (units + unit) * UNIT, &sums);
    }
#pragma GCC unroll 8
    for (int i = 0; i < num_rows * panels; i++) {
        const Piece *codes_of = x + i / panels * stride_x;
        float *at = to + i / panels * WIDTH + i % panels * 16;
        __m512 low = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sums.of[1][i], 8), sums.of[0][i]));
        __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums.of[2][i]), _mm512_set1_ps(65536.0f), low);
        sum = _mm512_mul_ps(sum, _mm512_set1_ps(codes_of->scale));
        sum = _mm512_fmadd_ps(sum, (__m512)factors_of[i % panels].scale, _mm512_loadu_ps(at));
        if (type == I8_OFFSET || type == U4_OFFSET)
            sum = _mm512_fmadd_ps((__m512)factors_of[i % panels].offset, _mm512_set1_ps(codes_of->sum), sum);
        _mm512_storeu_ps(at, sum);
    }
}

/* `num_rows` rows, whose pieces are `stride_x`, from `x` on against a block, by groups [first, last) of each of its
 * outputs. Codes are read in the order they lie in. */
INLINE void digit_tile(int type, int num_rows, int panels, const Matrix *w, int64_t block, int64_t first, int64_t last,
                       const Factors_avx512 *decoded, const Piece *x, int64_t stride_x, float *sums) {
    const int64_t padded = padded_group(w->group), codes_each = type < U4 ? UNIT : 2 * UNIT;
    const uint8_t *codes = w->codes + (block * units_per_output(w) + first * padded / codes_each) * WIDTH * UNIT;
    for (int64_t group_index = first; group_index < last; group_index++) {
        Factors_avx512 codes_of[4];
        const Factors_avx512 *factors_of = num_rows > 1 && decoded ? decoded + 4 * (group_index - first) : codes_of;
        for (int p = 0; p < 4 && factors_of == codes_of; p++)
            codes_of[p] = group_at_avx512(type, w, block, group_index, 16 * p);
        for (int64_t remaining = padded; remaining > 0; remaining -= PIECE, x++) {
            const int64_t units = (remaining < PIECE ? remaining : PIECE) / codes_each;
            for (int p = 0; p < 4; p += panels)
                add_piece(type, num_rows, panels, codes + p * 16 * UNIT, units, x, stride_x, factors_of + p,
                          sums + p * 16);
            codes += units * WIDTH * UNIT;
        }
    }
}

/* Computes blocks of 64 outputs: four rows at a time while there are as many, BLOCK_K inputs at a time. For many rows,
 * factors are decoded once. */
INLINE void digit_blocks(int type, const GemmCall *job, int64_t begin, int64_t end) {
    const Matrix *w = job->w;
    const int64_t num_rows = job->num_rows, stride_x = pieces_of(w);
    const int64_t groups = w->num_ins / w->group, groups_at_once = (BLOCK_K + w->group - 1) / w->group;
    float *sums = workspace(SUMS, num_rows * WIDTH);
    Factors_avx512 *factors_of =
        num_rows > FEW_ROWS ? (Factors_avx512 *)workspace(VALUES, groups_at_once * 4 * (int64_t)sizeof *factors_of / 4)
                            : 0;
    for (int64_t block = begin; block < end; block++) {
        memset(sums, 0, num_rows * WIDTH * sizeof(float));
        for (int64_t first = 0; first < groups; first += groups_at_once) {
            const int64_t last = first + groups_at_once < groups ? first + groups_at_once : groups;
            for (int64_t i = 0; factors_of && i < 4 * (last - first); i++)
                factors_of[i] = group_at_avx512(type, w, block, first + i / 4, i % 4 * 16);
            for (int64_t m = 0; m < num_rows; m += MAX_DIGIT_ROWS) {
                const Piece *x = job->pieces + m * stride_x + first * (stride_x / groups);
                switch (num_rows - m) {
#define TILE(R, P) digit_tile(type, R, P, w, block, first, last, factors_of, x, stride_x, sums + m * WIDTH)
                case 1: TILE(1, 4); break;
                case 2: TILE(2, 2); break;
                case 3: TILE(3, 2); break;
                default: TILE(4, 2);
#undef TILE
                }
            }
        }
        store_block_avx512(job, block, sums);
    }
}

#define OF_TYPE(TYPE)                                                                 \
    static void digit_blocks_##TYPE(const void *arg, int64_t begin, int64_t end) { \
        digit_blocks(TYPE, arg, begin, end);                                        \
    }
OF_TYPE(I8) OF_TYPE(I8_OFFSET) OF_TYPE(U4) OF_TYPE(U4_OFFSET)
#undef OF_TYPE

static int64_t bytes_of_pieces(const Matrix *w) { return pieces_of(w) * (int64_t)sizeof(Piece); }

static const Digits digits_vnni = {
    split_rows,
    {[I8] = digit_blocks_I8,
     [I8_OFFSET] = digit_blocks_I8_OFFSET,
     [U4] = digit_blocks_U4,
     [U4_OFFSET] = digit_blocks_U4_OFFSET},
    bytes_of_pieces,
};

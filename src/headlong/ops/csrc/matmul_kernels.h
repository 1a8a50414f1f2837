/* One version of the GEMM, for the instructions that are switched on where it is included; VERSION(name) tells the
 * versions apart. Vectors are as wide as registers are: compilers keep wider ones in memory. */
#if defined(__AVX512F__)
enum { VERSION(LANES) = 16 };
#elif defined(__AVX2__)
enum { VERSION(LANES) = 8 };
#else
enum { VERSION(LANES) = 4 };
#endif
#define LANES VERSION(LANES)
#define Floats VERSION(Floats)
#define Signed VERSION(Signed)
#define Unsigned VERSION(Unsigned)
#define Shorts VERSION(Shorts)
#define Bytes VERSION(Bytes)
#define Weights VERSION(Weights)
#define Factors VERSION(Factors)
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Signed __attribute__((vector_size(4 * LANES)));
typedef uint32_t Unsigned __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef struct {
    Floats first, second, third, fourth;
} Weights;
typedef struct {
    Floats scale, offset;
} Factors;

/* Registers hold the sums of a few rows: those of 64 outputs with 32 wide registers, fewer with 16 narrower ones. */
#if defined(__AVX512F__)
#define PANELS(num_rows) 4
#else
#define PANELS(num_rows) ((num_rows) == 1 ? 8 : (num_rows) == 2 ? 4 : (num_rows) < 5 ? 2 : 1)
#endif

/* The number of weights of an output that are decoded at a time. */
#define CODES_AT_ONCE(type) ((type) < I8 ? 2 : UNIT)

INLINE Floats VERSION(floats_at)(const void *at) {
    Floats x;
    memcpy(&x, at, sizeof x);
    return x;
}

INLINE Floats VERSION(of_f16)(const uint8_t *at) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at));
#else
    Shorts h;
    memcpy(&h, at, sizeof h);
    Unsigned wide = __builtin_convertvector(h, Unsigned);
    /* Scaling corrects the exponent's bias, for subnormal numbers too; the largest exponent is infinity or NaN. */
    Floats size = (Floats)((wide & 0x7FFF) << 13) * 0x1p112f;
    Unsigned infinity_bits = (Unsigned)((wide & 0x7C00) == 0x7C00) & 0x7F800000;
    return (Floats)((Unsigned)size | infinity_bits | (wide & 0x8000) << 16);
#endif
}

INLINE Floats VERSION(of_i8)(Bytes bytes) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#else
    /* By integers as wide as floats, unsigned with an offset of 128: compilers vectorise no shorter way. */
    return __builtin_convertvector(__builtin_convertvector(bytes ^ 0x80, Signed), Floats) - 128.0f;
#endif
}

/* Scales or offsets of group `group_index`, for LANES outputs of a block from `out` on. */
INLINE Floats VERSION(factors_at)(const Matrix *w, const uint8_t *from, const uint8_t *factors, int64_t block,
                                  int64_t group_index, int64_t out) {
    const int64_t groups = w->num_ins / w->group, at = (block * groups + group_index) * WIDTH + out;
    if (w->factors == FLOAT) return VERSION(floats_at)(from + 4 * at);
    if (w->factors == HALF) return VERSION(of_f16)(from + 2 * at);
    Bytes parts;
    memcpy(&parts, from + at, sizeof parts);
    return VERSION(of_f16)(factors + 2 * ((block * (groups / w->span) + group_index / w->span) * WIDTH + out)) *
           VERSION(of_i8)(parts);
}

INLINE Factors VERSION(group_at)(int type, const Matrix *w, int64_t block, int64_t group_index, int64_t out) {
    Factors result = {{0}, {0}};
    if (type < I8) return result;
    result.scale = VERSION(factors_at)(w, w->scales, w->scale_factors, block, group_index, out);
    if (type == U4) result.offset = result.scale * -8.0f;
    if (type == I8_OFFSET || type == U4_OFFSET)
        result.offset = VERSION(factors_at)(w, w->offsets, w->offset_factors, block, group_index, out);
    return result;
}

/* Exact, and without subnormal floats, which some CPUs are slow at: exponent 0 is computed one higher, minus that. */
INLINE Floats VERSION(of_e4m3)(Unsigned code) {
    Unsigned size = code & 0x7F, is_small = (Unsigned)(size < 8);
    Floats magnitude = (Floats)((size << 20) + (120 << 23) + (is_small & 1 << 23)) - (Floats)(is_small & 121 << 23);
    return (Floats)((Unsigned)magnitude | (code & 0x80) << 24);
}

/* The same way. */
INLINE Floats VERSION(of_e5m2)(Unsigned code) {
    Unsigned size = code & 0x7F, is_small = (Unsigned)(size < 4);
    Floats magnitude = (Floats)((size << 21) + (112 << 23) + (is_small & 1 << 23)) - (Floats)(is_small & 113 << 23);
    return (Floats)((Unsigned)magnitude | (code & 0x80) << 24);
}

INLINE Floats VERSION(of_table)(const float *table, Unsigned code) {
#if defined(__AVX512F__)
    return (Floats)_mm512_permutexvar_ps((__m512i)code, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)code);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)code);
    return (Floats)_mm256_blendv_ps(low, high, (__m256)(code << 28)); /* by the code's highest bit */
#else
    Floats found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = table[code[lane]];
    return found;
#endif
}

/* Code `i` of units, whose bytes are signed or floats, or nibbles in their low ends. */
INLINE Floats VERSION(of_code)(int type, const Matrix *w, Unsigned units, int i, Factors by) {
    if (type == E4M3) return VERSION(of_e4m3)(units >> 8 * i & 0xFF) * by.scale;
    if (type == E5M2) return VERSION(of_e5m2)(units >> 8 * i & 0xFF) * by.scale;
    if (type == U4_TABLE) return VERSION(of_table)(w->table, units >> 8 * i & 15) * by.scale;
    Signed code = type < U4 ? (Signed)(units << (24 - 8 * i)) >> 24 : (Signed)(units >> 8 * i & 15);
    Floats whole = __builtin_convertvector(code, Floats);
    return type == I8 ? whole * by.scale : whole * by.scale + by.offset;
}

/* Weights from k on of LANES outputs, whose first ones are at `codes`: STEP of them, from a unit's first on where they
 * are codes. `group_index` is that of their group. */
INLINE Weights VERSION(decode)(int type, const Matrix *w, const uint8_t *codes, int64_t k, int64_t group_index,
                               Factors by) {
    const Floats none = {0};
    const uint8_t *at = codes + (type == F32 ? 4 : 2) * k * WIDTH;
    if (type == F32) return (Weights){VERSION(floats_at)(at), VERSION(floats_at)(at + 4 * WIDTH), none, none};
    if (type == F16) return (Weights){VERSION(of_f16)(at), VERSION(of_f16)(at + 2 * WIDTH), none, none};
    Unsigned bits;
    if (type < I8) {
        memcpy(&bits, at, sizeof bits);
        return (Weights){(Floats)(bits << 16), (Floats)(bits & 0xFFFF0000), none, none};
    }
    const CodePosition place = code_position(type, w->group, group_index, k - group_index * w->group);
    memcpy(&bits, codes + place.unit * WIDTH * UNIT, sizeof bits);
    if (type == I8 || type == I8_OFFSET) bits ^= 0x80808080;
    if (type >= U4) bits >>= (uint32_t)place.shift;
    return (Weights){VERSION(of_code)(type, w, bits, 0, by), VERSION(of_code)(type, w, bits, 1, by),
                     VERSION(of_code)(type, w, bits, 2, by), VERSION(of_code)(type, w, bits, 3, by)};
}

/* `num_rows` rows of x against LANES · `panels` outputs of a block from `out` on, by weights [first, last) of each;
 * `codes` holds the block's weights from `origin` on. All but these limits is constant where it is called, so that sums
 * stay in registers. A sum runs over k in order, in a lane of its own: its bits depend on nothing beside it. */
INLINE void VERSION(tile)(int type, int num_rows, int panels, const GemmCall *job, int64_t block, const uint8_t *codes,
                          int64_t origin, int64_t out, int64_t first, int64_t last, int64_t m0, float *sums) {
    const int64_t size = job->w->num_ins, group = type < I8 ? size : job->w->group;
    Floats sum[MAX_ROWS * 4];
    Factors by[8];
    const int64_t stride_codes = LANES * (type == F16 ? 2 : 4);
    codes += out / LANES * stride_codes;
    for (int i = 0; i < num_rows * panels; i++)
        sum[i] = VERSION(floats_at)(sums + i / panels * WIDTH + i % panels * LANES);
    for (int64_t k = first; k < last;) {
        const int64_t group_index = k / group,
                      end = (group_index + 1) * group < last ? (group_index + 1) * group : last;
        for (int p = 0; p < panels; p++) by[p] = VERSION(group_at)(type, job->w, block, group_index, out + LANES * p);
        for (; k + 1 < end; k += CODES_AT_ONCE(type))
#pragma GCC unroll 8
            for (int p = 0; p < panels; p++) {
#if defined(__AVX512BF16__)
                if (type == BF16_ROUNDED) {
                    __m512bh two = (__m512bh)_mm512_loadu_ps(codes + p * stride_codes + 2 * (k - origin) * WIDTH);
#pragma GCC unroll 6
                    for (int m = 0; m < num_rows; m++)
                        sum[m * panels + p] = (Floats)_mm512_dpbf16_ps(
                            (__m512)sum[m * panels + p], two,
                            (__m512bh)_mm512_set1_epi32((int32_t)job->pairs[((m0 + m) * size + k) / 2]));
                    continue;
                }
#endif
                Weights weights =
                    VERSION(decode)(type, job->w, codes + p * stride_codes, k - origin, group_index, by[p]);
#pragma GCC unroll 6
                for (int m = 0; m < num_rows; m++) {
                    const float *x = job->x + (m0 + m) * size + k;
                    sum[m * panels + p] += x[0] * weights.first;
                    sum[m * panels + p] += x[1] * weights.second;
                    if (CODES_AT_ONCE(type) == 2 || end - k == 2) continue;
                    sum[m * panels + p] += x[2] * weights.third;
                    sum[m * panels + p] += x[3] * weights.fourth;
                }
            }
        if (k < end) /* the last of an odd number of inputs, which only floats have */
            for (int p = 0; p < panels && (type == F32 || type == F16); p++) {
                const uint8_t *at = codes + p * stride_codes + (type == F32 ? 4 : 2) * (k - origin) * WIDTH;
                Floats weight = type == F32 ? VERSION(floats_at)(at) : VERSION(of_f16)(at);
                for (int m = 0; m < num_rows; m++) sum[m * panels + p] += job->x[(m0 + m) * size + k] * weight;
            }
        k = end; /* the last unit may be half of one */
    }
    for (int i = 0; i < num_rows * panels; i++)
        memcpy(sums + i / panels * WIDTH + i % panels * LANES, &sum[i], sizeof sum[i]);
}

/* Multiplies up to MAX_ROWS rows from `m0` on with one block. */
INLINE void VERSION(row_block)(int type, int64_t num_rows, const GemmCall *job, int64_t block, const uint8_t *codes,
                               int64_t origin, int64_t first, int64_t last, int64_t m0, float *sums) {
    switch (num_rows) {
#define ROWS(R)                                                                                                   \
    case R:                                                                                                       \
        for (int64_t out = 0; out < WIDTH; out += LANES * PANELS(R))                                              \
            VERSION(tile)(type, R, PANELS(R), job, block, codes, origin, out, first, last, m0, sums + out);       \
        break;
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#undef ROWS
    }
}

/* Unpacks weights [first, last) of a block to floats. */
INLINE void VERSION(unpack)(int type, const Matrix *w, int64_t block, const uint8_t *codes, int64_t first, int64_t last,
                            float *to) {
    const int64_t group = type < I8 ? w->num_ins : w->group, stride_codes = LANES * (type == F16 ? 2 : 4);
    for (int64_t k = first; k < last;) {
        const int64_t group_index = k / group,
                      end = (group_index + 1) * group < last ? (group_index + 1) * group : last;
        Factors by[WIDTH / LANES];
        for (int p = 0; p < WIDTH / LANES; p++) by[p] = VERSION(group_at)(type, w, block, group_index, LANES * p);
        for (; k < end; k += CODES_AT_ONCE(type))
            for (int p = 0; p < WIDTH / LANES; p++) {
                Weights weights = VERSION(decode)(type, w, codes + p * stride_codes, k, group_index, by[p]);
                const int64_t count = end - k < CODES_AT_ONCE(type) ? end - k : CODES_AT_ONCE(type);
                for (int64_t i = 0; i < count; i++)
                    memcpy(to + (k + i - first) * WIDTH + LANES * p, &weights.first + i, sizeof weights.first);
            }
        k = end;
    }
}

/* Stores the sums of a block in y, with bias, and added to y if wanted. */
INLINE void VERSION(store_block)(const GemmCall *job, int64_t block, const float *sums) {
    const int64_t first = block * WIDTH, count = job->w->num_outs - first < WIDTH ? job->w->num_outs - first : WIDTH;
    const float *bias = job->w->bias;
    for (int64_t m = 0; m < job->num_rows; m++) {
        float *y = job->y + m * job->stride_y + first;
        for (int64_t n = 0; n < count; n++) {
            float result = bias ? sums[m * WIDTH + n] + bias[first + n] : sums[m * WIDTH + n];
            y[n] = job->add ? y[n] + result : result;
        }
    }
}

/* Computes blocks of 64 outputs: rows in parts of almost equal size, BLOCK_K inputs at a time. For many rows, weights
 * that are slow to decode are decoded once, to the same floats, so that bits do not change. */
INLINE void VERSION(blocks)(int type, const GemmCall *job, int64_t begin, int64_t end) {
    const int64_t size = job->w->num_ins, parts = (job->num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const int plain = type == F32 || (type == BF16_ROUNDED && job->pairs);
    const int unpacked = !plain && job->num_rows > FEW_ROWS && size % 2 == 0;
    const int64_t bytes = type == F32 ? 4 * size : type < I8 ? 2 * size : UNIT * units_per_output(job->w);
    /* Units are decoded whole, so no part ends inside one. */
    const int64_t depth = type >= I8 && job->w->group % UNIT ? size : BLOCK_K;
    float *sums = workspace(SUMS, job->num_rows * WIDTH), *values = unpacked ? workspace(VALUES, depth * WIDTH) : 0;
    for (int64_t block = begin; block < end; block++) {
        const uint8_t *codes = job->w->codes + block * bytes * WIDTH;
        memset(sums, 0, job->num_rows * WIDTH * sizeof(float));
        for (int64_t first = 0; first < size; first += depth) {
            const int64_t last = first + depth < size ? first + depth : size;
            if (unpacked) VERSION(unpack)(type, job->w, block, codes, first, last, values);
            for (int64_t i = 0; i < parts; i++) {
                const int64_t m = job->num_rows * i / parts, count = job->num_rows * (i + 1) / parts - m;
                const uint8_t *floats = (const uint8_t *)values;
                if (unpacked)
                    VERSION(row_block)(F32, count, job, block, floats, first, first, last, m, sums + m * WIDTH);
                else
                    VERSION(row_block)(type, count, job, block, codes, 0, first, last, m, sums + m * WIDTH);
            }
        }
        VERSION(store_block)(job, block, sums);
    }
}

#define OF_TYPE(TYPE)                                                                   \
    static void VERSION(blocks_##TYPE)(const void *arg, int64_t begin, int64_t end) { \
        VERSION(blocks)(TYPE, arg, begin, end);                                       \
    }
OF_TYPE(F32) OF_TYPE(F16) OF_TYPE(BF16) OF_TYPE(I8) OF_TYPE(I8_OFFSET) OF_TYPE(E4M3)
OF_TYPE(E5M2) OF_TYPE(U4) OF_TYPE(U4_OFFSET) OF_TYPE(U4_TABLE)
#if defined(__AVX512BF16__)
OF_TYPE(BF16_ROUNDED)
#define ROUNDED BF16_ROUNDED

/* Rounds rows of x to pairs of bfloat16. */
static void VERSION(round_rows)(const void *arg, int64_t first, int64_t last) {
    const GemmCall *job = arg;
    uint16_t *to = (uint16_t *)job->pairs;
    for (int64_t i = first * job->w->num_ins; i < last * job->w->num_ins; i++) {
        uint32_t bits;
        memcpy(&bits, &job->x[i], 4);
        uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        to[i] = (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
}
#else
#define ROUNDED BF16
#endif
#undef OF_TYPE

#define BLOCKS(TYPE) BLOCKS_OF(TYPE)
#define BLOCKS_OF(TYPE) VERSION(blocks_##TYPE)
static const Version VERSION(version) = {
    {VERSION(blocks_F32), VERSION(blocks_F16), VERSION(blocks_BF16), BLOCKS(ROUNDED), VERSION(blocks_I8),
     VERSION(blocks_I8_OFFSET), VERSION(blocks_E4M3), VERSION(blocks_E5M2), VERSION(blocks_U4),
     VERSION(blocks_U4_OFFSET), VERSION(blocks_U4_TABLE)},
#if defined(__AVX512BF16__)
    VERSION(round_rows),
#else
    0,
#endif
};

#undef LANES
#undef Floats
#undef Signed
#undef Unsigned
#undef Shorts
#undef Bytes
#undef Weights
#undef Factors
#undef PANELS
#undef CODES_AT_ONCE
#undef ROUNDED
#undef BLOCKS
#undef BLOCKS_OF

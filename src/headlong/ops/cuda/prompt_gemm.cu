// The GEMM of many tokens on Hopper: y = x Wᵀ, with the bits of Triton's GEMMs of few tokens.
//
// A few tokens' GEMM (ops/linear/triton_gemm.py) cuts each tile of 64 outputs along K into pieces, whose sums begin
// at 0 and are added in order. This kernel walks the pieces of a tile one after the other: the tensor cores add up
// one piece in registers, and where the piece ends it is added to the tile's total. The same instruction multiplies
// the same 16 columns at a time, so a token's sums have the same bits; it is tried before the kernel first serves.
//
// A block computes 128 outputs of BN tokens: a producer warp brings tiles of weights and tokens into a ring of
// STAGES shared-memory buffers (TMA, 128-byte swizzle), and two consumer warpgroups multiply, 64 outputs each
// (wgmma: outputs are rows, tokens are columns). Blocks are persistent and take tiles in an order in which those that
// run together share weights and tokens in the L2 cache.
//
// GATED: the first half of the outputs are gates of the second, and silu(gate) · up is stored. Each group of 16 rows
// is then 8 gates and their 8 ups, so that a thread holds both of them.
// CODES: weights are e4m3, two codes to a 16-bit word, one of each half of a step's 128 columns; they are unpacked
// into registers, which wgmma takes instead of shared memory. GROUPED: 128 columns share a factor.
// EXPERTS: a grouped GEMM (ops/moe): rows of tokens are sorted by expert, and a table on the device says which expert's
// weights a tile of them takes. Nothing is cut along K, as in ops/moe/triton_kernels.py.
//
// Compiled with -D for: BN, STAGES, GATED, CODES, GROUPED, EXPERTS, OUT_BITS (32 or 16).

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Shape {
    u32 num_tokens;
    u32 num_outs;          // of the result: with GATED half of the weight's
    u32 steps;             // steps of STEP_COLUMNS columns
    u32 steps_per_tile;    // as few tokens' GEMM counts them; a cut is where a split of it ends
    u32 steps_per_split;
    u32 token_tiles;
    u32 out_tiles;
    u32 scale_rows;        // outputs that share a factor
    u32 stride_scales;
    u32 stride_expert_scales;
};

struct Tile {  // rows of tokens, with EXPERTS from a table
    u32 expert, first, count;
};

constexpr u32 BM = 128;
constexpr u32 WARPS = 8;  // that consume
constexpr u32 COLUMNS = 64;                            // of a swizzled tile of 16-bit numbers: 128 bytes
constexpr u32 STEP_COLUMNS = CODES ? 128 : 64;
constexpr u32 WEIGHT_BYTES = 128 * BM;                 // 64 numbers of 16 bits, or 128 codes, for each output
constexpr u32 TOKEN_BYTES = 2 * STEP_COLUMNS * BN;
constexpr u32 STAGE_BYTES = WEIGHT_BYTES + TOKEN_BYTES;
constexpr u32 SUMS = BN / 2;                           // of a thread: 64 · BN over 128 threads
constexpr u32 RASTER = 12;                             // tiles of outputs that are taken together

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void load_2d(u32 to, const TensorMap* map, u64* barrier, u32 x, u32 y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        ::"r"(to), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y)
        : "memory");
}

__device__ __forceinline__ void load_5d(
    u32 to, const TensorMap* map, u64* barrier, u32 x, u32 y, u32 z, u32 v, u32 w) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(v), "r"(w)
        : "memory");
}

// A tile of 16-bit numbers whose rows are 128 bytes of columns, swizzled: 8 rows are 1,024 bytes.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// WGMMA: multiply(sums, weights, tokens), made by the host for BN columns.
@WGMMA@

__device__ __forceinline__ float silu_gated(float gate, float up) {
    // As Triton computes gate / (1 + exp(-gate)) · up.
    float power, quotient;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(__fsub_rn(0.0f, gate), 1.4426950408889634f)));
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(gate), "f"(__fadd_rn(power, 1.0f)));
    return __fmul_rn(quotient, up);
}

#if OUT_BITS == 16
__device__ __forceinline__ void store(void* out, u64 index, float value) {
    u16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    static_cast<u16*>(out)[index] = rounded;
}
#else
__device__ __forceinline__ void store(void* out, u64 index, float value) { static_cast<float*>(out)[index] = value; }
#endif

struct Place {
    Tile tile;
    u32 out_tile;
};

__device__ __forceinline__ Place place_of(u32 index, const Shape& shape, const Tile* tiles) {
    if (EXPERTS) return {tiles[index / shape.out_tiles], index % shape.out_tiles};
    u32 whole = RASTER * shape.token_tiles, group = index / whole, within = index % whole;
    u32 width = min(shape.out_tiles - group * RASTER, RASTER), first = within / width * BN;
    return {{0, first, min(shape.num_tokens - first, BN)}, group * RASTER + within % width};
}

// Where the next piece of a tile of 64 outputs begins after `step`, in steps of this kernel.
struct Cuts {
    u32 next, each;
    __device__ __forceinline__ Cuts(u32 tile, const Shape& shape) {
        u32 steps = shape.steps_per_split, shorter = CODES ? 1 : 2;
        next = shorter * (steps - static_cast<u32>(static_cast<u64>(tile) * shape.steps_per_tile % steps));
        each = shorter * steps;
    }
    __device__ __forceinline__ void advance(u32 step) {
        if (step == next) next += each;
    }
};

struct Ring {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

__device__ __forceinline__ void produce(
    const TensorMap* weights, const TensorMap* tokens, const Shape& shape, const Tile* tiles, u32 ring, u64* full,
    u64* empty) {
    Ring at;
    u32 num_tiles = shape.token_tiles * shape.out_tiles, tiles_of_64 = (1 + GATED) * shape.num_outs / 64;
    for (u32 index = blockIdx.x; index < num_tiles; index += gridDim.x) {
        Place place = place_of(index, shape, tiles);
        if (EXPERTS && place.tile.count == 0) continue;
        for (u32 step = 0; step < shape.steps; ++step, at.advance()) {
            u64* barrier = full + at.stage;
            barrier_wait(empty + at.stage, at.parity ^ 1);
            barrier_expect(barrier, STAGE_BYTES);
            u32 to = ring + at.stage * STAGE_BYTES;
            if (CODES) {  // [expert · tiles + tile][steps][64 outputs][64 words]
                u32 first = (GATED ? 1 : 2) * place.out_tile;
                u32 second = GATED ? first + tiles_of_64 / 2 : first + 1, skipped = place.tile.expert * tiles_of_64;
                load_2d(to, weights, barrier, 0, ((skipped + first) * shape.steps + step) * 64);
                load_2d(to + WEIGHT_BYTES / 2, weights, barrier, 0, ((skipped + second) * shape.steps + step) * 64);
            } else if (GATED) {  // [experts][groups of 8][gates, ups][8 outputs][columns]
                load_5d(to, weights, barrier, step * COLUMNS, 0, 0, place.out_tile * 8, place.tile.expert);
            } else {
                u32 first = place.tile.expert * shape.num_outs + place.out_tile * BM;
                load_2d(to, weights, barrier, step * COLUMNS, first);
            }
            for (u32 half = 0; half < STEP_COLUMNS / COLUMNS; ++half) {
                u32 column = step * STEP_COLUMNS + half * COLUMNS;
                load_2d(to + WEIGHT_BYTES + half * 128 * BN, tokens, barrier, column, place.tile.first);
            }
        }
    }
}

#if CODES
// Two e4m3 as bfloat16, from the low or the high bytes of two words; triton_unpack.py says how.
__device__ __forceinline__ u32 unpack_low(u32 words) {
    u32 sign = words << 8, rest = (words << 4) & 0x07f007f0u, out;
    rest = (sign & 0x80008000u) | rest;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(rest), "r"(0x7b807b80u), "r"(0x80008000u));
    return out;
}
__device__ __forceinline__ u32 unpack_high(u32 words) {
    u32 rest = (words >> 4) & 0x07f007f0u, out;
    rest = (words & 0x80008000u) | rest;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(rest), "r"(0x7b807b80u), "r"(0x80008000u));
    return out;
}
__device__ __forceinline__ u32 load_words(u32 address) {
    u32 words;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words) : "r"(address));
    return words;
}
#endif

// Adds a piece of one of a thread's two rows, times the row's factor, to the total, and begins the next one. What is
// not cut is one piece, and no total is needed.
template <u32 ROW>
__device__ __forceinline__ void flush(float (&sums)[SUMS], float (&totals)[SUMS], float factor) {
#pragma unroll
    for (u32 i = 2 * ROW; i < SUMS; i += 4) {
#pragma unroll
        for (u32 j = i; j < i + 2; ++j) {
            float piece = __fmul_rn(sums[j], factor);
            if (EXPERTS) {
                sums[j] = piece;
            } else {
                totals[j] = __fadd_rn(totals[j], piece), sums[j] = 0.0f;
            }
        }
    }
}

// Which outputs a thread's two rows of sums are, of the weight, and where the rows are in a stage; and their factors.
struct Rows {
    u32 group, warp, lane, first_out, second_out;
    const float *first_scales, *second_scales;
    u32 stride_scales;
    __device__ __forceinline__ Rows(const Place& place, const Shape& shape, const float* scales) {
        group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        if (GATED) {
            first_out = place.out_tile * 64 + group * 32 + warp * 8 + lane / 4;
            second_out = first_out + shape.num_outs;
        } else {
            first_out = place.out_tile * BM + group * 64 + warp * 16 + lane / 4;
            second_out = first_out + 8;
        }
        if (GROUPED) {
            u32 last = (1 + GATED) * shape.num_outs - 1, first = min(first_out, last), second = min(second_out, last);
            const float* own = scales + static_cast<u64>(place.tile.expert) * shape.stride_expert_scales;
            bool shared = shape.scale_rows > 1;
            first_scales = own + (shared ? first / shape.scale_rows * shape.stride_scales : first);
            second_scales = own + (shared ? second / shape.scale_rows * shape.stride_scales : second);
            stride_scales = shared ? 1 : shape.stride_scales;
        }
    }
};

#if CODES
// The warpgroups multiply by turns: while one of them waits for its products, the other unpacks. By themselves they
// would do the same at the same time.
__device__ __forceinline__ void wait_for_turn(u32 group) {
    asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}
__device__ __forceinline__ void pass_turn(u32 group) {
    asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
}

// Multiplies the steps from `step` on until `end`.
template <typename Parts>
__device__ __forceinline__ void multiply_steps(
    float (&sums)[SUMS], Parts& parts, u32 step, u32 end, const Rows& rows, u32 ring, Ring& at, u64* full, u64* empty) {
    for (; step < end; ++step, at.advance()) {
        barrier_wait(full + at.stage, at.parity);
        u32 from = ring + at.stage * STAGE_BYTES;
        u32 row = (GATED ? rows.group * 32 + rows.warp * 8 : rows.warp * 16) + rows.lane / 4;
        u32 first_row = from + (GATED ? 0 : rows.group * (WEIGHT_BYTES / 2)) + row * 128;
        u32 second_row = first_row + (GATED ? WEIGHT_BYTES / 2 : 8 * 128);
        u32 words[4][4], numbers[8][4];
#pragma unroll
        for (u32 k = 0; k < 4; ++k) {  // 16 columns of each half: 32 bytes of words, swizzled
            u32 low = ((2 * k) ^ (row & 7)) * 16 + rows.lane % 4 * 4;
            u32 high = ((2 * k + 1) ^ (row & 7)) * 16 + rows.lane % 4 * 4;
            words[k][0] = load_words(first_row + low), words[k][1] = load_words(second_row + low);
            words[k][2] = load_words(first_row + high), words[k][3] = load_words(second_row + high);
        }
#pragma unroll
        for (u32 k = 0; k < 4; ++k)
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                numbers[k][i] = unpack_low(words[k][i]), numbers[4 + k][i] = unpack_high(words[k][i]);
        u64 tokens = descriptor(from + WEIGHT_BYTES);
        wait_for_turn(rows.group);
        wgmma_begin();
#pragma unroll
        for (u32 k = 0; k < 8; ++k)
            multiply(parts, numbers[k], tokens + k % 4 * 2 + k / 4 * (128 * BN / 16), GROUPED ? k > 0 : 1);
        wgmma_commit();
        float first_scale = 1.0f, second_scale = 1.0f;
        if (GROUPED) {
            first_scale = rows.first_scales[static_cast<u64>(step) * rows.stride_scales];
            second_scale = rows.second_scales[static_cast<u64>(step) * rows.stride_scales];
        }
        wgmma_wait<0>();
        pass_turn(rows.group);
        if (rows.lane == 0) barrier_arrive(empty + at.stage);
        if (GROUPED) {
#pragma unroll
            for (u32 i = 0; i < SUMS; ++i)
                sums[i] = __fmaf_rn(i % 4 < 2 ? first_scale : second_scale, parts[i], sums[i]);
        }
    }
}
#else
__device__ __forceinline__ void multiply_steps(
    float (&sums)[SUMS], float (&)[SUMS], u32 step, u32 end, const Rows& rows, u32 ring, Ring& at, u64* full,
    u64* empty) {
    u32 before = STAGES;  // the stage that the step before has read
    for (; step < end; ++step, at.advance()) {
        barrier_wait(full + at.stage, at.parity);
        u32 from = ring + at.stage * STAGE_BYTES;
        u64 outs = descriptor(from + rows.group * (WEIGHT_BYTES / 2)), tokens = descriptor(from + WEIGHT_BYTES);
        wgmma_begin();
#pragma unroll
        for (u32 k = 0; k < 4; ++k) multiply(sums, outs + k * 2, tokens + k * 2, 1);
        wgmma_commit();
        wgmma_wait<1>();
        if (before < STAGES && rows.lane == 0) barrier_arrive(empty + before);
        before = at.stage;
    }
    wgmma_wait<0>();
    if (rows.lane == 0) barrier_arrive(empty + before);
}
#endif

__device__ __forceinline__ void store_tile(
    float (&totals)[SUMS], const Place& place, const Rows& rows, const Shape& shape, const float* inverse_norms,
    const u32* out_rows, void* out) {
    bool has_first = rows.first_out < shape.num_outs, has_second = rows.second_out < shape.num_outs;
#pragma unroll
    for (u32 i = 0; i < SUMS; i += 4) {
#pragma unroll
        for (u32 j = 0; j < 2; ++j) {
            u32 column = i * 2 + rows.lane % 4 * 2 + j, token = place.tile.first + column;
            if (column >= place.tile.count) continue;
            u32 out_row = EXPERTS && out_rows != nullptr ? out_rows[token] : token;
            u64 row = static_cast<u64>(out_row) * shape.num_outs;
            float first = totals[i + j], second = totals[i + 2 + j];
            if (GATED) {
                float inverse = inverse_norms == nullptr ? 1.0f : inverse_norms[token];
                float value = silu_gated(__fmul_rn(first, inverse), __fmul_rn(second, inverse));
                if (has_first) store(out, row + rows.first_out, value);
            } else {
                if (has_first) store(out, row + rows.first_out, first);
                if (has_second) store(out, row + rows.second_out, second);
            }
        }
    }
}

__device__ __forceinline__ void consume(
    const Shape& shape, const Tile* tiles, const float* scales, const float* row_scales, const float* inverse_norms,
    const u32* out_rows, void* out, u32 ring, u64* full, u64* empty) {
    u32 num_tiles = shape.token_tiles * shape.out_tiles, weight_outs = (1 + GATED) * shape.num_outs;
    Ring at;
    float sums[SUMS];
#if GROUPED
    float parts[SUMS];
#else
    float(&parts)[SUMS] = sums;
#endif
#if EXPERTS
    float(&totals)[SUMS] = sums;
#else
    float totals[SUMS];
#endif
#if CODES
    u32 group = threadIdx.x / 128;
    if (group == 1) pass_turn(group);  // the first turn is the other's
#endif
    for (u32 index = blockIdx.x; index < num_tiles; index += gridDim.x) {
        Place place = place_of(index, shape, tiles);
        if (EXPERTS && place.tile.count == 0) continue;
        Rows rows(place, shape, scales);
        float first_factor = 1.0f, second_factor = 1.0f;
        if (row_scales != nullptr) {
            const float* own = row_scales + static_cast<u64>(place.tile.expert) * weight_outs;
            first_factor = own[min(rows.first_out, weight_outs - 1)];
            second_factor = own[min(rows.second_out, weight_outs - 1)];
        }
#pragma unroll
        for (u32 i = 0; i < SUMS; ++i) totals[i] = 0.0f, sums[i] = 0.0f;
#if EXPERTS
        multiply_steps(sums, parts, 0, shape.steps, rows, ring, at, full, empty);
        flush<0>(sums, totals, first_factor), flush<1>(sums, totals, second_factor);
#else
        Cuts first_cuts(rows.first_out / 64, shape), second_cuts(rows.second_out / 64, shape);
        u32 step = 0;
        while (step < shape.steps) {
            u32 end = min(min(first_cuts.next, second_cuts.next), shape.steps);
            multiply_steps(sums, parts, step, end, rows, ring, at, full, empty);
            step = end;
            bool last = step == shape.steps;
            if (last || step == first_cuts.next) flush<0>(sums, totals, first_factor);
            if (last || step == second_cuts.next) flush<1>(sums, totals, second_factor);
            first_cuts.advance(step), second_cuts.advance(step);
        }
#endif
        store_tile(totals, place, rows, shape, inverse_norms, out_rows, out);
    }
#if CODES
    if (group == 0) wait_for_turn(group);  // which nobody uses any more
#endif
}

extern "C" __global__ void __launch_bounds__(384, 1) prompt_gemm(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap tokens,
    const __grid_constant__ Shape shape, const Tile* tiles, const float* scales, const float* row_scales,
    const float* inverse_norms, const u32* out_rows, void* out) {
    extern __shared__ char memory[];
    __shared__ alignas(8) u64 full[STAGES];
    __shared__ alignas(8) u64 empty[STAGES];
    u32 ring = (shared_address(memory) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; ++stage) barrier_init(full + stage, 1), barrier_init(empty + stage, WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 256) produce(&weights, &tokens, shape, tiles, ring, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        consume(shape, tiles, scales, row_scales, inverse_norms, out_rows, out, ring, full, empty);
    }
}

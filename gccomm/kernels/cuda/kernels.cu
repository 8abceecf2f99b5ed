// The kernels: a thread block of 128 does one block of 1024 coordinates at a time, all thread blocks together
// those from lo to hi. What they compute is specified by gccomm.kernels.reference; arguments are those of
// gccomm.kernels but for arrays of one entry a block, which begin with that of block lo.
#include "chunks.cuh"
#include "decode.cuh"
#include "encode.cuh"
#include "guard.cuh"
#include "headroom.cuh"
#include "integers.cuh"
#include "plain.cuh"
#include "renew.cuh"

using namespace gccomm::GCCOMM_LEVEL;

#define KERNEL extern "C" __global__ void __launch_bounds__(128)

KERNEL gccomm_maxima(const Segment* table, i64 segments, i64 lo, i64 hi, u32* out, u32* energy,
                     i32 rotations) {
    __shared__ Team team;
    maxima(team, {table, segments, lo, hi}, {out, energy, rotations});
}

KERNEL gccomm_nonfinite(const Segment* table, i64 segments, i64 lo, i64 hi, u32* flag) {
    __shared__ Team team;
    nonfinite(team, {table, segments, lo, hi}, flag);
}

KERNEL gccomm_encode(const Segment* table, i64 segments, i64 lo, i64 hi, const u32* scales, u32* words,
                     i64 base, i32 width, i32 limit, u32 shift, u32* check, i32 clamp, const float* ratios,
                     i32 rotations, u32* maxima, i32 subtract, const i32* grid, const float* gains) {
    __shared__ Team team;
    const Batch batch{table, segments, lo, hi};
    const EncodeArgs args{scales, words,  base,      width,  limit,         shift, check,
                          clamp,  ratios, rotations, maxima, subtract != 0, grid,  gains};
    Encoder(team, batch, args).run();
}

KERNEL gccomm_decode(const Segment* table, i64 segments, i64 lo, i64 hi, const u32* scales, const u32* words,
                     i64 base, i32 width, i32 limit, i64 n, i32 subtract, i32 mean, u32* check, u32* energy,
                     const float* ratios, i32 rotations, i32 offset, i64 dithers) {
    __shared__ Team team;
    const Batch batch{table, segments, lo, hi};
    const DecodeArgs args{scales,    words, base,   width,  limit,     n,      subtract != 0,
                          mean != 0, check, energy, ratios, rotations, offset, dithers};
    Decoder(team, batch, args).run();
}

KERNEL gccomm_exact_encode(const Segment* table, i64 segments, i64 lo, i64 hi, const u32* scales, u32* words,
                           i64 base, i64 n) {
    exact_encode({table, segments, lo, hi}, {scales, words, base, n, false});
}

KERNEL gccomm_exact_decode(const Segment* table, i64 segments, i64 lo, i64 hi, const u32* scales, u32* words,
                           i64 base, i64 n, i32 mean) {
    exact_decode({table, segments, lo, hi}, {scales, words, base, n, mean != 0});
}

KERNEL gccomm_int_range(const Segment* table, i64 segments, i64 lo, i64 hi, u32* out) {
    __shared__ Team team;
    int_range(team, {table, segments, lo, hi}, out);
}

KERNEL gccomm_int_encode(const Segment* table, i64 segments, i64 lo, i64 hi, u32* words, i64 base) {
    __shared__ Team team;
    int_encode(team, {table, segments, lo, hi}, {words, base, nullptr});
}

KERNEL gccomm_int_decode(const Segment* table, i64 segments, i64 lo, i64 hi, u32* words, i64 base,
                         u32* lost) {
    __shared__ Team team;
    int_decode(team, {table, segments, lo, hi}, {words, base, lost});
}

KERNEL gccomm_guard(const u32* got, const u32* expected, i32 count, volatile u32* flags, u32 bit, u16* spoilt,
                    i64 halves) {
    __shared__ Team team;
    guard(team, {got, expected, count}, flags, bit, spoilt, halves);
}

KERNEL gccomm_renew(Segment* table, i64 segments, u32* counter, u32 tick) {
    renew(table, segments, counter, tick);
}

KERNEL gccomm_share(const Segment* table, i64 segments, i64 blocks, const u32* own, const u32* energy,
                    const u32* scales, double factor, double most, u32* out) {
    share({table, segments, 0, blocks}, {own, energy, scales, factor, most, out});
}

KERNEL gccomm_steps(const Segment* table, i64 segments, i64 blocks, const u32* scales, const u32* energies,
                    const double* ratios, double unit, double deviations, double bracket, double safe,
                    double least, float* out) {
    steps({table, segments, 0, blocks},
          {scales, energies, ratios, unit, deviations, bracket, safe, least, out});
}

KERNEL gccomm_span_checks(const u32* check, const i64* starts, i64 spans, i64 blocks, const u32* expected,
                          u32* out) {
    span_checks({check, starts, spans, blocks, expected, out});
}

KERNEL gccomm_float_encode(const Segment* table, i64 segments, i64 lo, i64 hi, void* buffer, i64 base,
                           i32 wire) {
    float_encode({table, segments, lo, hi}, {buffer, base, static_cast<DType>(wire), 1, false});
}

KERNEL gccomm_float_decode(const Segment* table, i64 segments, i64 lo, i64 hi, void* buffer, i64 base,
                           i32 wire, i64 n, i32 mean) {
    float_decode({table, segments, lo, hi}, {buffer, base, static_cast<DType>(wire), n, mean != 0});
}

KERNEL gccomm_chunk_energies(const Segment* table, i64, i64, i64, i32 size, i32 power, double* out) {
    chunk_energies({table, size, power}, out);
}

KERNEL gccomm_chunk_take(const Segment* table, i64, i64, i64, i32 size, i32 power, const i64* chosen,
                         i64 count, void* out) {
    chunk_take({table, size, power}, chosen, count, out);
}

KERNEL gccomm_chunk_put(const Segment* table, i64, i64, i64, i32 size, i32 power, const i32* places,
                        const void* sums, const void* rest, i64 n) {
    chunk_put({table, size, power}, table[1], {places, sums, rest, n});
}

// The table of segments, and the block of it that a number in the batch means.
#pragma once
#include "../core.h"

namespace gccomm {
namespace GCCOMM_LEVEL {

enum class DType : u8 {
    float32,
    float64,
    float16,
    bfloat16,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
    boolean
};

// A run of blocks of one tensor; mirrors SEGMENT in table.py.
struct Segment {
    u64 src, dst, res_in, res_out;
    i64 size, row, block0, nblocks, base, word0;
    u32 key0, key1, sign0, sign1;
    DType dtype;
    u8 width, digits, unused[5];
};
static_assert(sizeof(Segment) == 104, "as SEGMENT in table.py");

struct Batch {
    const Segment* table;
    i64 segments, lo, hi;
};

struct Block {
    const Segment* segment;
    i64 index;   // in the batch
    u32 number;  // in the tensor
    int length;
    i64 offset;  // of its first coordinate in the tensor
    i64 word;    // offset of its first word in the batch
    int words;   // how many it has
};

// How many words a block of a segment has: one type per kind of coding.
struct NoWords {
    __device__ int operator()(const Segment&, int) const { return 0; }
};
struct LaneWords {
    int width;
    bool rotated;
    __device__ int operator()(const Segment&, int length) const {
        return words_of(rotated ? padded(length) : length, width);
    }
};
struct ExactWords {
    __device__ int operator()(const Segment&, int length) const { return 2 * length; }
};
struct FloatWords {
    __device__ int operator()(const Segment&, int length) const { return length; }
};
struct IntegerWords {
    __device__ int operator()(const Segment& s, int length) const {
        if (s.digits != 0) return s.digits * length;
        return s.width == 0 ? 0 : words_of(length, s.width);
    }
};

// Words of the first `blocks` blocks of the tensor of a segment.
template <class WordCount>
__device__ i64 words_before(const Segment& s, u32 blocks, u32 per_row, WordCount count) {
    const i64 full = count(s, kBlock);
    const i64 last = count(s, static_cast<int>(s.row - i64(per_row - 1) * kBlock));
    const u32 rows = blocks / per_row;
    return rows * ((per_row - 1) * full + last) + (blocks - rows * per_row) * full;
}

// Block `at` of the batch; the segment is looked for by bisection. (Block numbers fit 32 bits, which divide
// several times as fast as 64: a tensor of 2^42 coordinates fits no device.)
template <class WordCount>
__device__ Block find_block(const Batch& batch, i64 at, WordCount count) {
    i64 low = 0, high = batch.segments;
    while (high - low > 1) {
        const i64 middle = (low + high) / 2;
        if (batch.table[middle].base <= at)
            low = middle;
        else
            high = middle;
    }
    const Segment& s = batch.table[low];
    const u32 per_row = static_cast<u32>((s.row + kBlock - 1) / kBlock), first = static_cast<u32>(s.block0);
    const u32 number = first + static_cast<u32>(at - s.base), row = number / per_row;
    const i64 before = i64(number - row * per_row) * kBlock, room = s.row - before;
    const int length = static_cast<int>(room < kBlock ? room : kBlock);
    const i64 word =
        s.word0 + words_before(s, number, per_row, count) - words_before(s, first, per_row, count);
    return {&s, at, number, length, row * s.row + before, word, count(s, length)};
}

// f(block) for the blocks of the batch that this thread block has, all of its threads together.
template <class WordCount, class Function>
__device__ void each_block(const Batch& batch, WordCount count, Function f) {
    for (i64 at = batch.lo + blockIdx.x; at < batch.hi; at += gridDim.x) {
        f(find_block(batch, at, count));
        __syncthreads();  // what threads share is used again
    }
}

// Address of element `offset` of the array at `base`; null stays null.
template <class T>
__device__ T* element(u64 base, i64 offset) {
    return base == 0 ? nullptr : reinterpret_cast<T*>(base) + offset;
}

__device__ inline bool is_wide(const Segment& s) { return s.dtype == DType::float64; }

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm

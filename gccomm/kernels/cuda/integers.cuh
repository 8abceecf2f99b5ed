// Integers and booleans: ranges, lanes, and 16-bit digits for values too wide for a lane.
#pragma once
#include "lanes.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

template <class T>
struct Of {
    using Type = T;
};
struct Boolean {};  // a byte that counts as 0 or 1, whatever it holds

// Calls f with Of<T>, T the integer type of `dtype`.
template <class Function>
__device__ void with_integer(DType dtype, Function f) {
    switch (dtype) {
        case DType::int8:
            return f(Of<signed char>{});
        case DType::int16:
            return f(Of<short>{});
        case DType::int32:
            return f(Of<i32>{});
        case DType::int64:
            return f(Of<i64>{});
        case DType::uint8:
            return f(Of<u8>{});
        case DType::uint16:
            return f(Of<u16>{});
        case DType::uint32:
            return f(Of<u32>{});
        case DType::uint64:
            return f(Of<u64>{});
        case DType::boolean:
            return f(Of<Boolean>{});
        default:
            return;
    }
}

// A number of more than 64 bits: low + high * 2^64.
struct Wide {
    u64 low;
    i64 high;
};

template <class T>
struct Stored {
    using Element = T;
    static constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0);
    static __device__ Wide read(T x) {
        return {static_cast<u64>(static_cast<i64>(x)), is_signed && x < 0 ? -1 : 0};
    }
    static __device__ T write(const Wide& x) { return static_cast<T>(x.low); }
    static __device__ bool fits(const Wide& x) {
        const Wide back = read(write(x));
        return back.low == x.low && back.high == x.high;
    }
};
template <>
struct Stored<Boolean> {
    using Element = u8;
    static __device__ Wide read(u8 x) { return {x != 0 ? 1ull : 0ull, 0}; }
    static __device__ u8 write(const Wide& x) { return x.low != 0 || x.high != 0; }
    static __device__ bool fits(const Wide&) { return true; }
};

// Smallest B with -2^B <= x < 2^B.
__device__ inline u32 range_bits(const Wide& x) {
    const u64 magnitude = x.high < 0 ? ~x.low : x.low;
    const u32 upper = static_cast<u32>(magnitude >> 32), lower = static_cast<u32>(magnitude);
    if (upper != 0) return static_cast<u32>(33 + floor_log2(upper));
    return lower == 0 ? 0 : static_cast<u32>(1 + floor_log2(lower));
}

// `out`, one a segment, begins at zero.
__device__ inline void int_range(Team& team, const Batch& batch, u32* out) {
    each_block(batch, NoWords{}, [&](const Block& b) {
        u32 most = 0;
        if (b.segment->src != 0)
            with_integer(b.segment->dtype, [&](auto of) {
                using Type = Stored<typename decltype(of)::Type>;
                const auto* x = element<const typename Type::Element>(b.segment->src, b.offset);
                for (int i = thread(); i < b.length; i += kThreads)
                    most = Larger{}(most, range_bits(Type::read(x[i])));
            });
        most = join(team, most, Larger{});
        if (thread() == 0) atomicMax(out + (b.segment - batch.table), most);
    });
}

struct IntegerArgs {
    u32* words;  // of block lo, at offset `base` in the batch
    i64 base;
    u32* lost;  // decoding: how many sums do not fit their dtype; begins at zero
};

// Digit d of x: 16 bits, the top one signed.
__device__ inline u32 digit(const Wide& x, int d, bool top) {
    const u64 sign = x.high < 0 ? ~0ull : 0;
    const u64 shifted = 16 * d > 63 ? sign : x.low >> 16 * d | (d == 0 ? 0 : sign << (64 - 16 * d));
    return static_cast<u32>(top ? shifted : shifted & 0xFFFFu);
}

// The sum whose digits are n words apart; carries go upwards.
__device__ inline Wide sum_of_digits(const u32* words, int n, int digits) {
    Wide sum{0, 0};
    u32 carry = 0;
    for (int d = 0; d < digits - 1; d++) {
        const u32 total = words[d * n] + carry;
        sum.low |= static_cast<u64>(total & 0xFFFFu) << 16 * d;  // at most four digits are not the top one
        carry = total >> 16;
    }
    const i64 top = static_cast<i32>(words[(digits - 1) * n] + carry);
    if (digits > 4) return {sum.low, top};
    const int shift = 16 * (digits - 1);
    sum.high = shift == 0 ? top >> 63 : top >> (64 - shift);
    sum.low |= static_cast<u64>(top) << shift;
    return sum;
}

__device__ inline void int_encode(Team& team, const Batch& batch, const IntegerArgs& args) {
    each_block(batch, IntegerWords{}, [&](const Block& b) {
        const Segment& s = *b.segment;
        u32* out = args.words + (b.word - args.base);
        if (s.src == 0) {
            for (int j = thread(); j < b.words; j += kThreads) out[j] = 0;
            return;
        }
        with_integer(s.dtype, [&](auto of) {
            using Type = Stored<typename decltype(of)::Type>;
            const auto* x = element<const typename Type::Element>(s.src, b.offset);
            for (int i = thread(); i < b.length; i += kThreads) {
                const Wide value = Type::read(x[i]);
                for (int d = 0; d < s.digits; d++) out[d * b.length + i] = digit(value, d, d == s.digits - 1);
                if (s.digits == 0) team.at[place(i)] = static_cast<u32>(value.low);
            }
        });
        __syncthreads();
        if (s.digits == 0) pack(team, b.length, s.width, b.words, out);
    });
}

// Stores the sums of a block if there is a place for them; returns how many of this thread's do not fit.
template <class Type>
__device__ u32 store_sums(const Team& team, const Block& b, const u32* words) {
    const int digits = b.segment->digits;
    auto* out = element<typename Type::Element>(b.segment->dst, b.offset);
    u32 lost = 0;
    for (int i = thread(); i < b.length; i += kThreads) {
        const i32 lane = digits == 0 ? static_cast<i32>(team.at[place(i)]) : 0;
        const Wide sum = digits == 0 ? Stored<i32>::read(lane) : sum_of_digits(words + i, b.length, digits);
        if (out != nullptr) out[i] = Type::write(sum);
        lost += Type::fits(sum) ? 0 : 1;
    }
    return lost;
}

__device__ inline void int_decode(Team& team, const Batch& batch, const IntegerArgs& args) {
    each_block(batch, IntegerWords{}, [&](const Block& b) {
        const Segment& s = *b.segment;
        const u32* words = args.words + (b.word - args.base);
        if (b.words == 0) return;
        if (s.digits == 0) unpack(team, words, b.length, s.width, b.words);
        __syncthreads();
        u32 lost = 0;
        with_integer(s.dtype, [&](auto of) {
            lost = store_sums<Stored<typename decltype(of)::Type>>(team, b, words);
        });
        lost = join(team, lost, Add{});
        if (thread() == 0 && lost != 0) atomicAdd(args.lost, lost);
    });
}

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm

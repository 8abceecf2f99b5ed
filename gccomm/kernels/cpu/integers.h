// Integers and booleans: ranges, lanes, and 16-bit digits for values too wide for a lane.
#pragma once
#include "lanes.h"

namespace gccomm::GCCOMM_LEVEL {

using i128 = __int128;

// A byte that counts as 0 or 1, whatever it holds.
struct Boolean {
    constexpr Boolean(int value) : byte(value != 0) {}
    constexpr operator i64() const { return byte != 0; }
    u8 byte;
};

// Calls f with a null pointer of the integer type of `dtype`.
template <class Function>
inline void with_integer(DType dtype, Function f) {
    switch (dtype) {
        case DType::int8:
            return f(static_cast<signed char*>(nullptr));
        case DType::int16:
            return f(static_cast<short*>(nullptr));
        case DType::int32:
            return f(static_cast<i32*>(nullptr));
        case DType::int64:
            return f(static_cast<i64*>(nullptr));
        case DType::uint8:
            return f(static_cast<u8*>(nullptr));
        case DType::uint16:
            return f(static_cast<u16*>(nullptr));
        case DType::uint32:
            return f(static_cast<u32*>(nullptr));
        case DType::uint64:
            return f(static_cast<u64*>(nullptr));
        case DType::boolean:
            return f(static_cast<Boolean*>(nullptr));
        default:
            return;
    }
}

template <class T>
constexpr bool is_boolean = false;
template <>
constexpr bool is_boolean<Boolean> = true;

template <class T>
constexpr bool is_signed = static_cast<T>(-1) < static_cast<T>(0);

// Smallest B with -2^B <= x < 2^B for all x: bits of the union of x, or of ~x where x is negative.
template <class T>
inline u32 range_bits(const T* x, i64 n) {
    u64 all = 0;
    if constexpr (sizeof(T) <= 4) {
        u32 part = 0;
        for (i64 i = 0; i < n; i++) {
            if constexpr (is_signed<T>) {
                const i32 value = x[i];
                part |= static_cast<u32>(value ^ (value >> 31));
            } else {
                part |= static_cast<u32>(x[i]);
            }
        }
        all = part;
    } else {
        for (i64 i = 0; i < n; i++) {
            const i64 value = static_cast<i64>(x[i]);
            all |= static_cast<u64>(is_signed<T> ? value ^ (value >> 63) : value);
        }
    }
    return all == 0 ? 0 : static_cast<u32>(64 - __builtin_clzll(all));
}

inline void int_range(const Segment* table, i64 segments, u32* out) {
    for (i64 k = 0; k < segments; k++) {
        out[k] = 0;
        const Batch one{table + k, 1, table[k].base, table[k].base + table[k].nblocks};
        if (table[k].src == 0) continue;
        for (Cursor<NoWords> c(one, {}); c.next();)
            with_integer(table[k].dtype, [&]<class T>(T*) {
                const u32 bits = range_bits(element<const T>(table[k].src, c.block.offset), c.block.length);
                if (bits > out[k]) out[k] = bits;
            });
    }
}

// Digit d of coordinate i lies at d * n + i; low digits unsigned, the top one signed.
template <class T>
inline void write_digits(const T* x, int n, int digits, u32* words) {
    for (int d = 0; d < digits; d++) {
        const bool top = d == digits - 1;
        const int shift = 16 * d < 63 ? 16 * d : 63;
        for (int i = 0; i < n; i++) {
            u64 value = static_cast<u64>(x[i]);
            if constexpr (is_signed<T>)
                value = static_cast<u64>(static_cast<i64>(x[i]) >> shift);
            else
                value = 16 * d > 63 ? 0 : value >> shift;
            words[d * n + i] = static_cast<u32>(top ? value : value & 0xFFFFu);
        }
    }
}

inline void encode_integers(const Block& b, u32* words, Integers& q) {
    const Segment& s = *b.segment;
    const int count = IntegerWords{}(s, b.length);
    if (s.src == 0) {
        __builtin_memset(words, 0, sizeof(u32) * static_cast<u32>(count));
        return;
    }
    with_integer(s.dtype, [&]<class T>(T*) {
        const T* x = element<const T>(s.src, b.offset);
        if (s.digits != 0) return write_digits(x, b.length, s.digits, words);
        for (int i = 0; i < b.length; i++) q.at[i] = static_cast<i32>(x[i]);
        if (b.length < kBlock) zero_after(q, b.length);
        pack(s.width, q, count, words);
    });
}

// Stores `value` if there is a place for it; 1 if the type cannot hold it.
template <class T, class Wide>
GCCOMM_FN int store_integer(T* out, int i, Wide value) {
    const T narrow = static_cast<T>(value);
    if (out != nullptr) out[i] = narrow;
    return static_cast<Wide>(narrow) != value;
}

template <class T>
inline i64 read_lanes(const Integers& q, int n, T* out) {
    int lost = 0;
    if constexpr (is_boolean<T>) {
        for (int i = 0; out != nullptr && i < n; i++) out[i] = q.at[i] != 0;
    } else if constexpr (!is_signed<T> && sizeof(T) == 8) {
        for (int i = 0; i < n; i++) lost += store_integer(out, i, static_cast<i128>(q.at[i]));
    } else {
        for (int i = 0; i < n; i++) lost += store_integer(out, i, static_cast<i64>(q.at[i]));
    }
    return lost;
}

// `Wide` must hold the sum of the digits.
template <class Wide, class T>
inline i64 read_digits(const u32* words, int n, int digits, T* out) {
    int lost = 0;
    for (int i = 0; i < n; i++) {
        Wide sum = static_cast<i32>(words[(digits - 1) * n + i]);
        for (int d = digits - 2; d >= 0; d--) sum = sum * 65536 + words[d * n + i];
        if constexpr (is_boolean<T>) {
            if (out != nullptr) out[i] = sum != 0;
        } else {
            lost += store_integer(out, i, sum);
        }
    }
    return lost;
}

inline void int_encode(const Batch& batch, const Words& words) {
    Integers q;
    zero_after(q, 0);
    for (Cursor<IntegerWords> c(batch, {}); c.next();)
        encode_integers(c.block, words.data + (c.word - words.base), q);
}

// Returns how many sums do not fit their dtype.
inline i64 int_decode(const Batch& batch, const Words& words) {
    Integers q;
    i64 lost = 0;
    for (Cursor<IntegerWords> c(batch, {}); c.next();) {
        const Block& b = c.block;
        const Segment& s = *b.segment;
        const u32* in = words.data + (c.word - words.base);
        with_integer(s.dtype, [&]<class T>(T*) {
            T* out = element<T>(s.dst, b.offset);
            if (s.digits != 0) {
                const bool small = s.digits <= 2 && (is_signed<T> || sizeof(T) < 8);
                lost += small ? read_digits<i64>(in, b.length, s.digits, out)
                              : read_digits<i128>(in, b.length, s.digits, out);
            } else if (s.width != 0) {
                unpack(s.width, in, words_of(b.length, s.width), q);
                lost += read_lanes(q, b.length, out);
            }
        });
    }
    return lost;
}

}  // namespace gccomm::GCCOMM_LEVEL

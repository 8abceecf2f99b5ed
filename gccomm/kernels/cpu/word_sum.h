// Words of all ranks that are added up as they are decoded.
#pragma once
#include "simd.h"
#include "table.h"

namespace gccomm::GCCOMM_LEVEL {

// The words of a block, of all ranks.
class WordSum {
 public:
    const u32* of(const DecodeArgs& args, i64 at, int count) {
        int i = 0;
        for (; i + kLanes <= count; i += kLanes) store(sum_ + i, sum<U>(args, at + i));
        for (; i < count; i++) sum_[i] = sum<u32>(args, at + i);
        return sum_;
    }

 private:
    template <class V>
    GCCOMM_FN V sum(const DecodeArgs& args, i64 at) const {
        V total = part<V>(args, 0, at);
        for (i64 r = 1; r < args.ranks; r++) total += part<V>(args, r, at);
        return total;
    }

    template <class V>
    GCCOMM_FN V part(const DecodeArgs& args, i64 rank, i64 at) const {
        const u32* words = reinterpret_cast<const u32*>(args.parts[rank]) + at;
        prefetch(words + 2 * kBlock / sizeof(u32));
        return load<V>(words);
    }

    alignas(kLineBytes) u32 sum_[kBlock];
};

}  // namespace gccomm::GCCOMM_LEVEL

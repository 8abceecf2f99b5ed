// A check sum of 64 bits at the speed of memory. Not cryptographic: it tells apart what differs by accident.
#pragma once
#include "../core.h"

namespace gccomm::GCCOMM_LEVEL {

class Digest {
 public:
    static constexpr int kParts = 8;
    static constexpr u64 kGroup = kParts * sizeof(u64);

    explicit Digest(u64 seed) {
        for (int k = 0; k < kParts; k++) parts_[k] = seed + kStep * static_cast<u64>(k + 1);
    }

    // Eight words of 64 bits.
    GCCOMM_FN void add(const u8* group) {
        u64 words[kParts];
        __builtin_memcpy(words, group, kGroup);
        for (int k = 0; k < kParts; k++) parts_[k] = mix(parts_[k], words[k]);
    }

    u64 result(u64 nbytes) const {
        u64 sum = nbytes;
        for (const u64 part : parts_) sum = mix(sum, part);
        return sum;
    }

 private:
    static constexpr u64 kStep = 0x9E3779B97F4A7C15ull, kFactor = 0xD6E8FEB86659FD93ull;

    // One to one in each of both; what differs in high bits comes down to low ones.
    static GCCOMM_FN u64 mix(u64 sum, u64 word) {
        const u64 product = (sum ^ word) * kFactor;
        return product ^ product >> 32;
    }

    u64 parts_[kParts];
};

inline u64 digest(const void* data, i64 nbytes, u64 seed) {
    const u8* bytes = static_cast<const u8*>(data);
    const u64 size = static_cast<u64>(nbytes), whole = size / Digest::kGroup * Digest::kGroup;
    Digest sum(seed);
    for (u64 at = 0; at < whole; at += Digest::kGroup) sum.add(bytes + at);
    if (whole < size) {
        u8 rest[Digest::kGroup] = {};
        __builtin_memcpy(rest, bytes + whole, size - whole);
        sum.add(rest);
    }
    return sum.result(size);
}

}  // namespace gccomm::GCCOMM_LEVEL

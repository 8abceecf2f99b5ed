// Energies of chunks of consecutive coordinates of a whole tensor.
#pragma once
#include "blocks.h"

namespace gccomm::GCCOMM_LEVEL {

// The sum of the squares of a chunk, of which parts come one after the other. It has 32 partial sums, of the
// coordinates that many apart, which are then added in pairs 16, 8, 4, 2 and 1 apart: on a device, a warp.
class SquareSum {
 public:
    static constexpr int kParts = 32;

    void add(const double* x, int n) {
        int i = 0;
        for (; i < n && at_ != 0; i++) add_one(x[i]);
        for (; i + kParts <= n; i += kParts)
            for (int k = 0; k < kParts; k++) parts_[k] += x[i + k] * x[i + k];
        for (; i < n; i++) add_one(x[i]);
    }

    // Returns the sum, and starts anew.
    double take() {
        for (int apart = kParts / 2; apart > 0; apart /= 2)
            for (int k = 0; k < apart; k++) parts_[k] += parts_[k + apart];
        const double sum = parts_[0];
        at_ = 0;
        for (double& part : parts_) part = 0;
        return sum;
    }

 private:
    void add_one(double x) {
        parts_[at_] += x * x;
        at_ = (at_ + 1) % kParts;
    }

    alignas(kLineBytes) double parts_[kParts] = {};
    int at_ = 0;  // where the next coordinate belongs
};

inline void chunk_energies(const Segment& tensor, const ChunkArgs& args) {
    SquareSum sum;
    Floats staged;
    Doubles values;
    Cursor c(Batch{&tensor, 1, tensor.base, tensor.base + tensor.nblocks}, NoWords{});
    int filled = 0;  // of the chunk
    double* out = args.out;
    while (c.next()) {
        const int n = c.block.length;
        values_as_doubles(c.block, staged, values);
        if (args.power != 0) scale_by_power(values.at, n, args.power);
        for (int i = 0; i < n;) {
            const int room = args.size - filled, part = n - i < room ? n - i : room;
            sum.add(values.at + i, part);
            i += part;
            filled += part;
            if (filled < args.size) continue;
            *out++ = sum.take();
            filled = 0;
        }
    }
    if (filled > 0) *out = sum.take();
}

}  // namespace gccomm::GCCOMM_LEVEL

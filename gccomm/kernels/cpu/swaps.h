// Calls whose ranks swap their tensors whole: each rank has all of them, and works out what all would have
// sent, and the sum. It costs n times the arithmetic of small tensors, and saves a round of messages.
#pragma once
#include <cstring>
#include <memory>
#include <vector>

#include "calls.h"

namespace gccomm {

inline std::int64_t item_bytes(DType dtype) {
    switch (dtype) {
        case DType::float64:
            return 8;
        case DType::float32:
            return 4;
        case DType::float16:
        case DType::bfloat16:
            return 2;
        default:
            throw std::invalid_argument("only floats are swapped");
    }
}

// What ranks send of a tensor, and what they make of all of it.
class Swap {
    using Index = std::int64_t;

 public:
    explicit Swap(const CallJob& job) : job_(job), tensor_(*reinterpret_cast<const Segment*>(job.table)) {}

    // Bytes of a rank's part of a message: its tensor, or its floats as they travel.
    Index nbytes() const {
        return job_.lanes != 0 ? tensor_.size * item_bytes(tensor_.dtype) : job_.count * job_.item;
    }

    Index message_bytes() const { return job_.header_words * Index{sizeof(std::uint32_t)} + nbytes(); }

    // Writes the header and this rank's part.
    void pack(char* out) const {
        const auto header = static_cast<std::size_t>(message_bytes() - nbytes());
        std::memcpy(out, reinterpret_cast<const void*>(job_.agreed), header);
        char* part = out + header;
        if (job_.lanes == 0 && job_.sums != 0)
            kernels().float_encode({&tensor_, 1, 0, job_.blocks},
                                   {part, static_cast<DType>(job_.wire), 1, false, false});
        else if (tensor_.src == 0)
            std::memset(part, 0, static_cast<std::size_t>(nbytes()));
        else
            std::memcpy(part, reinterpret_cast<const void*>(tensor_.src), static_cast<std::size_t>(nbytes()));
    }

    // Takes the messages of all ranks. Where ranks differ in what they call, nothing is summed; but one may
    // have no tensor, which counts as zeros.
    Answer finish(std::vector<std::uint64_t> messages, const std::uint32_t* shifts, Index rank) const {
        auto* agreed = reinterpret_cast<std::uint32_t*>(job_.agreed);
        const auto ranks = static_cast<Index>(messages.size());
        kernels().join_parts({messages.data(), ranks, agreed, job_.header_words, Joining::max_words, false});
        const Index compared = std::min(job_.header_words, 2 * job_.values + 1);  // the error flag is last
        if (std::memcmp(agreed, reinterpret_cast<const void*>(job_.header),
                        static_cast<std::size_t>(compared) * sizeof(std::uint32_t)) != 0)
            return Answer::differs;
        for (auto& part : messages) part += static_cast<std::uint64_t>(message_bytes() - nbytes());
        if (job_.lanes != 0)
            add_lanes(messages, shifts, rank);
        else
            add_floats(messages);
        return Answer::done;
    }

 private:
    void add_floats(const std::vector<std::uint64_t>& parts) const {
        char* sums = reinterpret_cast<char*>(job_.sums != 0 ? job_.sums : tensor_.dst);
        kernels().join_parts({parts.data(), static_cast<Index>(parts.size()), sums, job_.count,
                              static_cast<Joining>(job_.kind), false});
        if (job_.sums != 0)
            kernels().float_decode({&tensor_, 1, 0, job_.blocks},
                                   {sums, static_cast<DType>(job_.wire), job_.n, job_.mean != 0, false});
    }

    void add_lanes(const std::vector<std::uint64_t>& parts, const std::uint32_t* shifts, Index rank) const {
        const auto& lanes = *reinterpret_cast<const LaneJob*>(job_.lanes);
        const auto* offsets = reinterpret_cast<const Index*>(lanes.words);
        const auto ranks = static_cast<Index>(parts.size());
        const Index count = (offsets[lanes.blocks] - offsets[0] + 15) & -16;  // whole lines of the cache
        const std::unique_ptr<std::uint32_t[]> room(
            new std::uint32_t[static_cast<std::size_t>(ranks * count + lanes.blocks)]);
        if (lanes.agree) agree(lanes, parts, room.get() + ranks * count);
        std::vector<std::uint64_t> words;
        for (Index r = 0; r < ranks; r++) {
            std::uint32_t* out = room.get() + r * count;
            const Segment part = of_rank(parts, r);
            EncodeArgs args = encode_args(lanes, {out, offsets[0]}, shifts[r]);
            args.maxima = r == rank ? reinterpret_cast<std::uint32_t*>(lanes.maxima) : nullptr;
            kernels().encode({&part, 1, 0, lanes.blocks}, args);
            words.push_back(reinterpret_cast<std::uint64_t>(out));
        }
        kernels().decode({&tensor_, 1, 0, lanes.blocks}, decode_args(lanes, {nullptr, offsets[0]}, words));
    }

    // Writes the scales: the maxima over the ranks.
    void agree(const LaneJob& lanes, const std::vector<std::uint64_t>& parts, std::uint32_t* own) const {
        auto* scales = reinterpret_cast<std::uint32_t*>(lanes.scales);
        std::fill_n(scales, lanes.blocks, 0u);
        for (std::size_t r = 0; r < parts.size(); r++) {
            const Segment part = of_rank(parts, static_cast<Index>(r));
            kernels().maxima({&part, 1, 0, lanes.blocks}, {own, nullptr, lanes.rotations, nullptr});
            for (Index b = 0; b < lanes.blocks; b++) scales[b] = std::max(scales[b], own[b]);
        }
    }

    // The tensor of a rank, whose result goes nowhere.
    Segment of_rank(const std::vector<std::uint64_t>& parts, Index rank) const {
        Segment part = tensor_;
        part.src = parts[static_cast<std::size_t>(rank)];
        part.dst = 0;
        return part;
    }

    static EncodeArgs encode_args(const LaneJob& lanes, Words words, std::uint32_t shift) {
        EncodeArgs args{};
        args.scales = reinterpret_cast<const std::uint32_t*>(lanes.scales);
        args.words = words;
        args.width = lanes.width;
        args.limit = lanes.limit;
        args.shift = shift;
        args.rotations = lanes.rotations;
        args.subtract = lanes.subtract;
        return args;
    }

    static DecodeArgs decode_args(const LaneJob& lanes, Words words,
                                  const std::vector<std::uint64_t>& parts) {
        DecodeArgs args{};
        args.scales = reinterpret_cast<const std::uint32_t*>(lanes.scales);
        args.words = words;
        args.parts = parts.data();
        args.ranks = args.n = args.dithers = static_cast<Index>(parts.size());
        args.width = lanes.width;
        args.limit = lanes.limit;
        args.subtract = lanes.subtract;
        args.mean = lanes.mean;
        args.rotations = lanes.rotations;
        return args;
    }

    const CallJob& job_;
    const Segment& tensor_;
};

}  // namespace gccomm

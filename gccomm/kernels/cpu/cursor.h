// Walks over the blocks of a batch.
#pragma once
#include "simd.h"
#include "table.h"

namespace gccomm::GCCOMM_LEVEL {

struct Block {
    const Segment* segment;
    i64 number;  // in the tensor
    i64 offset;  // of its first coordinate in the tensor
    int length;
};

// How many words a block of a segment has: one type per kind of coding.
struct NoWords {
    int operator()(const Segment&, int) const { return 0; }
};
struct LaneWords {
    int width, full;
    bool rotated;
    LaneWords(int w, bool r) : width(w), full(words_of(kBlock, w)), rotated(r) {}
    int operator()(const Segment&, int length) const {
        return length == kBlock ? full : words_of(rotated ? padded(length) : length, width);
    }
};
struct ExactWords {
    int operator()(const Segment&, int length) const { return 2 * length; }
};
struct IntegerWords {
    int operator()(const Segment& s, int length) const {
        if (s.digits != 0) return s.digits * length;
        return s.width == 0 ? 0 : words_of(length, s.width);
    }
};

template <class WordCount>
class Cursor {
 public:
    Cursor(const Batch& batch, WordCount count)
        : segment_(batch.table),
          end_(batch.table + batch.segments),
          at_(batch.lo),
          hi_(batch.hi),
          count_(count) {
        while (segment_ != end_ && segment_->base + segment_->nblocks <= at_) ++segment_;
        if (segment_ != end_) enter(at_ - segment_->base);
    }

    // Moves to the next block; false at the end of the range or of the table.
    bool next() {
        if (at_ >= hi_) return false;
        while (left_ == 0) {
            if (segment_ == end_ || ++segment_ == end_) return false;
            enter(0);
        }
        const Segment& s = *segment_;
        const i64 room = s.row - column_ * kBlock;
        block = {segment_, number_, row_ * s.row + column_ * kBlock,
                 static_cast<int>(room < kBlock ? room : kBlock)};
        if (block.offset + block.length > s.size) return false;
        index = at_++;
        word = next_word_;
        words = count_(s, block.length);
        next_word_ += words;
        ++number_;
        --left_;
        if (++column_ == per_row_) {
            column_ = 0;
            ++row_;
        }
        return true;
    }

    // Joins the blocks that follow in the segment, which follow in memory too, to the current one.
    void extend(int most) {
        Block joined = block;
        while (left_ > 0 && joined.length + kBlock <= most && next()) joined.length += block.length;
        block = joined;
    }

    Block block{};
    i64 index = 0;  // of the block in the batch
    i64 word = 0;   // offset of its first word in the batch
    int words = 0;  // how many it has

 private:
    void enter(i64 skip) {
        const Segment& s = *segment_;
        left_ = 0;
        if (s.nblocks <= skip || s.row <= 0 || skip < 0) return;
        left_ = s.nblocks - skip;
        per_row_ = (s.row + kBlock - 1) / kBlock;
        number_ = s.block0 + skip;
        row_ = number_ / per_row_;
        column_ = number_ % per_row_;
        next_word_ = s.word0 + words_before(number_) - words_before(s.block0);
    }

    // Words of the first `blocks` blocks of the tensor.
    i64 words_before(i64 blocks) const {
        const Segment& s = *segment_;
        const i64 full = count_(s, kBlock);
        const i64 last = count_(s, static_cast<int>(s.row - (per_row_ - 1) * kBlock));
        return blocks / per_row_ * ((per_row_ - 1) * full + last) + blocks % per_row_ * full;
    }

    const Segment* segment_;
    const Segment* end_;
    i64 at_, hi_;
    WordCount count_;
    i64 left_ = 0, number_ = 0, row_ = 0, column_ = 0, per_row_ = 1, next_word_ = 0;
};

}  // namespace gccomm::GCCOMM_LEVEL

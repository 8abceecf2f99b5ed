// What the Python side and all instruction-set levels share: the segment record, dtype codes, the dispatch
// table.
#pragma once
#include <cstddef>
#include <cstdint>

namespace gccomm {

enum class DType : std::uint8_t {
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
    std::uint64_t src, dst, res_in,
        res_out;                   // addresses of the tensor's first element; 0: absent (src: zeros)
    std::int64_t size, row;        // coordinates of the tensor, and of one row
    std::int64_t block0, nblocks;  // first block in the tensor, number of blocks
    std::int64_t base, word0;      // place of the first block, and of its words, in the batch
    std::uint32_t key0, key1;      // step key of the tensor, from which its rounding noise comes
    std::uint32_t sign0, sign1;    // the step key that all ranks share, for the signs of rotations
    DType dtype;
    std::uint8_t width, digits;  // integers: lane width, or number of 16-bit digits
    std::uint8_t unused[5];
};
static_assert(sizeof(Segment) == 104 && offsetof(Segment, key0) == 80 && offsetof(Segment, dtype) == 96);

// Blocks lo <= block < hi of a batch, and where their words lie.
struct Batch {
    const Segment* table;
    std::int64_t segments, lo, hi;
};

struct Words {
    std::uint32_t* data;  // words of block lo
    std::int64_t base;    // their offset in the batch
};

struct MaximaArgs {
    std::uint32_t *out, *energy;  // one a block from block lo on; energy may be null
    int rotations;
    float* kept;  // where to leave rotated blocks, one after the other, or null
};

struct EncodeArgs {
    const std::uint32_t* scales;  // of the whole batch
    Words words;
    int width;
    std::int32_t limit;
    std::uint32_t shift;
    std::uint32_t* check;  // two words a block from block lo on, or null
    std::int32_t clamp;
    const float* ratios;  // of the whole batch, or null
    int rotations;
    std::uint32_t* maxima;     // one a block from block lo on, or null
    bool subtract;             // decoding takes the dither off, so that residuals leave it out
    const std::int32_t* grid;  // [g, low of each step, gap of each step], or null
    const float* gains;        // of the whole batch, or null: values are multiplied by them first
    std::int64_t ahead;        // blocks, to what is fetched from memory meanwhile for later, or 0
    std::uint32_t* twin;       // where the words go as well, past the caches, or null
};

struct DecodeArgs {
    const std::uint32_t* scales;
    Words words;
    int width;
    std::int32_t limit;
    std::int64_t n;
    bool subtract, mean, stream;
    std::uint32_t* check;
    std::uint32_t* energy;  // one a block from block lo on, or null
    const float* ratios;    // of the whole batch, or null
    int rotations;
    std::int32_t offset;
    std::int64_t dithers;        // whose sum is taken off: n, or 1 where sums were rounded again
    const std::uint64_t* parts;  // addresses of the ranks' words, which are then added up here, or null
    std::int64_t ranks;
};

// Blocks rounded against their own scales.
struct HopEncodeArgs {
    std::uint32_t* scales;  // one a block from block lo on
    Words words;
    int width;
    std::int32_t limit;
    std::uint32_t shift;
    int rotations;
};

// The words of all ranks for some blocks, lanes first, then a scale a block; and where their sum goes.
struct HopFoldArgs {
    const Segment* again;        // the table with the keys of the sum's noise
    const std::uint64_t* parts;  // addresses, in the order of the ranks
    std::int64_t ranks;
    const std::uint32_t* shifts;  // of the ranks' dither
    std::uint32_t* out;
    std::int64_t base, lane_words;  // offset of the first block's words in the batch; how many lanes' words
    int width;
    std::int32_t limit;
    int down;  // the sum's scale is that of 2^-down of it
};

// Narrow lanes of all ranks for some blocks, and the wide ones that hold their sums.
struct WidenArgs {
    const std::uint64_t* parts;  // addresses, in the order of the ranks
    std::int64_t ranks;
    std::uint32_t* out;
    std::int64_t base;  // offset of the first block's narrow words in the batch
    int from, to;       // lane widths
    bool padded;        // whether blocks travel as multiples of 64
};

struct ExactArgs {
    const std::uint32_t* scales;
    Words words;
    std::int64_t n;
    bool mean;
};

struct FloatArgs {
    void* buffer;  // values of block lo
    DType wire;
    std::int64_t n;
    bool mean, stream;
};

// Chunks of a tensor, whose coordinates are multiplied by 2^power.
struct ChunkArgs {
    int size, power;
    double* out;  // one a chunk
};

// Blocks of errors, one behind the other, and which of them are multiplied by random signs: in ascending
// order, the k-th time that a block is named by the k-th signs.
struct ProjectionArgs {
    const void* errors;
    bool wide;  // float64
    const std::int64_t *starts, *lengths;
    const std::int64_t* blocks;
    std::int64_t count;
    double* out;  // one each
};

// Predicted scales of blocks, and the counters that say what they were worth.
struct CounterArgs {
    const std::uint32_t *own, *scales;  // this rank's maxima; what was predicted
    std::int64_t blocks;
    bool wide;                // scale words are those of float64
    int bits;                 // of a counter
    std::uint32_t* counters;  // eight a block
    std::uint32_t *intervals, *predicted;
};

// Checked headroom: the energies of blocks as ranks share them.
struct ShareArgs {
    const std::uint32_t *own, *energy, *scales;  // this rank's maxima and energies; the agreed maxima
    std::int64_t blocks;
    bool wide;  // scale words are those of float64
    std::int64_t ranks;
    std::uint32_t* out;
};

// Steps of blocks over their maxima; what they are made of is said in codecs/headroom.py.
struct StepArgs {
    const std::uint32_t *scales, *energies;  // of all ranks; energies may be null: all steps are safe
    const double* ratios;                    // c of each segment's key
    double unit, deviations, bracket, safe, least;
    float* out;
};

// Check words, two a block, and the first block of every span.
struct SpanArgs {
    const std::uint32_t* check;
    const std::int64_t* starts;
    std::int64_t spans, blocks;
    const std::uint32_t* expected;  // two a span, or null
    std::uint32_t* out;             // two a span; with `expected`, one
};

// What a segment's sum says; mirrors LEARNT in table.py. Times 2^(2 exponent).
struct Learnt {
    double energy, noise, parts;
    std::int32_t exponent, valid;
};
static_assert(sizeof(Learnt) == 32);

struct LearnArgs {
    const std::uint32_t* scales;
    const float* steps;
    const std::uint32_t *energies, *energy;  // of the ranks, or null; of the decoded sum
    const std::uint8_t* redone;              // one a block: it counts for nothing; or null
    double unit, noise, part;                // of `energy`; of a coordinate's noise; of `energies`
    Learnt* out;                             // one a segment
};

// The words of two ranks, and where their reduction goes.
struct WordPair {
    const std::uint32_t *a, *b;
    std::uint32_t* out;  // may be a or b
    std::int64_t count;
};

// How the arrays of ranks are joined.
enum class Joining : std::int32_t {
    add_words,
    max_words,
    add_float32,
    add_float64,
    add_bfloat16,
    add_float16,
};
constexpr int kJoinings = 6;

// Arrays of one length, and where they are joined.
struct Parts {
    const std::uint64_t* parts;  // addresses, in the order of the ranks
    std::int64_t ranks;
    void* out;  // may be one of them, unless it is streamed
    std::int64_t count;
    Joining kind;
    bool stream;  // past the caches
};

using ReduceFunction = void (*)(void* in, void* inout, int* length, void* datatype);

// One per instruction-set level.
struct Kernels {
    bool (*maxima)(const Batch&, const MaximaArgs&);  // whether no number was subnormal
    void (*encode)(const Batch&, const EncodeArgs&);
    void (*decode)(const Batch&, const DecodeArgs&);
    void (*encode_and_decode)(const Batch&, const EncodeArgs&, const Batch&, const DecodeArgs&);
    void (*hop_encode)(const Batch&, const HopEncodeArgs&);
    void (*hop_fold)(const Batch&, const HopFoldArgs&);
    void (*widen_lanes)(const Batch&, const WidenArgs&);
    void (*exact_encode)(const Batch&, const ExactArgs&);
    void (*exact_decode)(const Batch&, const ExactArgs&);
    void (*int_range)(const Segment* table, std::int64_t segments, std::uint32_t* out);
    void (*int_encode)(const Batch&, const Words&);
    std::int64_t (*int_decode)(const Batch&, const Words&);  // how many sums do not fit
    void (*float_encode)(const Batch&, const FloatArgs&);
    void (*float_decode)(const Batch&, const FloatArgs&);
    bool (*nonfinite)(const Batch&);
    void (*chunk_energies)(const Segment& tensor, const ChunkArgs&);
    ReduceFunction add_bfloat16, add_float16;
    void (*saturating_add)(const WordPair&, int width);
    void (*exponent_add)(const WordPair&, std::uint32_t seed, std::int64_t start);
    void (*exponent_encode)(const float* values, std::uint32_t* out, std::int64_t count, std::uint32_t key0,
                            std::uint32_t key1, std::int64_t start);
    void (*exponent_decode)(const std::uint32_t* words, float* out, std::int64_t count);
    void (*join_parts)(const Parts&);
    std::int64_t (*count_intervals)(const CounterArgs&);               // blocks beyond their predictions
    int (*highest_intervals)(const CounterArgs&, std::int64_t ranks);  // the highest of all, or -1
    void (*predict_scales)(const CounterArgs&);
    std::uint64_t (*digest)(const void* data, std::int64_t nbytes, std::uint64_t seed);
    void (*share_energies)(const ShareArgs&);
    void (*choose_steps)(const Batch&, const StepArgs&);
    std::int64_t (*sum_spans)(const SpanArgs&);  // how many are not as expected
    void (*learn_energies)(const Batch&, const LearnArgs&);
    void (*project_errors)(const ProjectionArgs&);
    void (*sum_inputs)(const Batch&, int power, double* out);  // one a place in a block
    void (*stream_copy)(const void* from, void* to, std::int64_t nbytes);
};

}  // namespace gccomm

// Threads that share the blocks of a kernel: as many as GCCOMM_NUM_THREADS says, this one included.
#pragma once
#include <cstdint>
#include <functional>

namespace gccomm {

// How many threads work on a call; std::invalid_argument for a text that is no number of them.
int threads();
void choose_threads(const char* text);

// Calls `part` for runs of blocks that make up lo to hi, on several threads where there are blocks enough,
// and returns when all are done. `part` must not throw. One caller at a time has the threads: others, and
// forked children in their first call, work alone.
void share_blocks(std::int64_t lo, std::int64_t hi,
                  const std::function<void(std::int64_t, std::int64_t)>& part);

}  // namespace gccomm

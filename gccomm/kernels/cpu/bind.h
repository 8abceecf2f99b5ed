// What the files of the Python module share.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>

#include "table.h"

namespace gccomm {

using Address = std::uintptr_t;
using Index = std::int64_t;

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

inline void require(bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
}

inline Batch batch(Address table, Index segments, Index lo, Index hi) {
    require(segments >= 0 && lo >= 0, "negative block or segment number");
    return {pointer<const Segment>(table), segments, lo, hi};
}

inline void check_lanes(int width, std::int32_t limit) {
    bool known = false;
    for (const int w : {2, 3, 4, 5, 6, 8, 10, 16, 32}) known = known || w == width;
    require(known, "no such lane width; there are: 2, 3, 4, 5, 6, 8, 10, 16, 32");
    require(limit >= 1 && limit <= 2147418112, "limit outside 1 ... 32767 * 65536");
}

inline void check_rotations(int rotations) {
    require(rotations >= 0 && rotations <= 2, "rotations must be 0, 1 or 2");
}

void bind_exchange(nanobind::module_& m);
void bind_headroom(nanobind::module_& m);

}  // namespace gccomm

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

void bind_headroom(nanobind::module_& m);

}  // namespace gccomm

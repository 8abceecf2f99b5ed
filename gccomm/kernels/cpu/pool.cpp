#include "pool.h"

#include <sys/mman.h>

#include <bit>
#include <cstdlib>
#include <new>

namespace gccomm {
namespace {

constexpr std::size_t kSmallest = 256;
constexpr std::size_t kHuge = std::size_t{4} << 20;  // from here on whole huge pages
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kAlwaysKept = std::size_t{64} << 20;

// Maps more than is needed and gives back what lies outside the aligned part.
void* map_huge(std::size_t size) {
    void* raw = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) throw std::bad_alloc();
    const auto start = reinterpret_cast<std::uintptr_t>(raw);
    const std::uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
    if (aligned > start) munmap(raw, aligned - start);
    const std::size_t behind = start + kHugePage - aligned;
    if (behind > 0) munmap(reinterpret_cast<void*>(aligned + size), behind);
    void* block = reinterpret_cast<void*>(aligned);
#ifdef MADV_HUGEPAGE
    madvise(block, size, MADV_HUGEPAGE);  // only a wish: kernels without huge pages refuse it
#endif
    return block;
}

void* allocate(std::size_t size) {
    if (size >= kHuge) return map_huge(size);
    void* block = std::aligned_alloc(64, size);
    if (block == nullptr) throw std::bad_alloc();
    return block;
}

void release(void* block, std::size_t size) {
    if (size >= kHuge)
        munmap(block, size);
    else
        std::free(block);
}

}  // namespace

Pool& Pool::instance() {
    static Pool* const pool = new Pool;
    return *pool;
}

// Eighths of a power of two, so that at most an eighth is wasted; huge blocks in whole huge pages.
std::size_t Pool::size_class(std::size_t bytes) {
    if (bytes <= kSmallest) return kSmallest;
    if (bytes > (std::size_t{1} << 62)) throw std::bad_alloc();
    std::size_t step = std::bit_floor(bytes - 1) / 8;
    step = step < 64 ? 64 : step;
    const std::size_t size = (bytes + step - 1) / step * step;
    return size < kHuge ? size : (size + kHugePage - 1) / kHugePage * kHugePage;
}

std::size_t Pool::bound() const {
    const std::size_t kept = high_water_ + high_water_ / 2;
    return kept > kAlwaysKept ? kept : kAlwaysKept;
}

// Frees the blocks that have lain longest until all memory held is within `bound`.
void Pool::shrink(std::size_t bound) {
    while (!by_age_.empty() && outstanding_ + free_ > bound) {
        const Free oldest = by_age_.front();
        auto [at, end] = by_size_.equal_range(oldest.size);
        while (at != end && at->second != by_age_.begin()) ++at;
        by_size_.erase(at);
        by_age_.pop_front();
        free_ -= oldest.size;
        release(oldest.block, oldest.size);
    }
}

void* Pool::take(std::size_t bytes) {
    const std::size_t size = size_class(bytes);
    const std::lock_guard lock(mutex_);
    void* block = nullptr;
    auto [at, end] = by_size_.equal_range(size);
    if (at != end) {
        --end;  // the youngest: warm
        block = end->second->block;
        by_age_.erase(end->second);
        by_size_.erase(end);
        free_ -= size;
    } else {
        block = allocate(size);
    }
    outstanding_ += size;
    if (outstanding_ > high_water_) high_water_ = outstanding_;
    shrink(bound());
    return block;
}

void Pool::give_back(void* block, std::size_t bytes) noexcept {
    const std::size_t size = size_class(bytes);
    const std::lock_guard lock(mutex_);
    outstanding_ -= size;
    try {
        by_age_.push_back({block, size});
        by_size_.emplace(size, std::prev(by_age_.end()));
        free_ += size;
        shrink(bound());
    } catch (const std::bad_alloc&) {  // no memory for the note that the block is free
        if (!by_age_.empty() && by_age_.back().block == block) by_age_.pop_back();
        release(block, size);
    }
}

PoolStats Pool::stats() {
    const std::lock_guard lock(mutex_);
    return {outstanding_, free_, high_water_};
}

void Pool::trim() {
    const std::lock_guard lock(mutex_);
    shrink(0);
}

}  // namespace gccomm

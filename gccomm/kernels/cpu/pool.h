// Memory for results: blocks that come back are kept warm for the next call, within a bound.
#pragma once
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>

namespace gccomm {

struct PoolStats {
    std::size_t outstanding, free, high_water;  // bytes
};

class Pool {
 public:
    // The process's pool; never destroyed, so that arrays may outlive the interpreter.
    static Pool& instance();

    void* take(
        std::size_t bytes);  // 64-byte aligned; from 4 MiB on 2 MiB-aligned, in huge pages; std::bad_alloc
    void give_back(void* block, std::size_t bytes) noexcept;  // bytes as asked for
    PoolStats stats();
    void trim();  // frees all that is not in use

    static std::size_t size_class(std::size_t bytes);

 private:
    struct Free {
        void* block;
        std::size_t size;
    };
    using Age = std::list<Free>;  // oldest first

    void shrink(std::size_t bound);
    std::size_t bound() const;

    std::mutex mutex_;
    Age by_age_;
    std::multimap<std::size_t, Age::iterator> by_size_;
    std::size_t outstanding_ = 0, free_ = 0, high_water_ = 0;
};

}  // namespace gccomm

// Numbers in memory that processes share, by which they tell each other how far they are.
#pragma once
#include <atomic>
#include <cstdint>

namespace gccomm::flags {

// What was written before is seen by whoever sees the number.
inline void raise(std::uint32_t* flag, std::uint32_t number) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::atomic_ref<std::uint32_t>(*flag).store(number, std::memory_order_release);
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Whether all flags have come to `number`, counted mod 2^32; looks up to `spins` times at each that has not.
inline bool await(const std::uint64_t* flags, std::int64_t count, std::uint32_t number, std::int64_t spins) {
    for (std::int64_t i = 0; i < count; i++) {
        std::atomic_ref<std::uint32_t> flag(*reinterpret_cast<std::uint32_t*>(flags[i]));
        while (static_cast<std::int32_t>(flag.load(std::memory_order_acquire) - number) < 0) {
            if (--spins < 0) return false;
            relax();
        }
    }
    return true;
}

}  // namespace gccomm::flags

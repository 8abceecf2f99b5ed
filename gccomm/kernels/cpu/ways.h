// Which way data go into a slot that other ranks read.
//
// Through the caches is the short way: the readers find the data in the writer's cache. But each line that
// they have read stays in their caches, too, and must be taken from there before the slot is written again.
// Cores that share a cache do that fast. Between others (of two chiplets or sockets) it may take several
// times as long as the copy, and no prefetch helps; there data go past the caches, to memory. Which cores the
// ranks run on changes while they run, so both ways are timed now and then.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "dispatch.h"

namespace gccomm {

// What is known of both ways; mirrors a part of EXCHANGE in table.py.
struct WayTimes {
    double through[3], past[3];  // seconds a byte, the last three times
    std::int64_t through_count, past_count, messages;
    std::int64_t forced;  // 0: as it is timed; or a Way
};

enum class Way : std::int64_t { direct, through, past };  // direct: what is written there needs no copy

class Ways {
    using Clock = std::chrono::steady_clock;

 public:
    explicit Ways(WayTimes& times) : times_(times) {}

    // How the next message goes.
    Way next(std::int64_t nbytes) {
        if (nbytes < kLeast) return Way::direct;
        if (times_.forced != 0) return static_cast<Way>(times_.forced);
        const std::int64_t turn = times_.messages++;
        if (turn < kWarm) return Way::direct;
        timed_ = turn < kWarm + 6 || turn % kPeriod < 2;
        if (timed_) return turn % 2 == 0 ? Way::through : Way::past;
        return slow() ? Way::past : Way::direct;
    }

    // Whether both ways are known, and readers soon have what is in the writer's caches.
    bool near() const {
        const bool timed = times_.through_count >= 3 && times_.past_count >= 3;
        return times_.forced == 0 && timed && !slow();
    }

    // Whether the next copy is for the clock.
    bool timed() const { return timed_; }

    // Copies a message into a slot.
    void copy(const void* from, void* slot, std::int64_t nbytes, Way way) {
        const auto start = Clock::now();
        if (way == Way::past)
            kernels().stream_copy(from, slot, nbytes);
        else
            std::memcpy(slot, from, static_cast<std::size_t>(nbytes));
        if (nbytes < kLeast) return;
        const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
        const double a_byte = seconds / static_cast<double>(nbytes);
        if (way == Way::past)
            times_.past[times_.past_count++ % 3] = a_byte;
        else
            times_.through[times_.through_count++ % 3] = a_byte;
    }

 private:
    static constexpr std::int64_t kLeast = 16 << 10;  // bytes; the caches hold less anyway
    static constexpr std::int64_t kWarm = 8;          // messages until all slots have been touched
    static constexpr std::int64_t kPeriod = 128;      // messages, of which two are for the clock
    static constexpr double kSlow = 2;                // readers find what is past the caches later

    bool slow() const { return middle(times_.through) > kSlow * middle(times_.past); }

    static double middle(const double (&times)[3]) {
        const auto [least, most] = std::minmax(times[0], times[1]);
        return std::clamp(times[2], least, most);
    }

    WayTimes& times_;
    bool timed_ = false;
};

}  // namespace gccomm

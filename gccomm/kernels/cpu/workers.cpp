#include "workers.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>

namespace gccomm {
namespace {

using Index = std::int64_t;
using Part = std::function<void(Index, Index)>;

constexpr Index kLeast = 64;  // blocks that are worth waking a thread for
constexpr int kMost = 256;

std::atomic<int> wanted{1};

// Threads that live as long as the process: nothing waits for them at its end.
class Workers {
 public:
    explicit Workers(int helpers) : owner_(getpid()) {
        try {
            for (; started_ < helpers; started_++) std::thread([this, n = started_] { serve(n); }).detach();
        } catch (const std::system_error&) {  // no more threads: those that there are do the work
        }
    }

    bool usable() const { return owner_ == getpid(); }

    void run(Index lo, Index hi, const Part& part) {
        const Index most = (hi - lo + kLeast - 1) / kLeast;
        const Index parts = std::min<Index>(started_ + 1, most);
        {
            const std::lock_guard lock(mutex_);
            part_ = &part;
            lo_ = lo;
            hi_ = hi;
            parts_ = parts;
            left_ = static_cast<int>(parts) - 1;
            round_++;
        }
        wake_.notify_all();
        part(cut(0), cut(1));
        std::unique_lock lock(mutex_);
        done_.wait(lock, [this] { return left_ == 0; });
    }

 private:
    Index cut(Index i) const { return lo_ + (hi_ - lo_) * i / parts_; }

    void serve(int number) {
        std::uint64_t seen = 0;
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return round_ != seen; });
            seen = round_;
            const Index mine = number + 1;
            if (mine >= parts_) continue;
            const Part& part = *part_;
            const Index from = cut(mine), to = cut(mine + 1);
            lock.unlock();
            part(from, to);
            lock.lock();
            if (--left_ == 0) done_.notify_one();
        }
    }

    const pid_t owner_;
    int started_ = 0;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    const Part* part_ = nullptr;
    Index lo_ = 0, hi_ = 0, parts_ = 1;
    int left_ = 0;
    std::uint64_t round_ = 0;
};

std::mutex turn;  // of callers

}  // namespace

int threads() { return wanted; }

void choose_threads(const char* text) {
    std::size_t used = 0;
    int count = 0;
    try {
        count = std::stoi(text, &used);
    } catch (const std::exception&) {
        used = std::string::npos;
    }
    if (used != std::string(text).size() || count < 1 || count > kMost)
        throw std::invalid_argument("GCCOMM_NUM_THREADS must be a number of threads from 1 to " +
                                    std::to_string(kMost) + "; got \"" + text + "\"");
    wanted = count;
}

void share_blocks(Index lo, Index hi, const Part& part) {
    static Workers* workers = nullptr;  // never freed: its threads may outlive all else
    if (wanted == 1 || hi - lo < 2 * kLeast) return part(lo, hi);
    const std::unique_lock lock(turn, std::try_to_lock);
    if (!lock) return part(lo, hi);
    if (workers == nullptr || !workers->usable()) workers = new Workers(wanted - 1);
    workers->run(lo, hi, part);
}

}  // namespace gccomm

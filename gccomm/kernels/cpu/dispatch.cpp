#include "dispatch.h"

#include <atomic>
#include <stdexcept>

namespace gccomm {

#define GCCOMM_DECLARE(level)     \
    namespace level {             \
    extern const Kernels kernels; \
    }
#if defined(__x86_64__) && !defined(GCCOMM_PORTABLE)
#define GCCOMM_X86
GCCOMM_DECLARE(v2)
GCCOMM_DECLARE(v3)
GCCOMM_DECLARE(v4)
#else
GCCOMM_DECLARE(generic)
#endif
#undef GCCOMM_DECLARE

namespace {

struct Level {
    std::string name;
    const Kernels* kernels;
    bool usable;
};

const std::vector<Level>& levels() {
#if defined(GCCOMM_X86)
    __builtin_cpu_init();
    static const std::vector<Level> all = {
        {"x86-64-v2", &v2::kernels, __builtin_cpu_supports("x86-64-v2") != 0},
        {"x86-64-v3", &v3::kernels, __builtin_cpu_supports("x86-64-v3") != 0},
        {"x86-64-v4", &v4::kernels, __builtin_cpu_supports("x86-64-v4") != 0},
    };
#else
    static const std::vector<Level> all = {{"generic", &generic::kernels, true}};
#endif
    return all;
}

const Level& best_level() {
    const Level* best = nullptr;
    for (const Level& level : levels())
        if (level.usable) best = &level;
    if (best == nullptr) throw std::runtime_error("gccomm needs a CPU of level x86-64-v2 (SSE4.2) or later");
    return *best;
}

std::atomic<const Level*>& current() {
    static std::atomic<const Level*> level{&best_level()};
    return level;
}

}  // namespace

std::vector<std::string> usable_levels() {
    std::vector<std::string> names;
    for (const Level& level : levels())
        if (level.usable) names.push_back(level.name);
    return names;
}

const std::string& current_level() { return current().load()->name; }

void choose_level(const std::string& name) {
    std::string known;
    for (const Level& level : levels()) {
        if (!level.usable) continue;
        if (level.name == name) {
            current().store(&level);
            return;
        }
        known += (known.empty() ? "" : ", ") + level.name;
    }
    throw std::invalid_argument("no instruction-set level \"" + name +
                                "\" on this machine; there are: " + known);
}

const Kernels& kernels() { return *current().load(std::memory_order_relaxed)->kernels; }

}  // namespace gccomm

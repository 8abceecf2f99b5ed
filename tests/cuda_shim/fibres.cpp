// Runs the kernels on the CPU: fibres, barriers, and a launch by name.
//
// A fibre runs until a barrier. Which one is next is the schedule: ascending, descending, or drawn at random,
// anew at each barrier; kernels that lack a barrier give different results. A fibre that ends, or a warp that
// waits elsewhere, while others wait at a barrier is an error.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels.inc"  // the text that is compiled for the device

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

Index threadIdx{}, blockIdx{}, blockDim{}, gridDim{};

namespace {

constexpr int kMost = 1024;  // threads of a thread block
constexpr std::size_t kStack = 256 << 10;

enum class State { ready, at_block, at_warp, done };

struct Fibre {
    ucontext_t context;
    jmp_buf place;
    bool begun = false;
    State state = State::done;
    void* stack = nullptr;
    void* fake = nullptr;
};

struct Exchange {
    unsigned values[2][32];
    int turn[32];
};

Fibre fibres[kMost];
Exchange exchanges[kMost / 32];
int current = 0, count = 0;
unsigned random_state = 0;
const char* failure = nullptr;
void (*body)(void*) = nullptr;
void* body_argument = nullptr;

#if defined(__SANITIZE_ADDRESS__)
// With the sanitizer every switch is announced, and made by the C library alone.
ucontext_t scheduler_context;
void* scheduler_fake = nullptr;
const void* scheduler_stack = nullptr;
std::size_t scheduler_size = 0;

void spoil_shared() {}

void resume(Fibre& f) {
    __sanitizer_start_switch_fiber(&scheduler_fake, f.stack, kStack);
    swapcontext(&scheduler_context, &f.context);
    __sanitizer_finish_switch_fiber(scheduler_fake, nullptr, nullptr);
}

void leave(Fibre& f) {
    const bool last = f.state == State::done;
    __sanitizer_start_switch_fiber(last ? nullptr : &f.fake, scheduler_stack, scheduler_size);
    swapcontext(&f.context, &scheduler_context);
    __sanitizer_finish_switch_fiber(f.fake, &scheduler_stack, &scheduler_size);
}

void arrive() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size); }
#else
}  // namespace
extern "C" char __start_gccomm_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_gccomm_shared[] __attribute__((weak, visibility("hidden")));
namespace {

// What thread blocks share begins as rubbish, not as what the one before left.
void spoil_shared() {
    std::memset(__start_gccomm_shared, 0xA5,
                static_cast<std::size_t>(__stop_gccomm_shared - __start_gccomm_shared));
}

jmp_buf scheduler;

void resume(Fibre& f) {
    if (_setjmp(scheduler) != 0) return;
    if (f.begun) _longjmp(f.place, 1);
    f.begun = true;
    setcontext(&f.context);
}

void leave(Fibre& f) {
    if (_setjmp(f.place) == 0) _longjmp(scheduler, 1);
}

void arrive() {}
#endif

void enter() {
    arrive();
    body(body_argument);
    Fibre& mine = fibres[current];
    mine.state = State::done;
    leave(mine);
    std::abort();
}

void wait(State state) {
    Fibre& mine = fibres[current];
    mine.state = state;
    leave(mine);
}

void prepare(int i) {
    Fibre& f = fibres[i];
    if (f.stack == nullptr) f.stack = std::malloc(kStack);
    f.begun = false;
    f.state = State::ready;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack;
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
}

unsigned draw() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    random_state ^= random_state << 5;
    return random_state;
}

void arrange(std::vector<int>& order, int schedule) {
    if (schedule == 1) std::sort(order.rbegin(), order.rend());
    if (schedule != 2) return;
    for (std::size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[draw() % i]);
}

bool all(int from, int to, State state) {
    for (int i = from; i < to; i++)
        if (fibres[i].state != state) return false;
    return true;
}

void release(int from, int to) {
    for (int i = from; i < to; i++) fibres[i].state = State::ready;
}

// Lets those go on that all wait at the same barrier; false if nobody can.
bool open_barriers() {
    if (all(0, count, State::at_block)) {
        release(0, count);
        return true;
    }
    bool opened = false;
    for (int warp = 0; warp < count; warp += 32) {
        const int end = std::min(warp + 32, count);
        if (!all(warp, end, State::at_warp)) continue;
        release(warp, end);
        opened = true;
    }
    return opened;
}

void run_block(int schedule) {
    spoil_shared();
    std::memset(exchanges, 0, sizeof exchanges);
    for (int i = 0; i < count; i++) prepare(i);
    std::vector<int> order(static_cast<std::size_t>(count));
    while (!all(0, count, State::done)) {
        for (int i = 0; i < count; i++) order[static_cast<std::size_t>(i)] = i;
        arrange(order, schedule);
        for (const int i : order) {
            if (fibres[i].state != State::ready) continue;
            current = i;
            threadIdx = {static_cast<unsigned>(i), 0, 0};
            resume(fibres[i]);
        }
        if (!all(0, count, State::done) && !open_barriers()) {
            failure = "some threads wait at a barrier that others never reach";
            return;
        }
    }
}

template <class... Args>
struct Call {
    void (*kernel)(Args...);
    void** args;
    template <std::size_t... i>
    void run(std::index_sequence<i...>) const {
        kernel(*static_cast<std::remove_reference_t<Args>*>(args[i])...);
    }
    static void begin(void* self) { static_cast<Call*>(self)->run(std::index_sequence_for<Args...>{}); }
};

// Sets what all fibres are to run.
template <class... Args>
void start(void (*kernel)(Args...), void** args, int blocks, int schedule) {
    Call<Args...> call{kernel, args};
    body = Call<Args...>::begin;
    body_argument = &call;
    for (int block = 0; block < blocks && failure == nullptr; block++) {
        blockIdx = {static_cast<unsigned>(block), 0, 0};
        run_block(schedule);
    }
    body_argument = nullptr;
}

}  // namespace

void __syncthreads() { wait(State::at_block); }

unsigned __shfl_xor_sync(unsigned mask, unsigned value, int lanes) {
    if (mask != 0xFFFFFFFFu) std::abort();
    const int lane = current % 32;
    Exchange& exchange = exchanges[current / 32];
    const int turn = exchange.turn[lane]++ % 2;
    exchange.values[turn][lane] = value;
    wait(State::at_warp);
    return exchange.values[turn][lane ^ lanes];
}

// Runs a kernel, and returns what went wrong, or null. `schedule`: 0 ascending, 1 descending, 2 at random.
extern "C" const char* shim_launch(const char* name, int blocks, int threads, void** args, int schedule,
                                   unsigned seed) {
    static std::mutex turn;
    const std::lock_guard<std::mutex> guard(turn);
    count = threads;
    blockDim = {static_cast<unsigned>(threads), 1, 1};
    gridDim = {static_cast<unsigned>(blocks), 1, 1};
    random_state = seed | 1;
    failure = nullptr;
#define GCCOMM_CASE(kernel) \
    if (std::strcmp(name, #kernel) == 0) return start(kernel, args, blocks, schedule), failure;
    GCCOMM_KERNELS(GCCOMM_CASE)
    return "no such kernel";
}

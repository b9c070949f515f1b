// The scheduler: fibers, barriers, warp collectives, shared memory, asynchronous copies.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "dspark/device.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace dspark::shim {
namespace {

constexpr size_t STACK_BYTES = 128 * 1024;
constexpr int MAX_THREADS = 1024;

// ---- Changing stacks. swapcontext makes two system calls each time, so x86-64 has its own dozen instructions.

#if defined(__x86_64__)
struct Context {
    void* stack_pointer = nullptr;
};
extern "C" void dspark_shim_swap(Context* from, Context* to);
asm(R"(
    .text
    .hidden dspark_shim_swap
    .globl dspark_shim_swap
    .type dspark_shim_swap, @function
dspark_shim_swap:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size dspark_shim_swap, .-dspark_shim_swap
)");
void swap(Context& from, Context& to) { dspark_shim_swap(&from, &to); }
void prepare(Context& context, unsigned char* stack, void (*entry)()) {
    // As if `entry` had been called: six registers, its address, and where its return address would be.
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES) - 8;
    for (int i = 0; i < 8; ++i) top[i] = nullptr;
    top[6] = reinterpret_cast<void*>(entry);
    context.stack_pointer = top;
}
#else
struct Context {
    ucontext_t context;
};
void swap(Context& from, Context& to) { swapcontext(&from.context, &to.context); }
void prepare(Context& context, unsigned char* stack, void (*entry)()) {
    getcontext(&context.context);
    context.context.uc_stack.ss_sp = stack;
    context.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&context.context, entry, 0);
}
#endif

struct Copy {
    void* to;
    const void* from;
    bool valid;
};

enum class State { ready, in_barrier, in_collective, done };

struct Fiber {
    Context context;
    const void* stack = nullptr;  // lowest address
    size_t stack_bytes = 0;
    void* sanitizer_state = nullptr;
    State state = State::done;
    const char *operation = nullptr, *file = nullptr;  // what it waits for, where
    int line = 0;
    std::vector<Copy> copies;    // asynchronous, not arrived
    std::vector<size_t> groups;  // sizes of the closed groups among them, oldest first
};

struct Warp {
    uint32_t ready = 0;
    int arrived = 0;  // lanes in the collective
    void* given[32];
};

struct Scheduler {
    Fiber outside;  // the caller of run()
    Fiber fibers[MAX_THREADS];
    Warp warps[MAX_THREADS / 32];
    int order[MAX_THREADS / 32];  // of the warps until the next barrier
    Fiber *current = &outside, *previous = nullptr;
    int threads = 0, in_barrier = 0, done = 0;
    void (*body)(const void*) = nullptr;
    const void* arguments = nullptr;
    unsigned char* shared = nullptr;
    size_t shared_bytes = 0;
    uint64_t random_state = 0x9e3779b97f4a7c15, switches = 0;
};

Scheduler scheduler;
constexpr auto& s = scheduler;

uint32_t random_number() {  // xorshift64*
    s.random_state ^= s.random_state >> 12;
    s.random_state ^= s.random_state << 25;
    s.random_state ^= s.random_state >> 27;
    return static_cast<uint32_t>(s.random_state * 0x2545f4914f6cdd1d >> 32);
}

template <typename V>
void shuffle_order(V* values, size_t count) {
    for (size_t i = count; i > 1; --i) std::swap(values[i - 1], values[random_number() % i]);
}

int index_of(const Fiber* fiber) { return static_cast<int>(fiber - s.fibers); }

void arrived_here() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(s.current->sanitizer_state, &s.previous->stack, &s.previous->stack_bytes);
#endif
    if (s.current != &s.outside) threadIdx.x = static_cast<unsigned>(index_of(s.current));
}

void switch_to(Fiber* to) {
    Fiber* from = s.current;
    if (to == from) return;
    ++s.switches;
    s.previous = from;
    s.current = to;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from->sanitizer_state, to->stack, to->stack_bytes);
#endif
    swap(from->context, to->context);
    arrived_here();
}

[[noreturn]] void fail_stuck() {
    std::fprintf(stderr, "dspark shim: block (%u, %u, %u) of %u threads is stuck: %d have ended\n", blockIdx.x,
                 blockIdx.y, blockIdx.z, blockDim.x, s.done);
    const char* file = nullptr;
    for (int i = 0, line = -1; i < s.threads; ++i) {  // one line for each run of threads that wait at one place
        const Fiber& fiber = s.fibers[i];
        if (fiber.state == State::done || (fiber.line == line && fiber.file == file)) continue;
        std::fprintf(stderr, "  thread %d and on: %s at %s:%d\n", i, fiber.operation, fiber.file, fiber.line);
        file = fiber.file, line = fiber.line;
    }
    fail("a barrier or a warp operation that some threads never reach");
}

// The next fiber to run: a random ready lane of the first warp in the order that has one.
Fiber* next() {
    for (int i = 0; i < s.threads / 32; ++i) {
        const int warp = s.order[i];
        if (const uint32_t ready = s.warps[warp].ready) {
            const int turn = static_cast<int>(random_number() >> 27);
            const uint32_t turned = ready >> turn | ready << ((32 - turn) & 31);
            return &s.fibers[warp * 32 + (__builtin_ctz(turned) + turn) % 32];
        }
    }
    if (s.done != s.threads) fail_stuck();
    return &s.outside;
}

void wait(State state, const char* operation, const char* file, int line) {
    Fiber* self = s.current;
    self->state = state;
    self->operation = operation, self->file = file, self->line = line;
    s.warps[index_of(self) / 32].ready &= ~(1u << index_of(self) % 32);
}

void set_ready(int index) {
    s.fibers[index].state = State::ready;
    s.warps[index / 32].ready |= 1u << index % 32;
}

void check_same_place(const Fiber& one, const Fiber& other) {
    if (one.line == other.line && std::strcmp(one.file, other.file) == 0) return;
    fail("threads %d and %d have diverged: %s at %s:%d, %s at %s:%d", index_of(&one), index_of(&other), one.operation,
         one.file, one.line, other.operation, other.file, other.line);
}

// A fiber lives on from block to block: each round of the loop is one thread of one block.
void fiber_main() {
    arrived_here();
    for (;;) {
        s.body(s.arguments);
        if (!s.current->copies.empty()) fail("thread %u ends with copies that it never waited for", threadIdx.x);
        s.current->groups.clear();
        wait(State::done, "end", "", 0);
        ++s.done;
        switch_to(next());
    }
}

void make_fiber(Fiber& fiber) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    void* memory = mmap(nullptr, page + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) fail("no memory for the stack of a fiber");
    unsigned char* stack = static_cast<unsigned char*>(memory) + page;  // below it the guard
    fiber.stack = stack;
    fiber.stack_bytes = STACK_BYTES;
    prepare(fiber.context, stack, fiber_main);
}

void run_block() {
    s.in_barrier = s.done = 0;
    for (int i = 0; i < s.threads; ++i) {
        if (!s.fibers[i].stack) make_fiber(s.fibers[i]);
        set_ready(i);
    }
    for (int i = 0; i < s.threads / 32; ++i) {
        s.warps[i].arrived = 0;
        s.order[i] = i;
    }
    shuffle_order(s.order, s.threads / 32);
    const std::align_val_t alignment{128};
    s.shared = static_cast<unsigned char*>(operator new(s.shared_bytes, alignment));
    std::memset(s.shared, 0xff, s.shared_bytes);
    switch_to(next());
    operator delete(s.shared, alignment);
}

}  // namespace

void set_seed(uint64_t seed) {
    s.random_state = (seed + 1) * 0x9e3779b97f4a7c15 | 1;
    for (int i = 0; i < 4; ++i) random_number();
}

uint64_t switches() { return s.switches; }

void fail(const char* format, ...) {
    std::fprintf(stderr, "dspark shim: ");
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "\n");
    std::abort();
}

void block_barrier(const char* file, int line) {
    wait(State::in_barrier, "sync_block", file, line);
    if (++s.in_barrier == s.threads) {
        for (int i = 0; i < s.threads; ++i) {
            check_same_place(s.fibers[i], *s.current);
            set_ready(i);
        }
        s.in_barrier = 0;
        shuffle_order(s.order, s.threads / 32);
    }
    switch_to(next());
}

void warp_collective(const char* operation, const char* file, int line, void* given, Combine combine) {
    const int index = index_of(s.current), first = index / 32 * 32;
    Warp& warp = s.warps[index / 32];
    wait(State::in_collective, operation, file, line);
    warp.given[index - first] = given;
    if (++warp.arrived == 32) {
        for (int i = first; i < first + 32; ++i) {
            check_same_place(s.fibers[i], *s.current);
            set_ready(i);
        }
        warp.arrived = 0;
        combine(warp.given);
    }
    switch_to(next());
}

Status run(dim3 grid, unsigned threads, size_t shared_bytes, void (*body)(const void*), const void* context) {
    const bool fits =
        grid.x >= 1 && grid.x < 1u << 31 && grid.y >= 1 && grid.y < 65536 && grid.z >= 1 && grid.z < 65536;
    if (!fits || threads == 0 || threads > MAX_THREADS || shared_bytes > MAX_SHARED_BYTES) return Status::launch_failed;
    if (threads % 32 != 0) fail("a block of %u threads: not a multiple of 32", threads);
    if (s.current != &s.outside) fail("a launch from inside of a kernel");
    gridDim = grid;
    blockDim = dim3(threads);
    s.threads = static_cast<int>(threads);
    s.shared_bytes = shared_bytes;
    s.body = body;
    s.arguments = context;
    std::vector<size_t> blocks(size_t{grid.x} * grid.y * grid.z);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
    shuffle_order(blocks.data(), blocks.size());
    for (size_t block : blocks) {
        blockIdx = dim3(static_cast<unsigned>(block % grid.x), static_cast<unsigned>(block / grid.x % grid.y),
                        static_cast<unsigned>(block / grid.x / grid.y));
        run_block();
    }
    return Status::ok;
}

void check_aligned(const void* pointer, const char* what, const char* file, int line) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) fail("%s a misaligned address at %s:%d", what, file, line);
}

void check_shared(const void* pointer, const char* what, const char* file, int line) {
    check_aligned(pointer, what, file, line);
    const unsigned char* byte = static_cast<const unsigned char*>(pointer);
    if (byte < s.shared || byte + 16 > s.shared + s.shared_bytes) {
        fail("%s an address outside of the block's %zu bytes of shared memory at %s:%d", what, s.shared_bytes, file,
             line);
    }
}

unsigned char* shared_memory() { return s.shared; }

void copy_async(void* shared, const void* global, bool valid) { s.current->copies.push_back({shared, global, valid}); }

void copy_async_commit() {
    size_t open = s.current->copies.size();
    for (size_t group : s.current->groups) open -= group;
    s.current->groups.push_back(open);
}

void copy_async_wait(size_t newest) {
    std::vector<Copy>& copies = s.current->copies;
    std::vector<size_t>& groups = s.current->groups;
    if (groups.size() <= newest) return;
    size_t arrived = 0;
    for (size_t i = 0; i < groups.size() - newest; ++i) arrived += groups[i];
    for (size_t i = 0; i < arrived; ++i) {
        if (copies[i].valid) {
            std::memcpy(copies[i].to, copies[i].from, 16);
        } else {
            std::memset(copies[i].to, 0, 16);
        }
    }
    copies.erase(copies.begin(), copies.begin() + static_cast<ptrdiff_t>(arrived));
    groups.erase(groups.begin(), groups.end() - static_cast<ptrdiff_t>(newest));
}

}  // namespace dspark::shim

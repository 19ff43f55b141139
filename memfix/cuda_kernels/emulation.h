// CUDA's language for a compiler of the host: threads of a block take turns, global memory is counted and checked.
//
// Every thread is a fiber that runs until __syncthreads or its end, in the order of the threads and in every second
// round backwards. So a missing barrier shows: a thread reads what another has not written yet, or has written over.

#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__ static
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __syncthreads() emulation::barrier()

struct dim3 {
    unsigned x, y, z;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

static inline float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

namespace emulation {

struct Traffic {
    uint64_t loads, stores, requests, sectors;
};
// by pointer, warp and the how-manieth load of a thread: one request of a warp, where all its threads load alike
using Requests = std::map<std::tuple<int, unsigned, uint64_t>, std::set<uint64_t>>;

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 * 1024);
    bool ended = false;
    std::map<int, uint64_t> loads;
};

static Traffic *traffic;
static Requests requests;
static std::vector<Fiber> fibers;
static size_t running;
static ucontext_t scheduler;
static std::function<void()> body;
static std::string fault;

struct Fault {};

[[noreturn]] static void fail(const std::string &what) {
    auto place = [](dim3 at) {
        return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
    };
    fault = "thread " + place(threadIdx) + " of block " + place(blockIdx) + " " + what;
    throw Fault{};
}

static void barrier() { swapcontext(&fibers[running].context, &scheduler); }

static void run_thread() {
    try {
        body();
    } catch (const Fault &) {
    }
    fibers[running].ended = true;
}

// a pointer to global memory, of a tensor with this many elements
template <typename T> class Global {
  public:
    Global(void *start, int64_t size, int number, const char *name)
        : start_(static_cast<T *>(start)), size_(size), number_(number), name_(name) {}

    class Element {
      public:
        Element(const Global &memory, int64_t at) : memory_(memory), at_(at) {}
        operator T() const { return memory_.load(at_); }
        template <typename V> const Element &operator=(V value) const { return memory_.store(at_, value), *this; }

      private:
        const Global &memory_;
        int64_t at_;
    };
    Element operator[](int64_t at) const { return {*this, at}; }

  private:
    T *start_;
    int64_t size_;
    int number_;
    const char *name_;

    T *at(int64_t at, const char *does) const {
        if (at < 0 || at >= size_)
            fail(std::string(does) + " " + name_ + "[" + std::to_string(at) + "], which has " + std::to_string(size_) +
                 " elements");
        return start_ + at;
    }
    T load(int64_t index) const {
        T *address = at(index, "reads");
        traffic->loads++;
        uint64_t ordinal = fibers[running].loads[number_]++;
        requests[{number_, unsigned(running / 32), ordinal}].insert(reinterpret_cast<uintptr_t>(address) / 32);
        return *address;
    }
    template <typename V> void store(int64_t index, V value) const {
        *at(index, "writes") = value;
        traffic->stores++;
    }
};

static void run_block() {
    size_t threads = size_t(blockDim.x) * blockDim.y * blockDim.z;
    if (fibers.size() < threads) fibers.resize(threads);
    for (size_t i = 0; i < threads; i++) {
        Fiber &fiber = fibers[i];
        fiber.ended = false;
        fiber.loads.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, run_thread, 0);
    }
    bool backwards = false;
    for (size_t ended = 0; ended < threads && fault.empty(); backwards = !backwards) {
        for (size_t i = 0; i < threads && fault.empty(); i++) {
            running = backwards ? threads - 1 - i : i;
            threadIdx = {unsigned(running % blockDim.x), unsigned(running / blockDim.x % blockDim.y),
                         unsigned(running / blockDim.x / blockDim.y)};
            swapcontext(&scheduler, &fibers[running].context);
            ended += fibers[running].ended;
        }
        if (fault.empty() && ended > 0 && ended < threads)
            fault = "__syncthreads is reached by " + std::to_string(threads - ended) + " of " +
                    std::to_string(threads) + " threads of a block, and the others have ended";
    }
    for (auto &[key, sectors] : requests) {
        traffic->requests++;
        traffic->sectors += sectors.size();
    }
    requests.clear();
}

// what went wrong, or nullptr
static const char *run(const unsigned *grid, const unsigned *block, Traffic *counted, std::function<void()> kernel) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    traffic = counted;
    body = std::move(kernel);
    fault.clear();
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x && fault.empty(); blockIdx.x++) run_block();
    return fault.empty() ? nullptr : fault.c_str();
}

} // namespace emulation

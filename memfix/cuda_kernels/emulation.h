// Emulates CUDA C++ on the host: the threads of a block take turns, and accesses to global memory are counted and checked.
//
// Every thread is a fiber that runs until it ends or waits for other threads. Fibers run in thread order, and in reverse
// order in every second round. A missing barrier therefore shows: a thread reads a value that another has not written
// yet or has overwritten. Warps wait for each other only at __syncthreads.

#pragma once
#define MEMFIX_EMULATION
#include <cmath>
#include <csetjmp>
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
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __syncthreads() emulation::barrier()

struct dim3 {
    unsigned x, y, z;
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

struct bfloat16 {
    unsigned short bits;
};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};

static inline float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

namespace emulation {

struct Traffic {
    uint64_t loads, stores, requests, sectors;
};
// (pointer, warp, n) -> sectors that the n-th loads of the warp's threads from the pointer touch: one request if all threads
// of the warp do the same loads
using Requests = std::map<std::tuple<int, unsigned, uint64_t>, std::set<uint64_t>>;

enum class Waits { nobody, warp, block };

// One thread's share of a product of four warps that is not awaited yet: two rows of the left matrix, times a matrix in
// shared memory.
struct Product {
    float (*sums)[4], rows[2][16];
    unsigned at, panel_bytes, swizzle, num_tiles;
    bool is_transposed, adds;
};

// setcontext starts a fiber; later switches use longjmp, which needs no system call.
struct Fiber {
    ucontext_t context;
    jmp_buf place;
    bool started = false;
    std::vector<char> stack = std::vector<char>(256 * 1024);
    Waits waits_for = Waits::nobody;
    bool ended = false;
    std::map<int, uint64_t> loads;
    unsigned num_exchanges;
    std::vector<std::vector<Product>> groups; // committed groups of products, then the one being built
};

static Traffic *traffic;
static Requests requests;
static std::vector<Fiber> fibers;
static size_t running;
static jmp_buf scheduler;
static std::function<void()> body;
static std::string fault;
static const unsigned MOST_SHARED = 232448; // bytes of shared memory that a block of an H200 may have
static unsigned shared_bytes;               // dynamic shared memory of a block in the current launch

struct Fault {};

[[noreturn]] static void fail(const std::string &what) {
    auto place = [](dim3 at) {
        return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
    };
    fault = "thread " + place(threadIdx) + " of block " + place(blockIdx) + " " + what;
    throw Fault{};
}

static void wait_for(Waits others) {
    fibers[running].waits_for = others;
    if (_setjmp(fibers[running].place) == 0) _longjmp(scheduler, 1);
}
static void barrier() { wait_for(Waits::block); }

static void run_thread() {
    try {
        body();
    } catch (const Fault &) {
    }
    fibers[running].ended = true;
    _longjmp(scheduler, 1);
}

// a pointer to a tensor in global memory; knows the number of elements, to check bounds
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
    bool is_not_null() const { return start_ != nullptr; }
    // one load instruction for several neighbouring elements
    template <typename Bytes> Bytes load_together(int64_t index) const {
        constexpr int64_t number = sizeof(Bytes) / sizeof(T);
        T *first = at(index, "reads"), *last = at(index + number - 1, "reads");
        check_alignment(first, sizeof(Bytes), "reads", index);
        count_load(first, last);
        traffic->loads += number - 1;
        Bytes bytes;
        std::memcpy(&bytes, first, sizeof bytes);
        return bytes;
    }
    template <typename Bytes> void store_together(int64_t index, const Bytes &bytes) const {
        constexpr int64_t number = sizeof(Bytes) / sizeof(T);
        T *first = at(index, "writes");
        at(index + number - 1, "writes");
        check_alignment(first, sizeof(Bytes), "writes", index);
        traffic->stores += number;
        std::memcpy(first, &bytes, sizeof bytes);
    }

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
        count_load(address, address);
        return *address;
    }
    void check_alignment(const T *address, size_t bytes, const char *does, int64_t index) const {
        if (reinterpret_cast<uintptr_t>(address) % bytes)
            fail(std::string(does) + " " + std::to_string(bytes) + " bytes of " + name_ + " from [" +
                 std::to_string(index) + "] on, which does not begin at a multiple of them");
    }
    void count_load(T *first, T *last) const {
        traffic->loads++;
        uint64_t ordinal = fibers[running].loads[number_]++;
        auto &sectors = requests[{number_, unsigned(running / 32), ordinal}];
        for (auto *address : {first, last}) sectors.insert(reinterpret_cast<uintptr_t>(address) / 32);
    }
    template <typename V> void store(int64_t index, V value) const {
        *at(index, "writes") = value;
        traffic->stores++;
    }
};

static void resume(size_t thread) {
    running = thread;
    threadIdx = {unsigned(thread % blockDim.x), unsigned(thread / blockDim.x % blockDim.y),
                 unsigned(thread / blockDim.x / blockDim.y)};
    Fiber &fiber = fibers[thread];
    fiber.waits_for = Waits::nobody;
    if (_setjmp(scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}

// run the threads of a warp until all of them wait for the block or have ended
static void run_warp(size_t first, size_t end, bool backwards) {
    for (size_t together = end - first; together == end - first && fault.empty(); backwards = !backwards) {
        together = 0;
        for (size_t i = first; i < end && fault.empty(); i++) {
            size_t thread = backwards ? end - 1 - (i - first) : i;
            if (!fibers[thread].ended) resume(thread);
            together += fibers[thread].waits_for == Waits::warp;
        }
        if (fault.empty() && together > 0 && together < end - first)
            fault = std::to_string(together) + " of " + std::to_string(end - first) +
                    " threads of a warp wait for the others, which go another way";
    }
}

static void run_block() {
    size_t threads = size_t(blockDim.x) * blockDim.y * blockDim.z, warps = (threads + 31) / 32;
    if (fibers.size() < threads) fibers.resize(threads);
    for (size_t i = 0; i < threads; i++) {
        Fiber &fiber = fibers[i];
        fiber.ended = fiber.started = false;
        fiber.waits_for = Waits::nobody;
        fiber.loads.clear();
        fiber.num_exchanges = 0;
        fiber.groups.assign(1, {});
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_thread, 0);
    }
    bool backwards = false;
    for (size_t ended = 0; ended < threads && fault.empty(); backwards = !backwards) {
        for (size_t i = 0; i < warps && fault.empty(); i++) {
            size_t first = 32 * (backwards ? warps - 1 - i : i);
            run_warp(first, first + 32 < threads ? first + 32 : threads, backwards);
        }
        ended = 0;
        for (size_t i = 0; i < threads; i++) ended += fibers[i].ended;
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

// run a launch; return the error message, or nullptr
static const char *run(const unsigned *grid, const unsigned *block, unsigned asked_bytes, Traffic *counted,
                       std::function<void()> kernel) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    traffic = counted;
    body = std::move(kernel);
    shared_bytes = asked_bytes;
    fault.clear();
    if (shared_bytes > MOST_SHARED)
        fault = "the launch asks for " + std::to_string(shared_bytes) + " bytes of shared memory, and a block has at most " +
                std::to_string(MOST_SHARED);
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x && fault.empty(); blockIdx.x++) run_block();
    return fault.empty() ? nullptr : fault.c_str();
}

// ---------------------------------------------------------------- exchange between the threads of a warp
// Every thread stores its operands, waits for its warp, and then reads the operands of all. Two buffers in alternation
// suffice: before a thread stores into the first one again, the whole warp has read from it.
struct Operands {
    unsigned values[6];
};
static std::vector<Operands> exchange_buffers[2];

static const Operands *exchange(const Operands &mine) {
    size_t me = running, first = me / 32 * 32;
    for (auto &place : exchange_buffers)
        if (place.size() < fibers.size()) place.resize(fibers.size());
    auto &place = exchange_buffers[fibers[me].num_exchanges++ % 2];
    place[me] = mine;
    wait_for(Waits::warp);
    return &place[first];
}

} // namespace emulation

// ---------------------------------------------------------------- instructions
static inline unsigned pack(float low, float high) {
    auto rounded = [](float value) -> unsigned {
        unsigned bits = __float_as_uint(value);
        if (value != value) return 0x7fff;
        return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    };
    return rounded(low) | rounded(high) << 16;
}
static inline float power_of_two(float exponent) { return std::exp2(exponent); }

template <typename T> static inline void store16(const emulation::Global<T> &to, long long at, uint4 value) {
    to.store_together(at, value);
}
template <typename T> static inline void store8(const emulation::Global<T> &to, long long at, uint2 value) {
    to.store_together(at, value);
}
template <typename T> static inline void store4(const emulation::Global<T> &to, long long at, unsigned value) {
    to.store_together(at, value);
}

static inline int opaque(int value) { return value; }
static inline int uniform(int value) { return value; }
template <typename T> static inline bool is_not_null(const emulation::Global<T> &pointer) { return pointer.is_not_null(); }
static inline float shuffle(float value, int lane) {
    return __int_as_float(emulation::exchange({{__float_as_uint(value)}})[lane].values[0]);
}
static inline bool any_lane(bool flag) {
    const emulation::Operands *all = emulation::exchange({{flag}});
    bool any = false;
    for (int lane = 0; lane < 32; lane++) any |= all[lane].values[0] != 0;
    return any;
}
static inline unsigned transposed(unsigned pair) {
    const emulation::Operands *all = emulation::exchange({{pair}});
    unsigned lane = emulation::running % 32, column_pair = 0;
    for (unsigned side = 0; side < 2; side++) {
        unsigned row = 2 * (lane % 4) + side, column = lane / 4;
        column_pair |= (all[4 * row + column / 2].values[0] >> 16 * (column % 2) & 0xffff) << 16 * side;
    }
    return column_pair;
}
// sums[16, 8] += a[16, 16] @ b[16, 8] of bfloat16; each thread has its fragments, as for mma.m16n8k16
static inline void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const emulation::Operands *all = emulation::exchange({{a[0], a[1], a[2], a[3], b0, b1}});
    unsigned lane = emulation::running % 32;
    auto half = [](unsigned both, unsigned side) { return __int_as_float(side ? both & 0xffff0000u : both << 16); };
    for (unsigned e = 0; e < 4; e++) {
        unsigned row = lane / 4 + 8 * (e / 2), column = 2 * (lane % 4) + e % 2;
        for (unsigned k = 0; k < 16; k++) {
            unsigned owner = k % 8 / 2, register_a = row / 8 + 2 * (k / 8), register_b = 4 + k / 8;
            sums[e] += half(all[4 * (row % 8) + owner].values[register_a], k % 2) *
                       half(all[4 * column + owner].values[register_b], k % 2);
        }
    }
}
static inline void multiply_floats(float (&sums)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    auto rounded = [](float value) { return (__float_as_uint(value) + 0x1000) & 0xffffe000u; };
    const emulation::Operands *all =
        emulation::exchange({{rounded(a0), rounded(a1), rounded(a2), rounded(a3), rounded(b0), rounded(b1)}});
    unsigned lane = emulation::running % 32;
    for (unsigned e = 0; e < 4; e++) {
        unsigned row = lane / 4 + 8 * (e / 2), column = 2 * (lane % 4) + e % 2;
        for (unsigned k = 0; k < 8; k++)
            sums[e] += __int_as_float(all[4 * (row % 8) + k % 4].values[row / 8 + 2 * (k / 4)]) *
                       __int_as_float(all[4 * column + k % 4].values[4 + k / 4]);
    }
}
static inline unsigned start_of_shared() { return 0; }
namespace emulation {
alignas(1024) static char shared[MOST_SHARED];
// the host address of `bytes` bytes of dynamic shared memory, whose bounds are checked
static char *shared_at(unsigned at, size_t bytes) {
    if (at + bytes > shared_bytes)
        fail("uses byte " + std::to_string(at + bytes) + " of shared memory, of which the launch has " +
             std::to_string(shared_bytes));
    return shared + at;
}
template <typename T> static T load_shared(unsigned at) {
    T value;
    std::memcpy(&value, shared_at(at, sizeof value), sizeof value);
    return value;
}
template <typename T> static void store_shared(unsigned at, const T &value) {
    std::memcpy(shared_at(at, sizeof value), &value, sizeof value);
}
} // namespace emulation
static inline float load_shared_float(unsigned at) { return emulation::load_shared<float>(at); }
static inline void load_matrices(unsigned (&matrices)[4], unsigned at, bool transposes = false) {
    const emulation::Operands *all = emulation::exchange({{at}});
    unsigned lane = emulation::running % 32;
    for (unsigned matrix = 0; matrix < 4; matrix++) {
        matrices[matrix] = 0;
        for (unsigned side = 0; side < 2; side++) {
            unsigned row = lane / 4, column = 2 * (lane % 4) + side;
            if (transposes) std::swap(row, column);
            uint16_t element = emulation::load_shared<uint16_t>(all[8 * matrix + row].values[0] + 2 * column);
            matrices[matrix] |= unsigned(element) << 16 * side;
        }
    }
}
static inline void store_matrices(unsigned at, const unsigned (&matrices)[4]) {
    const emulation::Operands *all = emulation::exchange({{at}});
    unsigned lane = emulation::running % 32;
    for (unsigned matrix = 0; matrix < 4; matrix++)
        emulation::store_shared(all[8 * matrix + lane / 4].values[0] + 4 * (lane % 4), matrices[matrix]);
}
static inline void await_warp() { emulation::wait_for(emulation::Waits::warp); }
static inline void load_transposed(unsigned (&matrices)[4], unsigned at) { load_matrices(matrices, at, true); }
template <typename T>
static inline void async_copy16(unsigned to, const emulation::Global<T> &from, long long at, bool exists = true) {
    emulation::store_shared(to, exists ? from.template load_together<uint4>(at) : uint4{0, 0, 0, 0});
}
static inline unsigned load_shared4(unsigned at) { return emulation::load_shared<unsigned>(at); }
static inline uint2 load_shared8(unsigned at) { return emulation::load_shared<uint2>(at); }
static inline uint4 load_shared16(unsigned at) { return emulation::load_shared<uint4>(at); }
static inline void store_shared4(unsigned at, unsigned value) { emulation::store_shared(at, value); }
static inline void store_shared8(unsigned at, uint2 value) { emulation::store_shared(at, value); }
static inline void store_shared16(unsigned at, uint4 value) { emulation::store_shared(at, value); }
static inline void release_flag(const emulation::Global<int> &ready, long long at) {
    __syncthreads();
    if (threadIdx.x == 0) ready[at] = 1;
}
// blocks run one after the other, so waiting for a later block would never end
static inline void acquire_flag(const emulation::Global<int> &ready, long long at) {
    if (threadIdx.x == 0 && ready[at] == 0) emulation::fail("awaits what no block before it has published");
    __syncthreads();
}
static inline void commit_copies() {}
template <int LATER> static inline void await_copies() {}

// ---------------------------------------------------------------- products of four warps, as Hopper's wgmma
// A product is computed only when it is awaited, so a kernel that reads the sums too early gets wrong values.
#define HAS_WGMMA 1
template <int SWIZZLE> struct WgmmaOperand {
    unsigned at, panel_bytes;
    WgmmaOperand(unsigned at, unsigned panel_bytes = 0) : at(at), panel_bytes(panel_bytes) {}
};
template <bool TRANSPOSED, int SIGN, int N, int SWIZZLE>
static inline void wgmma(float (&sums)[N][4], const unsigned (&a)[4], WgmmaOperand<SWIZZLE> b, bool adds = true) {
    if (blockDim.x % 128) emulation::fail("multiplies with other warps, of which there are not four");
    const emulation::Operands *all = emulation::exchange({{a[0], a[1], a[2], a[3]}});
    unsigned lane = emulation::running % 32;
    emulation::Product product = {sums, {}, b.at, b.panel_bytes, SWIZZLE, N, TRANSPOSED, adds};
    for (unsigned half = 0; half < 2; half++)
        for (unsigned k = 0; k < 16; k++) {
            unsigned both = all[lane / 4 * 4 + k % 8 / 2].values[half + 2 * (k / 8)];
            product.rows[half][k] = SIGN * __int_as_float(k % 2 ? both & 0xffff0000u : both << 16);
        }
    emulation::fibers[emulation::running].groups.back().push_back(product);
}
namespace emulation {
// an element of the matrix in shared memory; like the hardware, this swizzles by bits of the address itself
static float element_of(const Product &product, unsigned row, unsigned column) {
    unsigned bytes = 2 * column, panel = bytes / product.swizzle;
    unsigned at = product.at + panel * product.panel_bytes + row * product.swizzle + bytes % product.swizzle;
    at ^= (at >> 7 & (product.swizzle / 16 - 1)) << 4;
    return __int_as_float(unsigned(load_shared<uint16_t>(at)) << 16);
}
static void compute(const Product &product) {
    for (unsigned n = 0; n < product.num_tiles; n++)
        for (unsigned side = 0; side < 2; side++) {
            unsigned column = 8 * n + 2 * (running % 4) + side;
            float &upper = product.sums[n][side], &lower = product.sums[n][2 + side];
            if (!product.adds) upper = lower = 0.0f;
            for (unsigned k = 0; k < 16; k++) {
                float element = product.is_transposed ? element_of(product, k, column) : element_of(product, column, k);
                upper += product.rows[0][k] * element;
                lower += product.rows[1][k] * element;
            }
        }
}
} // namespace emulation
template <int N, int K> static inline void begin_wgmma(float (&)[N][4], const unsigned (&)[K][4]) {}
static inline void commit_wgmma() { emulation::fibers[emulation::running].groups.emplace_back(); }
template <int LATER, typename... Sums> static inline void await_wgmma(Sums &...) {
    auto &groups = emulation::fibers[emulation::running].groups;
    for (; groups.size() > LATER + 1; groups.erase(groups.begin()))
        for (auto &product : groups.front()) emulation::compute(product);
}
static inline void fence_async_proxy() {}

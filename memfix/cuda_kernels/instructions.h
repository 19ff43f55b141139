// Device functions that kernels may call beyond CUDA C++. This header precedes every source that is compiled for a GPU;
// emulation.h has the same functions for the host.

struct bfloat16 {
    unsigned short bits;
};

// store 16 bytes in one instruction; the compiler may split a plain assignment into stores of four bytes
template <typename T> __device__ void store16(T* to, long long at, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to + at), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w));
}
template <typename T> __device__ void store8(T* to, long long at, uint2 value) {
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(to + at), "r"(value.x), "r"(value.y));
}
__device__ void store4(bfloat16* to, long long at, unsigned value) { *reinterpret_cast<unsigned*>(to + at) = value; }
// round two floats to bfloat16; the first is in the low half
__device__ unsigned pack(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ float power_of_two(float exponent) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
    return power;
}
// sums[16, 8] += a[16, 16] @ b[16, 8] of bfloat16
__device__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// add half a unit of TF32's last mantissa bit, so that the truncation in tensor cores rounds to nearest
__device__ unsigned with_ten_digits(float value) {
    const float leading = __int_as_float(__float_as_uint(value) & 0xff800000u);
    return __float_as_uint(fmaf(leading, 0x1p-11f, value));
}
// sums[16, 8] += a[16, 8] @ b[8, 8] in TF32, with ten mantissa bits
__device__ void multiply_floats(float (&sums)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(with_ten_digits(a0)), "r"(with_ten_digits(a1)), "r"(with_ten_digits(a2)), "r"(with_ten_digits(a3)),
          "r"(with_ten_digits(b0)), "r"(with_ten_digits(b1)));
}
// transpose an 8 x 8 matrix of 16-bit elements; each thread has two elements of row lane/4
__device__ unsigned transposed(unsigned pair) {
    unsigned column_pair;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(column_pair) : "r"(pair));
    return column_pair;
}
// return the value, opaque to the compiler, which then recomputes expressions of it instead of keeping them in registers
__device__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}
template <typename T> __device__ bool is_not_null(const T* pointer) { return pointer != nullptr; }
__device__ float shuffle(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
// broadcast a value that is the same in all lanes; the compiler then knows that branches on it are uniform
__device__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
__device__ bool any_lane(bool flag) { return __any_sync(0xffffffffu, flag); }
// load four 8 x 8 matrices from shared memory; lane 8*i + r passes the address of row r of matrix i
__device__ void load_matrices(unsigned (&matrices)[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(at));
}
__device__ void load_transposed(unsigned (&matrices)[4], unsigned at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(at));
}
// store four 8 x 8 matrices to shared memory, with row addresses as in load_matrices
__device__ void store_matrices(unsigned at, const unsigned (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3]));
}
__device__ void await_warp() { __syncwarp(); }
// copy 16 bytes from global to shared memory asynchronously, or write zeros; prefetches the 128-byte line into L2
template <typename T> __device__ void async_copy16(unsigned to, const T* from, long long at, bool exists = true) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from + at), "r"(exists ? 16 : 0));
}
__device__ unsigned load_shared4(unsigned at) {
    unsigned value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at));
    return value;
}
__device__ uint2 load_shared8(unsigned at) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(at));
    return value;
}
__device__ uint4 load_shared16(unsigned at) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(at));
    return value;
}
__device__ void store_shared16(unsigned at, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w));
}
__device__ void store_shared8(unsigned at, uint2 value) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(value.x), "r"(value.y));
}
__device__ void store_shared4(unsigned at, unsigned value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value));
}
__device__ float load_shared_float(unsigned at) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at));
    return value;
}
// make a block's writes visible to blocks that acquire its flag
__device__ void release_flag(int* ready, long long at) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(ready + at) : "memory");
}
// wait for the flag of another block; it must be an earlier one, since blocks start in order
__device__ void acquire_flag(const int* ready, long long at) {
    int is_ready = threadIdx.x;  // only thread 0 polls
    while (is_ready == 0) {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(is_ready) : "l"(ready + at) : "memory");
        __nanosleep(100);
    }
    __syncthreads();
}
__device__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int LATER> __device__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER)); }
extern __shared__ __align__(1024) char shared[];
__device__ unsigned start_of_shared() { return static_cast<unsigned>(__cvta_generic_to_shared(shared)); }

// ---------------------------------------------------------------- products of four warps: wgmma, on Hopper alone
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WGMMA 1
// The descriptor of a swizzled matrix in shared memory. A panel holds SWIZZLE bytes of each row, row after row; wider rows
// continue in the next panel, panel_bytes further.
template <int SWIZZLE> struct WgmmaOperand {
    unsigned long long descriptor;
    __device__ WgmmaOperand(unsigned at, unsigned panel_bytes = 0)
        : descriptor((at & 0x3ffffu) >> 4 | (unsigned long long)(panel_bytes >> 4) << 16 | (8ull * SWIZZLE >> 4) << 32 |
                     (SWIZZLE == 128 ? 1ull : 2ull) << 62) {}
};
// a compiler barrier for the registers of sums: written before a product begins, and not read before it is awaited
template <int N> __device__ void settle(float (&sums)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
        asm volatile("" : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])::"memory");
}
template <int N, int K> __device__ void begin_wgmma(float (&sums)[N][4], const unsigned (&operand)[K][4]) {
    settle(sums);
#pragma unroll
    for (int k = 0; k < K; ++k)
        asm volatile("" ::"r"(operand[k][0]), "r"(operand[k][1]), "r"(operand[k][2]), "r"(operand[k][3]) : "memory");
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LATER, typename... Sums> __device__ void await_wgmma(Sums&... sums) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
    (settle(sums), ...);
}
// make a thread's copies and writes to shared memory visible to wgmma
__device__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Each of four warps computes 16 rows: sums[16, 8*N] = SIGN * a[16, 16] @ b[16, 8*N], or += if `adds`. b is stored as
// [8*N, 16] unless it is TRANSPOSED.
#define SUMS_OF(four) "+f"(four[0]), "+f"(four[1]), "+f"(four[2]), "+f"(four[3])
template <bool TRANSPOSED, int SIGN, typename Operand>
__device__ void wgmma(float (&sums)[4][4], const unsigned (&a)[4], Operand b, bool adds = true) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %23, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
        "{%16,%17,%18,%19}, %20, adds, %21, 1, %22; }"
        : SUMS_OF(sums[0]), SUMS_OF(sums[1]), SUMS_OF(sums[2]), SUMS_OF(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor), "n"(SIGN), "n"(int(TRANSPOSED)),
          "r"(int(adds)));
}
template <bool TRANSPOSED, int SIGN, typename Operand>
__device__ void wgmma(float (&sums)[8][4], const unsigned (&a)[4], Operand b, bool adds = true) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %39, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, adds, %37, 1, %38; }"
        : SUMS_OF(sums[0]), SUMS_OF(sums[1]), SUMS_OF(sums[2]), SUMS_OF(sums[3]), SUMS_OF(sums[4]), SUMS_OF(sums[5]),
          SUMS_OF(sums[6]), SUMS_OF(sums[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor), "n"(SIGN), "n"(int(TRANSPOSED)),
          "r"(int(adds)));
}
template <bool TRANSPOSED, int SIGN, typename Operand>
__device__ void wgmma(float (&sums)[16][4], const unsigned (&a)[4], Operand b, bool adds = true) {
    asm volatile(
        "{ .reg .pred adds; setp.ne.u32 adds, %71, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "{%64,%65,%66,%67}, %68, adds, %69, 1, %70; }"
        : SUMS_OF(sums[0]), SUMS_OF(sums[1]), SUMS_OF(sums[2]), SUMS_OF(sums[3]), SUMS_OF(sums[4]), SUMS_OF(sums[5]),
          SUMS_OF(sums[6]), SUMS_OF(sums[7]), SUMS_OF(sums[8]), SUMS_OF(sums[9]), SUMS_OF(sums[10]), SUMS_OF(sums[11]),
          SUMS_OF(sums[12]), SUMS_OF(sums[13]), SUMS_OF(sums[14]), SUMS_OF(sums[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor), "n"(SIGN), "n"(int(TRANSPOSED)),
          "r"(int(adds)));
}
#else
#define HAS_WGMMA 0
template <int LATER, typename... Sums> __device__ void await_wgmma(Sums&...) {}
__device__ void fence_async_proxy() {}
#endif

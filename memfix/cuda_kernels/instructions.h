// What kernels may call beyond CUDA's language, for a GPU. Every source is compiled behind it, and on the host behind
// emulation.h, which has the same.

struct bfloat16 {
    unsigned short bits;
};

// by name, for the compiler may cut an assignment into stores of four bytes
template <typename T> __device__ void store16(T* to, long long at, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to + at), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w));
}
template <typename T> __device__ void store8(T* to, long long at, uint2 value) {
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(to + at), "r"(value.x), "r"(value.y));
}
__device__ void store4(bfloat16* to, long long at, unsigned value) { *reinterpret_cast<unsigned*>(to + at) = value; }
// two floats as bfloat16, the first in the low half
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
// sums[16, 8] += a[16, 16] @ b[16, 8]
__device__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// half of the last of ten digits more: the tensor cores leave out what is behind them
__device__ unsigned with_ten_digits(float value) {
    const float leading = __int_as_float(__float_as_uint(value) & 0xff800000u);
    return __float_as_uint(fmaf(leading, 0x1p-11f, value));
}
// sums[16, 8] += a[16, 8] @ b[8, 8] with ten binary digits
__device__ void multiply_floats(float (&sums)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(with_ten_digits(a0)), "r"(with_ten_digits(a1)), "r"(with_ten_digits(a2)), "r"(with_ten_digits(a3)),
          "r"(with_ten_digits(b0)), "r"(with_ten_digits(b1)));
}
// an 8 x 8 matrix, two elements of row lane/4 in each thread
__device__ unsigned transposed(unsigned pair) {
    unsigned turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}
// such that the compiler keeps nothing that comes of it from round to round of a loop, where registers are short
__device__ int found_again(int value) {
    asm volatile("" : "+r"(value));
    return value;
}
template <typename T> __device__ bool is_there(const T* pointer) { return pointer != nullptr; }
__device__ float from_lane(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
__device__ bool any_lane(bool flag) { return __any_sync(0xffffffffu, flag); }
// four 8 x 8 matrices from shared memory; of each, eight lanes say where a row begins
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
// four 8 x 8 matrices into shared memory
__device__ void store_matrices(unsigned at, const unsigned (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(matrices[0]),
                 "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3]));
}
__device__ void await_warp() { __syncwarp(); }
// 16 bytes of global memory, or zeros; the rest of their 128 bytes comes into the L2 cache with them
template <typename T> __device__ void copy16(unsigned to, const T* from, long long at, bool exists = true) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from + at), "r"(exists ? 16 : 0));
}
template <typename T> __device__ void copy4(unsigned to, const T* from, long long at, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from + at), "r"(exists ? 4 : 0));
}
__device__ unsigned take4(unsigned at) {
    unsigned value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at));
    return value;
}
__device__ uint2 take8(unsigned at) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(at));
    return value;
}
__device__ uint4 take16(unsigned at) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(at));
    return value;
}
__device__ void put16(unsigned at, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w));
}
__device__ void put8(unsigned at, uint2 value) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(at), "r"(value.x), "r"(value.y));
}
__device__ void put4(unsigned at, unsigned value) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(value)); }
__device__ float shared_float(unsigned at) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at));
    return value;
}
// a block gives what it wrote to those that await it. Blocks begin in their order, so one may await any before it
__device__ void publish(int* ready, long long at) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(ready + at) : "memory");
}
__device__ void await_published(const int* ready, long long at) {
    int is_ready = threadIdx.x;  // one thread looks
    while (is_ready == 0) {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(is_ready) : "l"(ready + at) : "memory");
        __nanosleep(100);
    }
    __syncthreads();
}
__device__ void end_copies() { asm volatile("cp.async.commit_group;"); }
template <int LATER> __device__ void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER)); }
extern __shared__ __align__(256) char shared[];
__device__ unsigned start_of_shared() { return static_cast<unsigned>(__cvta_generic_to_shared(shared)); }

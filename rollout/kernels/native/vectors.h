// Vectors of 16 floats on every machine: one register of AVX-512, two of AVX2, four of NEON.
//
// The kernels are written once, in terms of these. Each operation works on every lane by itself, so that what a kernel
// computes depends on its own order of operations only; `sum` and `largest` fold the vector in halves.

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define UNROLLED _Pragma("GCC unroll 16")
#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
constexpr int PARTS = LANES * sizeof(float) / REGISTER;
typedef uint16_t bf16;
typedef float FloatPart __attribute__((vector_size(REGISTER)));
typedef int32_t IntPart __attribute__((vector_size(REGISTER)));
typedef uint16_t HalfPart __attribute__((vector_size(REGISTER / 2)));

template <class Part> struct Vector {
    typedef std::remove_reference_t<decltype(Part()[0])> Element;
    Part part[PARTS];
};
typedef Vector<FloatPart> Floats;
typedef Vector<IntPart> Ints;

// What `work` makes of each part. Written without a loop: the compiler then keeps parts in registers.
template <class Result, class Work, int... I>
INLINE Result by_part(Work work, std::integer_sequence<int, I...>) { return {{work(I)...}}; }
template <class Result, class Work> INLINE Result by_part(Work work) {
    return by_part<Result>(work, std::make_integer_sequence<int, PARTS>());
}
template <class V> INLINE V all_of(typename V::Element x) {
    typedef std::remove_reference_t<decltype(V().part[0])> Part;
    return by_part<V>([&](int) { return Part{} + x; });
}
INLINE FloatPart spread(float x) {
#if defined(__AVX512F__)
    return (FloatPart)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (FloatPart)_mm256_set1_ps(x);
#else
    return (FloatPart){x, x, x, x};
#endif
}
INLINE Floats all(float x) { return by_part<Floats>([&](int) { return spread(x); }); }

#define EACH_LANE(OP)                                                                                                 \
    template <class P> INLINE Vector<P> operator OP(const Vector<P>& a, const Vector<P>& b) {                          \
        return by_part<Vector<P>>([&](int i) { return a.part[i] OP b.part[i]; });                                      \
    }                                                                                                                  \
    template <class P> INLINE Vector<P> operator OP(const Vector<P>& a, typename Vector<P>::Element b) {               \
        return by_part<Vector<P>>([&](int i) { return a.part[i] OP b; });                                              \
    }
EACH_LANE(+) EACH_LANE(-) EACH_LANE(*) EACH_LANE(/) EACH_LANE(&) EACH_LANE(<<) EACH_LANE(>>)
#undef EACH_LANE
#define COMPARED(OP)  /* all bits of a lane set where it holds */                                                      \
    template <class P> INLINE Ints operator OP(const Vector<P>& a, const Vector<P>& b) {                               \
        return by_part<Ints>([&](int i) { return (IntPart)(a.part[i] OP b.part[i]); });                                \
    }
COMPARED(<) COMPARED(>=) COMPARED(==)
#undef COMPARED
INLINE Floats operator-(const Floats& a) { return by_part<Floats>([&](int i) { return -a.part[i]; }); }
template <class P> INLINE Vector<P>& operator+=(Vector<P>& a, const Vector<P>& b) { return a = a + b; }

template <class P> INLINE Vector<P> where(const Ints& mask, const Vector<P>& a, const Vector<P>& b) {
    return by_part<Vector<P>>([&](int i) { return mask.part[i] ? a.part[i] : b.part[i]; });
}

template <class Part> INLINE Part load_part(const void* at, int i) {
    Part part;
    std::memcpy(&part, static_cast<const char*>(at) + i * sizeof part, sizeof part);
    return part;
}
INLINE Floats load(const float* at) { return by_part<Floats>([&](int i) { return load_part<FloatPart>(at, i); }); }
INLINE Ints load_ints(const void* at) { return by_part<Ints>([&](int i) { return load_part<IntPart>(at, i); }); }
INLINE void store(float* at, const Floats& v) {
    UNROLLED for (int i = 0; i < PARTS; i++) std::memcpy(at + i * LANES / PARTS, &v.part[i], REGISTER);
}
INLINE Ints lane_numbers() {
    static constexpr int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load_ints(numbers);
}
INLINE Ints bits(const Floats& v) { return by_part<Ints>([&](int i) { return (IntPart)v.part[i]; }); }
INLINE Floats floats(const Ints& v) { return by_part<Floats>([&](int i) { return (FloatPart)v.part[i]; }); }
INLINE Ints truncated(const Floats& v) {
    return by_part<Ints>([&](int i) { return __builtin_convertvector(v.part[i], IntPart); });
}

// a * b + c, rounded once. Nothing else is contracted: see FLAGS.
INLINE FloatPart fused(FloatPart a, FloatPart b, FloatPart c) {
#if defined(__AVX512F__)
    return (FloatPart)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (FloatPart)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (FloatPart)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
#error "the kernels need fused multiply-add: see native.library"
#endif
}
INLINE Floats fused(const Floats& a, const Floats& b, const Floats& c) {
    return by_part<Floats>([&](int i) { return fused(a.part[i], b.part[i], c.part[i]); });
}
INLINE Floats least(const Floats& a, const Floats& b) {  // b where either is NaN
#if defined(__AVX512F__)
    return {(FloatPart)_mm512_min_ps((__m512)a.part[0], (__m512)b.part[0])};
#elif defined(__AVX2__)
    return by_part<Floats>([&](int i) { return (FloatPart)_mm256_min_ps((__m256)a.part[i], (__m256)b.part[i]); });
#else
    return where(a < b, a, b);
#endif
}
INLINE Floats most(const Floats& a, const Floats& b) {
#if defined(__AVX512F__)
    return {(FloatPart)_mm512_max_ps((__m512)a.part[0], (__m512)b.part[0])};
#elif defined(__AVX2__)
    return by_part<Floats>([&](int i) { return (FloatPart)_mm256_max_ps((__m256)a.part[i], (__m256)b.part[i]); });
#else
    return where(b < a, a, b);
#endif
}

// A vector folded in half until one number is left.
template <class Fold4, class Fold> INLINE float folded(const Floats& v, Fold4 fold, Fold fold_two) {
#if defined(__AVX512F__)
    __m512 wide = (__m512)v.part[0];
    __m128 a = fold(_mm512_castps512_ps128(wide), _mm512_extractf32x4_ps(wide, 2));
    __m128 b = fold(_mm512_extractf32x4_ps(wide, 1), _mm512_extractf32x4_ps(wide, 3));
    a = fold(a, b);
    a = fold(a, _mm_movehl_ps(a, a));
    return fold_two(a[0], a[1]);
#elif defined(__AVX2__)
    FloatPart half = fold(v.part[0], v.part[1]);
    __m128 a = fold(_mm256_castps256_ps128((__m256)half), _mm256_extractf128_ps((__m256)half, 1));
    a = fold(a, _mm_movehl_ps(a, a));
    return fold_two(a[0], a[1]);
#else
    float x[LANES];
    store(x, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = fold_two(x[i], x[i + half]);
    return x[0];
#endif
}
INLINE float sum(const Floats& v) {
    return folded(v, [](auto a, auto b) { return a + b; }, [](float a, float b) { return a + b; });
}
INLINE float largest(const Floats& v) {
    return folded(v, [](auto a, auto b) { return a > b ? a : b; }, [](float a, float b) { return std::max(a, b); });
}

INLINE float widen(float x) { return x; }
INLINE float widen(bf16 x) { uint32_t b = uint32_t(x) << 16; float f; std::memcpy(&f, &b, 4); return f; }
INLINE void narrow(float x, float& to) { to = x; }
INLINE void narrow(float x, bf16& to) {  // round to nearest even; NaN stays NaN
    uint32_t b; std::memcpy(&b, &x, 4);
    to = x != x ? 0x7fc0 : uint16_t((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

INLINE void store_narrow(float* at, const Floats& v) { store(at, v); }
INLINE void store_narrow(bf16* at, const Floats& v) {
    Ints b = bits(v), high = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    high = where(v == v, high, all_of<Ints>(0x7fc0));
    UNROLLED for (int i = 0; i < PARTS; i++) {
        HalfPart h = __builtin_convertvector(high.part[i], HalfPart);
        std::memcpy(at + i * LANES / PARTS, &h, sizeof h);
    }
}
INLINE Floats load_wide(const float* at) { return load(at); }
INLINE Floats load_wide(const bf16* at) {
    return floats(by_part<Ints>([&](int i) {
        return __builtin_convertvector(load_part<HalfPart>(at, i), IntPart);
    }) << 16);
}
template <class T> INLINE Floats rounded(const Floats& v);  // to T's precision; for numbers
template <> INLINE Floats rounded<float>(const Floats& v) { return v; }
template <> INLINE Floats rounded<bf16>(const Floats& v) {
    Ints b = bits(v);
    return floats((b + 0x7fff + ((b >> 16) & 1)) & int32_t(0xffff0000));
}

// Work in whole vectors on a piece that may end within one.
template <class Work> INLINE void in_vectors(int count, Work work) {
    int d = 0;
    for (; d + LANES <= count; d += LANES) work(d, LANES);
    if (d < count) work(d, count - d);
}
template <class T> INLINE Floats load_some(const T* at, int count) {
    if (count == LANES) return load_wide(at);
    T some[LANES] = {};
    std::memcpy(some, at, count * sizeof(T));
    return load_wide(some);
}
template <class T> INLINE void store_some(T* at, const Floats& v, int count) {
    if (count == LANES) return store_narrow(at, v);
    T some[LANES];
    store_narrow(some, v);
    std::memcpy(at, some, count * sizeof(T));
}

// exp: Cephes' expf.
INLINE Floats reduced_exponential(const Floats& x, Ints& power) {  // exp(x) is what is returned, times 2^power
    Floats n = fused(x, all(1.44269504f), all(12582912.0f)) - 12582912.0f;
    Floats r = fused(n, all(-0.693359375f), x);
    r = fused(n, all(2.12194440e-4f), r);
    Floats p = all(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fused(p, r, all(c));
    power = truncated(n);
    return fused(p, r * r, r) + 1.0f;
}
INLINE Floats power_of_two(const Ints& n) { return floats((n + 127) << 23); }
INLINE Floats exponential(const Floats& x) {  // for x <= 88; 0 below exp's smallest normal result
    Ints none = x < all(-87.0f), power;
    Floats p = reduced_exponential(where(none, all(-87.0f), x), power);
    return where(none, Floats{}, p * power_of_two(power));
}
INLINE Floats silu(const Floats& x) {  // x / (1 + exp(-x))
    Ints power;
    Floats p = reduced_exponential(least(all(89.5f), -least(all(86.0f), x)), power);  // 1 + exp(-86) is 1, exp(89.5) inf
    return x / fused(p * power_of_two(power - 1), all(2.0f), all(1.0f));
}

// Elements come in pairs of neighbours along a sum in bfloat16, one by one in float32: a "word" is such a pair. Where the
// processor multiplies bfloat16, both operands stay as they are; elsewhere the one that is spread over all lanes is
// given in float32, and the other one widened in registers.
template <class T> constexpr int PER_WORD = sizeof(float) / sizeof(T);
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool MULTIPLIES_BF16 = true;
#else
constexpr bool MULTIPLIES_BF16 = false;
#endif
constexpr bool ODD_FIRST = REGISTER == 64;  // of a pair: as the processors that multiply bfloat16 do
template <class T> using Operand = std::conditional_t<MULTIPLIES_BF16, T, float>;

INLINE void to_operand(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }
INLINE void to_operand(const bf16* from, bf16* to, int64_t n) { std::memcpy(to, from, n * sizeof(bf16)); }
INLINE void to_operand(const bf16* from, float* to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = widen(from[i]);
}
// For numbers that aren't denormal.
template <class T> INLINE void store_operand(float* at, const Floats& v) { store(at, rounded<T>(v)); }
#ifdef __AVX512BF16__
template <class T> INLINE void store_operand(bf16* at, const Floats& v) {
    __m256bh h = _mm512_cvtneps_pbh((__m512)v.part[0]);
    std::memcpy(at, &h, sizeof h);
}
#else
template <class T> INLINE void store_operand(bf16* at, const Floats& v) { store_narrow(at, v); }
#endif

// Sums of N rows times W vectors, of which the compiler keeps every part in a register of its own.
template <int N, int W> struct Sums {
    FloatPart part[N][W * PARTS];
    INLINE Sums() {
        UNROLLED for (int i = 0; i < N; i++)
            UNROLLED for (int j = 0; j < W * PARTS; j++) part[i][j] = FloatPart{};
    }
    INLINE Floats vector(int i, int j) const {
        return by_part<Floats>([&](int p) { return part[i][j * PARTS + p]; });
    }
};
template <int N, int W> INLINE void add_products(Sums<N, W>& sums, const FloatPart (&w)[W * PARTS], const float* x, int64_t pitch) {
    UNROLLED for (int i = 0; i < N; i++) {
        FloatPart same = spread(x[i * pitch]);
        UNROLLED for (int j = 0; j < W * PARTS; j++) sums.part[i][j] = fused(w[j], same, sums.part[i][j]);
    }
}

// sums(i, j) += the vector of words at `words + j * apart` times the word at `x + i * pitch`, in all lanes.
template <int N, int W>
INLINE void multiply_add(Sums<N, W>& sums, const float* words, int64_t apart, const float* x, int64_t pitch) {
    FloatPart w[W * PARTS];
    UNROLLED for (int j = 0; j < W; j++)
        UNROLLED for (int p = 0; p < PARTS; p++) w[j * PARTS + p] = load_part<FloatPart>(words + j * apart, p);
    add_products(sums, w, x, pitch);
}
#ifdef __AVX512BF16__
template <int N, int W>
INLINE void multiply_add(Sums<N, W>& sums, const bf16* words, int64_t apart, const bf16* x, int64_t pitch) {
    UNROLLED for (int i = 0; i < N; i++)
        UNROLLED for (int j = 0; j < W; j++) {
            int32_t pair; std::memcpy(&pair, x + i * pitch, 4);
            __m512i w = _mm512_loadu_si512(words + j * apart), p = _mm512_set1_epi32(pair);
            sums.part[i][j] = (FloatPart)_mm512_dpbf16_ps((__m512)sums.part[i][j], (__m512bh)w, (__m512bh)p);
        }
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)  // rounds as a fused multiply-add of widened numbers does
template <int N, int W>
INLINE void multiply_add(Sums<N, W>& sums, const bf16* words, int64_t apart, const bf16* x, int64_t pitch) {
    bfloat16x8_t w[W * PARTS];
    UNROLLED for (int j = 0; j < W; j++)
        UNROLLED for (int p = 0; p < PARTS; p++) w[j * PARTS + p] = load_part<bfloat16x8_t>(words + j * apart, p);
    UNROLLED for (int i = 0; i < N; i++) {
        int32_t pair; std::memcpy(&pair, x + i * pitch, 4);
        bfloat16x8_t same = vreinterpretq_bf16_s32(vdupq_n_s32(pair));
        UNROLLED for (int j = 0; j < W * PARTS; j++) {
            float32x4_t sum = vbfmlalbq_f32((float32x4_t)sums.part[i][j], w[j], same);
            sums.part[i][j] = (FloatPart)vbfmlaltq_f32(sum, w[j], same);
        }
    }
}
#endif
template <int N, int W>
INLINE void multiply_add(Sums<N, W>& sums, const bf16* words, int64_t apart, const float* x, int64_t pitch) {
    IntPart pairs[W * PARTS];
    FloatPart w[W * PARTS];
    UNROLLED for (int j = 0; j < W; j++)
        UNROLLED for (int p = 0; p < PARTS; p++) pairs[j * PARTS + p] = load_part<IntPart>(words + j * apart, p);
    UNROLLED for (int second = 0; second < 2; second++) {
        const bool odd = second != ODD_FIRST;
        UNROLLED for (int j = 0; j < W * PARTS; j++) w[j] = (FloatPart)(odd ? pairs[j] & int32_t(0xffff0000) : pairs[j] << 16);
        add_products(sums, w, x + odd, pitch);
    }
}

}  // namespace

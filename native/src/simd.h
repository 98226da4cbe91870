// Sixteen floats at a time, whatever the processor's registers hold, and products of float and bfloat16.
//
// Included by kernels.cpp only, which is compiled once for each instruction set: everything here lives in that
// set's namespace, so that the linker never takes one set's code for another's. For the same reason nothing
// here uses templates of the standard library.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define OB_INLINE inline __attribute__((always_inline))
// For inner loops: inlined side by side, they would share out one function's registers.
#define OB_KERNEL __attribute__((noinline))

namespace ob {
namespace OB_NAMESPACE {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
constexpr int kParts = 16 / kWidth;

// Sixteen numbers as one, two or four registers. (A GCC vector of 64 bytes would do, but lives in memory where
// registers are narrower.)
template <class T>
struct Vector16 {
    typedef T Part __attribute__((vector_size(sizeof(T) * kWidth)));
    Part part[kParts];
};
using F16 = Vector16<float>;
using I16 = Vector16<int32_t>;
using U16 = Vector16<uint32_t>;

template <class V, class Function>
OB_INLINE V each(Function function) {
    V result;
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) result.part[i] = function(i);
    return result;
}

template <int kNumber>
struct Constant {
    static constexpr int value = kNumber;
};
// Calls `run(Constant<n>())` where n is the number of rows, 1 to `kMost`, and `kMost` for more: a kernel keeps
// the sums of its rows in registers, so the compiler must know how many there are.
template <int kMost, class Function>
OB_INLINE void with_rows(int64_t num_rows, const Function& run) {
    if constexpr (kMost > 1) {
        if (num_rows < kMost) return with_rows<kMost - 1>(num_rows, run);
    }
    run(Constant<kMost>());
}

template <class T>
OB_INLINE Vector16<T> splat(T value) {
    typedef typename Vector16<T>::Part Part;
    return each<Vector16<T>>([&](int) { return value - Part{}; });
}
template <class T>
OB_INLINE Vector16<T> load(const T* from) {
    // Part by part: whole, GCC copies it in pieces of 16 bytes through memory where registers are narrower.
    return each<Vector16<T>>([&](int i) {
        typename Vector16<T>::Part part;
        memcpy(&part, from + i * kWidth, sizeof part);
        return part;
    });
}
template <class T>
OB_INLINE void store(T* to, Vector16<T> value) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) memcpy(to + i * kWidth, &value.part[i], sizeof value.part[i]);
}

OB_INLINE F16 zero() { return splat(0.0f); }
OB_INLINE F16 operator+(F16 a, F16 b) {
    return each<F16>([&](int i) { return a.part[i] + b.part[i]; });
}
OB_INLINE F16 operator-(F16 a, F16 b) {
    return each<F16>([&](int i) { return a.part[i] - b.part[i]; });
}
OB_INLINE F16 operator*(F16 a, F16 b) {
    return each<F16>([&](int i) { return a.part[i] * b.part[i]; });
}
OB_INLINE F16 operator/(F16 a, F16 b) {
    return each<F16>([&](int i) { return a.part[i] / b.part[i]; });
}
// a * b + c; compiles to one instruction where there is one.
OB_INLINE F16 fma(F16 a, F16 b, F16 c) {
    return each<F16>([&](int i) { return a.part[i] * b.part[i] + c.part[i]; });
}
// Of NaN and a number, the second. Compilers make a comparison and a choice of this, where there is one instruction
// (masked with all ones: the plain functions begin from a register without a value, which GCC 12 warns of).
OB_INLINE F16 max(F16 a, F16 b) {
#if defined(__AVX512F__)
    return {{(F16::Part)_mm512_mask_max_ps((__m512)a.part[0], 0xffff, (__m512)a.part[0], (__m512)b.part[0])}};
#else
    return each<F16>([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
#endif
}
OB_INLINE F16 min(F16 a, F16 b) {
#if defined(__AVX512F__)
    return {{(F16::Part)_mm512_mask_min_ps((__m512)a.part[0], 0xffff, (__m512)a.part[0], (__m512)b.part[0])}};
#else
    return each<F16>([&](int i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
#endif
}
// All bits of a lane where a > b.
OB_INLINE I16 greater(F16 a, F16 b) {
    return each<I16>([&](int i) { return (I16::Part)(a.part[i] > b.part[i]); });
}
OB_INLINE I16 is_nan(F16 a) {
    return each<I16>([&](int i) { return (I16::Part)(a.part[i] != a.part[i]); });
}
OB_INLINE F16 select(I16 mask, F16 yes, F16 no) {
    return each<F16>([&](int i) { return mask.part[i] ? yes.part[i] : no.part[i]; });
}
OB_INLINE I16 select(I16 mask, I16 yes, I16 no) {
    return each<I16>([&](int i) { return mask.part[i] ? yes.part[i] : no.part[i]; });
}
OB_INLINE I16 operator|(I16 a, I16 b) {
    return each<I16>([&](int i) { return a.part[i] | b.part[i]; });
}

// What `pair` makes of the lower and the upper half of the lanes, then of that one's halves, down to one lane.
template <class Pair>
OB_INLINE float fold(F16 a, Pair pair) {
#if defined(__AVX512DQ__)
    const __m512 all = (__m512)a.part[0];  // through memory, each half would wait for the stores of the one before
    const __m256 eight = pair(_mm512_maskz_extractf32x8_ps(0xff, all, 0), _mm512_maskz_extractf32x8_ps(0xff, all, 1));
    const __m128 four = pair(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = pair(four, _mm_movehl_ps(four, four));
    return pair((float)two[0], (float)two[1]);
#else
    float lanes[16];
    store(lanes, a);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) lanes[i] = pair(lanes[i], lanes[i + width]);
    return lanes[0];
#endif
}
OB_INLINE float sum(F16 a) {
    return fold(a, [](auto low, auto high) { return low + high; });
}
OB_INLINE float largest(F16 a) {
    return fold(a, [](auto low, auto high) { return low > high ? low : high; });
}
OB_INLINE bool any(I16 a) {
    int32_t lanes[16], all = 0;
    store(lanes, a);
    for (int i = 0; i < 16; ++i) all |= lanes[i];
    return all != 0;
}

// e^x to about 2 units in the last place; arguments below -87 give a number that is as good as zero.
//
// x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial for e^r (Cephes' coefficients), and n added to the exponent.
OB_INLINE F16 exp(F16 x) {
    x = max(splat(-87.0f), min(splat(88.0f), x));  // in this order a NaN stays one
    const F16 rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const F16 shifted = fma(x, splat(1.44269504088896341f), rounder);
    const F16 n = shifted - rounder;
    F16 r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    F16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r + splat(1.0f));
    return each<F16>([&](int i) {
        const U16::Part exponent = (U16::Part)shifted.part[i] << 23;  // the low bits of `shifted` are n
        return (F16::Part)((U16::Part)p.part[i] + exponent);
    });
}

// ---- bfloat16 ----

typedef uint16_t bf16;

OB_INLINE float to_float(bf16 value) {
    const uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}
OB_INLINE bf16 to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffff) > 0x7f800000) return (bf16)((bits >> 16) | 0x40);  // stays a NaN
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
OB_INLINE float to_float(float value) { return value; }

OB_INLINE void store_as(float* to, F16 value) { store(to, value); }
OB_INLINE void store_as(bf16* to, F16 value) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value.part[0]);
    memcpy(to, &rounded, sizeof rounded);
#else
    float lanes[16];
    store(lanes, value);
    for (int i = 0; i < 16; ++i) to[i] = to_bf16(lanes[i]);
#endif
}
OB_INLINE F16 load_as_float(const float* from) { return load(from); }
OB_INLINE F16 load_as_float(const bf16* from) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = to_float(from[i]);
    return load(lanes);
}

// ---- Products ----
//
// A kernel steps through the inner dimension `kPack` numbers at a time: `Weights` are 16 columns of such a
// step, `Input` is one row's part of it in every lane, and `madd` adds their products to 16 sums.

struct Float32 {
    typedef float Number;
    static constexpr int kPack = 1;
    static constexpr bool kMultipliesFloats = true;
    typedef F16 Weights;
    typedef F16 Input;
    static OB_INLINE Weights weights(const Number* from) { return load(from); }
    static OB_INLINE Input input(const Number* from) { return splat(*from); }
    static OB_INLINE void madd(F16& sums, const Weights& weights, const Input& input) {
        sums = fma(weights, input, sums);
    }
    static OB_INLINE Number from_float(float value) { return value; }
};

struct BFloat16 {
    typedef bf16 Number;
    static constexpr int kPack = 2;
#if defined(__AVX512BF16__)
    static constexpr bool kMultipliesFloats = false;
    typedef __m512i Weights;
    typedef __m512i Input;
    static OB_INLINE Weights weights(const Number* from) { return _mm512_loadu_si512(from); }
    static OB_INLINE Input input(const Number* from) {
        int32_t pair;
        memcpy(&pair, from, sizeof pair);
        return _mm512_set1_epi32(pair);
    }
    static OB_INLINE void madd(F16& sums, const Weights& weights, const Input& input) {
        sums.part[0] = (F16::Part)_mm512_dpbf16_ps((__m512)sums.part[0], (__m512bh)weights, (__m512bh)input);
    }
#else
    static constexpr bool kMultipliesFloats = true;
    struct Pair {
        F16 even, odd;
    };
    typedef Pair Weights;
    typedef Pair Input;
    // A bfloat16 is the upper half of a float: a shift or a mask makes one of it.
    static OB_INLINE Pair parted(const U16& pairs) {
        return {each<F16>([&](int i) { return (F16::Part)(pairs.part[i] << 16); }),
                each<F16>([&](int i) { return (F16::Part)(pairs.part[i] & 0xffff0000u); })};
    }
    static OB_INLINE Weights weights(const Number* from) { return parted(load((const uint32_t*)from)); }
    static OB_INLINE Input input(const Number* from) {
        uint32_t pair;
        memcpy(&pair, from, sizeof pair);
        return parted(splat(pair));
    }
    static OB_INLINE void madd(F16& sums, const Weights& weights, const Input& input) {
        sums = fma(weights.odd, input.odd, fma(weights.even, input.even, sums));
    }
#endif
    static OB_INLINE Number from_float(float value) { return to_bf16(value); }
};

constexpr int64_t kCacheLine = 64;      // bytes

// Bytes from what is read of a stream of numbers to what is asked for. Of AVX2 timed on a Zen 3, whose own prefetching
// farther requests disturb.
template <class Number>
constexpr int64_t kStreamAhead = kWidth != 8 ? 8192 : sizeof(Number) == 4 ? 512 : 1536;

OB_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

}  // namespace OB_NAMESPACE
}  // namespace ob

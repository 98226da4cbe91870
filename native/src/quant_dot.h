// Dot products of bytes: what quantized weights and quantized inputs are multiplied with.
//
// A step takes four inputs of sixteen outputs. `prepare` readies stored weights once for several rows, `madd`
// multiplies them with a row's four inputs (signed bytes, the first lowest) and adds to the sums, `total` ends a
// group. No group is longer than eight steps, and no input is below -127 (but what comes of NaN and infinity,
// whose scale spoils the result as they would).
#pragma once

#include "quant_layout.h"
#include "simd.h"

namespace ob {
namespace OB_NAMESPACE {

OB_INLINE F16 as_floats(I16 values) {
    return each<F16>([&](int i) { return __builtin_convertvector(values.part[i], F16::Part); });
}
OB_INLINE U16 load_bytes(const uint8_t* from) {
    // Part by part: whole, GCC copies it in smaller pieces through memory where registers are narrower.
    return each<U16>([&](int i) {
        U16::Part part;
        memcpy(&part, from + i * sizeof part, sizeof part);
        return part;
    });
}

// Sixteen numbers of half precision.
OB_INLINE F16 load_halves(const uint8_t* from) {
#if defined(__AVX512F__)
    // Not the plain form, whose unset third operand GCC 12 warns of.
    const __m256i halves = _mm256_loadu_si256((const __m256i*)from);
    return {{(F16::Part)_mm512_maskz_cvtph_ps(0xffff, halves)}};
#elif defined(__F16C__) && defined(__AVX2__)
    return each<F16>(
        [&](int i) { return (F16::Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 16 * i))); });
#else
    uint16_t halves[16];
    uint32_t widened[16];
    memcpy(halves, from, sizeof halves);
    for (int i = 0; i < 16; ++i) widened[i] = halves[i];
    const U16 bits = load(widened);
    return each<F16>([&](int i) {
        const U16::Part magnitude = (bits.part[i] & 0x7fffu) << 13, sign = (bits.part[i] & 0x8000u) << 16;
        // The exponent's bias differs by 112; a product makes subnormals right too.
        const U16::Part finite = (U16::Part)((F16::Part)magnitude * 0x1p112f);
        return (F16::Part)(sign | (magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite));
    });
#endif
}

// For each byte of `codes`, which are below 16, that of a table.
OB_INLINE U16 look_up(U16 codes, const uint8_t* table) {
#if defined(__AVX512BW__)
    int32_t words[4];
    memcpy(words, table, sizeof words);
    const __m512i all = _mm512_set4_epi32(words[3], words[2], words[1], words[0]);
    return {{(U16::Part)_mm512_shuffle_epi8(all, (__m512i)codes.part[0])}};
#elif defined(__AVX2__)
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
    return each<U16>([&](int i) { return (U16::Part)_mm256_shuffle_epi8(all, (__m256i)codes.part[i]); });
#else
    typedef uint8_t SixteenBytes __attribute__((vector_size(16)));
    SixteenBytes all;
    memcpy(&all, table, sizeof all);
    return each<U16>([&](int i) { return (U16::Part)__builtin_shuffle(all, (SixteenBytes)codes.part[i]); });
#endif
}

// The sums of the bytes of some inputs: of the first two of each four, and of the last two.
struct PairSums {
    int32_t first, last;
};

#if defined(__AVX512VNNI__)

struct UnsignedBytes {
    typedef U16 Weights;
    typedef I16 Sums;
    static OB_INLINE Weights prepare(U16 stored) { return stored; }
    static OB_INLINE void madd(Sums& sums, const Weights& weights, uint32_t inputs) {
        sums.part[0] = (I16::Part)_mm512_dpbusd_epi32((__m512i)sums.part[0], (__m512i)weights.part[0],
                                                      _mm512_set1_epi32((int)inputs));
    }
    static OB_INLINE F16 total(Sums sums) { return as_floats(sums); }
    static OB_INLINE Sums start(int32_t offset) { return splat(offset); }
    static OB_INLINE int32_t offset_of(PairSums inputs, int zero) { return -zero * (inputs.first + inputs.last); }
};
struct Nibbles : UnsignedBytes {};
struct Bytes : UnsignedBytes {};

#elif defined(__AVX512BW__) || defined(__AVX2__)

#if defined(__AVX512BW__)
typedef __m512i ByteVector;
OB_INLINE ByteVector splat_inputs(uint32_t inputs) { return _mm512_set1_epi32((int)inputs); }
OB_INLINE ByteVector multiply_pairs(ByteVector a, ByteVector b) { return _mm512_maddubs_epi16(a, b); }
OB_INLINE ByteVector add_pairs(ByteVector a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
OB_INLINE ByteVector magnitude(ByteVector a) { return _mm512_abs_epi8(a); }
OB_INLINE ByteVector with_sign(ByteVector a, ByteVector sign) {
    return _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(sign), _mm512_setzero_si512(), a);
}
#else
typedef __m256i ByteVector;
OB_INLINE ByteVector splat_inputs(uint32_t inputs) { return _mm256_set1_epi32((int)inputs); }
OB_INLINE ByteVector multiply_pairs(ByteVector a, ByteVector b) { return _mm256_maddubs_epi16(a, b); }
OB_INLINE ByteVector add_pairs(ByteVector a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
OB_INLINE ByteVector magnitude(ByteVector a) { return _mm256_abs_epi8(a); }
OB_INLINE ByteVector with_sign(ByteVector a, ByteVector sign) { return _mm256_sign_epi8(a, sign); }
#endif

// Sums are added to one after the other: GCC would change the order, and keep all products of a group meanwhile, for which
// there are no registers.
template <class Part>
OB_INLINE Part in_order(Part sum) {
    asm("" : "+v"(sum));
    return sum;
}

typedef uint16_t Words __attribute__((vector_size(sizeof(ByteVector))));

// Sums of 16 bits, each of a pair of every four inputs: a group of 32 numbers up to 15 adds at most 8 * 2 * 15 * 127 <
// 2^15 to each. Numbers up to 24 may pass that on the way, but not where sums start from what they are too large by: 12 is
// the most that is left of a number, and what is added wraps around.
struct Nibbles {
    typedef U16 Weights;
    typedef I16 Sums;
    static OB_INLINE Weights prepare(U16 stored) { return stored; }
    static OB_INLINE void madd(Sums& sums, const Weights& weights, uint32_t inputs) {
        sums = each<Sums>([&](int i) {
            const ByteVector products = multiply_pairs((ByteVector)weights.part[i], splat_inputs(inputs));
            return in_order((I16::Part)((Words)sums.part[i] + (Words)products));
        });
    }
    static OB_INLINE F16 total(Sums sums) {
        return as_floats(each<I16>([&](int i) { return (I16::Part)add_pairs((ByteVector)sums.part[i]); }));
    }
    static OB_INLINE Sums start(int32_t offset) { return splat(offset); }
    static OB_INLINE int32_t offset_of(PairSums inputs, int zero) {
        return (int32_t)((uint32_t)(-zero * inputs.last) << 16 | (uint16_t)(-zero * inputs.first));
    }
};

// A pair of products of unsigned bytes up to 255 may pass 2^15, where the instruction cuts it off. So the
// weights' signs move to the inputs: two products of at most 128 * 127 fit, and sums start from nothing.
struct Bytes {
    struct Weights {
        U16 values, magnitudes;
    };
    typedef I16 Sums;
    static OB_INLINE Weights prepare(U16 stored) {
        const U16 values = each<U16>([&](int i) { return stored.part[i] ^ 0x80808080u; });
        return {values, each<U16>([&](int i) { return (U16::Part)magnitude((ByteVector)values.part[i]); })};
    }
    static OB_INLINE void madd(Sums& sums, const Weights& weights, uint32_t inputs) {
        sums = each<Sums>([&](int i) {
            const ByteVector turned = with_sign(splat_inputs(inputs), (ByteVector)weights.values.part[i]);
            const ByteVector products = multiply_pairs((ByteVector)weights.magnitudes.part[i], turned);
            return in_order(sums.part[i] + (I16::Part)add_pairs(products));
        });
    }
    static OB_INLINE F16 total(Sums sums) { return as_floats(sums); }
    static OB_INLINE Sums start(int32_t) { return splat(0); }
};

#else

// Whole numbers, and exact, in floats: where there are no products of bytes there may be none of integers.
struct Nibbles {
    struct Weights {
        F16 values[4];
    };
    typedef F16 Sums;
    static OB_INLINE Weights prepare(U16 stored) {
        Weights weights;
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            weights.values[j] = as_floats(
                each<I16>([&](int i) { return (I16::Part)(stored.part[i] >> (8 * j) & 0xffu); }));
        }
        return weights;
    }
    static OB_INLINE void madd(Sums& sums, const Weights& weights, uint32_t inputs) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sums = fma(weights.values[j], splat((float)(int8_t)(inputs >> (8 * j))), sums);
    }
    static OB_INLINE F16 total(Sums sums) { return sums; }
    static OB_INLINE Sums start(int32_t offset) { return splat((float)offset); }
    static OB_INLINE int32_t offset_of(PairSums inputs, int zero) { return -zero * (inputs.first + inputs.last); }
};
struct Bytes : Nibbles {};

#endif

}  // namespace OB_NAMESPACE
}  // namespace ob

// GGUF's blocks, and half precision: each source type is read group by group into one common form.
//
// Included by quant_pack.cpp alone.
#pragma once

#include <math.h>
#include <string.h>

#include "quant_layout.h"

namespace ob {
namespace {

constexpr int64_t kMostInputs = 32;  // of a group

// Numbers  scale * (numbers[i] - zero) + minimum; those of E2M1 are codes.
struct Group {
    uint8_t numbers[kMostInputs];
    int zero;
    float scale;
    float minimum;
};

// ---- Half precision ----

float from_half(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float value;
    if (bits >= 0x0f800000) {  // infinity or NaN
        bits |= 0x7f800000;
        memcpy(&value, &bits, sizeof value);
    } else {  // the exponent's bias differs by 112; a product makes subnormals right too
        memcpy(&value, &bits, sizeof value);
        value *= 0x1p112f;
    }
    return half & 0x8000 ? -value : value;
}

// The nearest half; of two, the even one.
uint16_t to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;   // NaN
    if (bits >= 0x477ff000) return sign | 0x7c00;  // from 65520 on: infinity
    if (bits < 0x38800000) {  // subnormal: added to 0.5, whose last bit is the smallest half
        const float shifted = fabsf(value) + 0.5f;
        memcpy(&bits, &shifted, sizeof bits);
        return sign | (uint16_t)(bits - 0x3f000000);
    }
    bits += 0xfff + ((bits >> 13) & 1);
    return sign | (uint16_t)((bits - (112u << 23)) >> 13);
}

uint16_t to_half_rounded_up(float positive) {
    const uint16_t half = to_half(positive);
    return from_half(half) < positive ? half + 1 : half;
}

float half_at(const uint8_t* bytes) {
    uint16_t half;
    memcpy(&half, bytes, sizeof half);
    return from_half(half);
}

void put_half(uint8_t* bytes, uint16_t half) { memcpy(bytes, &half, sizeof half); }

// ---- Sources: group `index` of a block ----

void read_nibbles(const uint8_t* bytes, Group& group) {
    for (int i = 0; i < 16; ++i) {
        group.numbers[i] = bytes[i] & 15;
        group.numbers[16 + i] = bytes[i] >> 4;
    }
}

void read_q4_0(const uint8_t* block, int64_t, Group& group) {
    read_nibbles(block + 2, group);
    group.zero = 8;
    group.scale = half_at(block);
    group.minimum = 0;
}

void read_q4_1(const uint8_t* block, int64_t, Group& group) {
    read_nibbles(block + 4, group);
    group.zero = 0;
    group.scale = half_at(block);
    group.minimum = half_at(block + 2);
}

void read_q5_0(const uint8_t* block, int64_t, Group& group) {
    uint32_t fifth_bits;
    memcpy(&fifth_bits, block + 2, sizeof fifth_bits);
    read_nibbles(block + 6, group);
    for (int i = 0; i < 32; ++i) group.numbers[i] |= (fifth_bits >> i & 1) << 4;
    group.zero = 16;
    group.scale = half_at(block);
    group.minimum = 0;
}

void read_q5_1(const uint8_t* block, int64_t, Group& group) {
    read_q5_0(block + 2, 0, group);
    group.zero = 0;
    group.scale = half_at(block);
    group.minimum = half_at(block + 2);
}

void read_q8_0(const uint8_t* block, int64_t, Group& group) {
    for (int i = 0; i < 32; ++i) group.numbers[i] = block[2 + i] ^ 0x80;  // signed, now counted from 128
    group.zero = 128;
    group.scale = half_at(block);
    group.minimum = 0;
}

// Eight groups of 32 share a block's two scales; each has 6 bits for its own scale and minimum, in 12 bytes.
void read_six_bits(const uint8_t* block, int64_t index, Group& group) {
    const uint8_t* packed = block + 4;
    int scale, minimum;
    if (index < 4) {
        scale = packed[index] & 63;
        minimum = packed[index + 4] & 63;
    } else {
        scale = (packed[index + 4] & 15) | (packed[index - 4] >> 6) << 4;
        minimum = packed[index + 4] >> 4 | (packed[index] >> 6) << 4;
    }
    group.zero = 0;
    group.scale = half_at(block) * (float)scale;
    group.minimum = -half_at(block + 2) * (float)minimum;
}

void read_q4_k(const uint8_t* block, int64_t index, Group& group) {
    read_six_bits(block, index, group);
    const uint8_t* bytes = block + 16 + index / 2 * 32;
    for (int i = 0; i < 32; ++i) group.numbers[i] = bytes[i] >> (index % 2 * 4) & 15;
}

// As Q4_K; 32 bytes before the numbers hold a fifth bit, of group g in bit g.
void read_q5_k(const uint8_t* block, int64_t index, Group& group) {
    read_six_bits(block, index, group);
    const uint8_t *fifth = block + 16, *bytes = block + 48 + index / 2 * 32;
    for (int i = 0; i < 32; ++i) {
        group.numbers[i] = (bytes[i] >> (index % 2 * 4) & 15) | (fifth[i] >> index & 1) << 4;
    }
}

// Sixteen groups of 16 in two parts of 128 inputs: of a part, four runs of 32 inputs share 32 bytes.
void read_two_bits(const uint8_t* bytes, int64_t index, Group& group) {
    const uint8_t* from = bytes + index / 8 * 32 + index % 2 * 16;
    for (int i = 0; i < 16; ++i) group.numbers[i] = from[i] >> (index % 8 / 2 * 2) & 3;
}

void read_q2_k(const uint8_t* block, int64_t index, Group& group) {
    read_two_bits(block + 16, index, group);
    group.zero = 0;
    group.scale = half_at(block + 80) * (float)(block[index] & 15);
    group.minimum = -half_at(block + 82) * (float)(block[index] >> 4);
}

// A third bit lies apart, in bit g of 32 bytes for the g-th run of 32 inputs; scales have 4 bits and 2 elsewhere.
void read_q3_k(const uint8_t* block, int64_t index, Group& group) {
    read_two_bits(block + 32, index, group);
    const uint8_t* third = block + index % 2 * 16;
    for (int i = 0; i < 16; ++i) group.numbers[i] |= (third[i] >> (index / 2) & 1) << 2;
    const uint8_t* packed = block + 96;
    const int low = packed[index % 8] >> (index / 8 * 4) & 15, high = packed[8 + index % 4] >> (index / 4 * 2) & 3;
    group.zero = 4;
    group.scale = half_at(block + 108) * (float)((low | high << 4) - 32);
    group.minimum = 0;
}

// Four bits choose one of sixteen numbers, which are closer together around zero.
void read_chosen(const uint8_t* bytes, Group& group) {
    constexpr int8_t kNumbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    read_nibbles(bytes, group);
    for (uint8_t& number : group.numbers) number = (uint8_t)(kNumbers[number] + kByteZero);
    group.zero = kByteZero;
    group.minimum = 0;
}

void read_iq4_nl(const uint8_t* block, int64_t, Group& group) {
    read_chosen(block + 2, group);
    group.scale = half_at(block);
}

// Eight groups of 32 share a scale; each has 6 bits for its own, four of them and two.
void read_iq4_xs(const uint8_t* block, int64_t index, Group& group) {
    read_chosen(block + 8 + index * 16, group);
    const int low = block[4 + index / 2] >> (index % 2 * 4) & 15, high = block[2 + index / 4] >> (index % 4 * 2) & 3;
    group.scale = half_at(block) * (float)((low | high << 4) - 32);
}

// Sixteen groups of 16 in two parts of 128 inputs: of a part, four runs of 32 inputs share their bytes, the
// first and second run the lower halves of 64 bytes, the others the upper ones; two more bits lie apart.
void read_q6_k(const uint8_t* block, int64_t index, Group& group) {
    const int64_t part = index / 8, run = index % 8 / 2, lane = index % 2 * 16;
    const uint8_t* low = block + part * 64 + run % 2 * 32 + lane;
    const uint8_t* high = block + 128 + part * 32 + lane;
    for (int i = 0; i < 16; ++i) {
        group.numbers[i] = (low[i] >> (run / 2 * 4) & 15) | (high[i] >> (run * 2) & 3) << 4;
    }
    group.zero = 32;
    group.scale = half_at(block + 208) * (float)(int8_t)block[192 + index];
    group.minimum = 0;
}

// Codes of kE2M1Numbers. The scale is a power of two, of which only the exponent is there.
void read_mxfp4(const uint8_t* block, int64_t, Group& group) {
    read_nibbles(block + 1, group);
    group.zero = kE2M1Zero;
    group.scale = ldexpf(0.5f, block[0] - 127);
    group.minimum = 0;
}

void read_e2m1_16(const uint8_t* block, int64_t, Group& group) {
    for (int i = 0; i < 8; ++i) {
        group.numbers[i] = block[2 + i] & 15;
        group.numbers[8 + i] = block[2 + i] >> 4;
    }
    group.zero = kE2M1Zero;
    group.scale = half_at(block);
    group.minimum = 0;
}

struct SourceType {
    int32_t type;
    int64_t block_inputs, block_bytes;
    int64_t group;
    bool has_minimum;
    int32_t four_bits;  // the store of 4 bits that holds its numbers; else OB_STORE_Q8
    void (*read)(const uint8_t* block, int64_t index, Group& group);
};

constexpr SourceType kSourceTypes[] = {
    {OB_SOURCE_Q4_0, 32, 18, 32, false, OB_STORE_Q4, read_q4_0},
    {OB_SOURCE_Q4_1, 32, 20, 32, true, OB_STORE_Q4, read_q4_1},
    {OB_SOURCE_Q5_0, 32, 22, 32, false, OB_STORE_Q8, read_q5_0},
    {OB_SOURCE_Q5_1, 32, 24, 32, true, OB_STORE_Q8, read_q5_1},
    {OB_SOURCE_Q8_0, 32, 34, 32, false, OB_STORE_Q8, read_q8_0},
    {OB_SOURCE_Q2_K, 256, 84, 16, true, OB_STORE_Q8, read_q2_k},
    {OB_SOURCE_Q3_K, 256, 110, 16, false, OB_STORE_Q8, read_q3_k},
    {OB_SOURCE_Q4_K, 256, 144, 32, true, OB_STORE_Q4, read_q4_k},
    {OB_SOURCE_Q5_K, 256, 176, 32, true, OB_STORE_Q8, read_q5_k},
    {OB_SOURCE_Q6_K, 256, 210, 16, false, OB_STORE_Q8, read_q6_k},
    {OB_SOURCE_IQ4_NL, 32, 18, 32, false, OB_STORE_Q8, read_iq4_nl},
    {OB_SOURCE_IQ4_XS, 256, 136, 32, false, OB_STORE_Q8, read_iq4_xs},
    {OB_SOURCE_MXFP4, 32, 17, 32, false, OB_STORE_E2M1, read_mxfp4},
    {OB_SOURCE_E2M1_16, 16, 10, 16, false, OB_STORE_E2M1, read_e2m1_16},
};

const SourceType* find_source(int32_t type) {
    for (const SourceType& source : kSourceTypes) {
        if (source.type == type) return &source;
    }
    return nullptr;
}

}  // namespace
}  // namespace ob

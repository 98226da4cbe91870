// The products of attention: a few query rows against pages of keys, and their shares times pages of values.
//
// Where the processor multiplies whole matrices (AMX), pages are tiles as they lie: 32 numbers of a head by 16 tokens
// of keys, and 16 tokens by 16 numbers of a head of values.
#pragma once

#include "amx.h"
#include "simd.h"
#include "step.h"

namespace ob {
namespace OB_NAMESPACE {

constexpr int kScoreRows = kWidth == 16 ? 12 : kWidth == 8 ? 3 : 2;
constexpr int kMixRows = kWidth == 16 ? 6 : kWidth == 8 ? 3 : 1;

// Scores of some rows against a few pages: out[row][16 page + token].
//
// The values of the same pages are asked for meanwhile: they are needed next.
template <class E, int kRows, int kPages>
OB_KERNEL void score_pages(const typename E::Number* queries, int64_t stride, const typename E::Number* const* pages,
                           int64_t head_dim, int64_t value_lines, float* out) {
    F16 sums[kRows][kPages];
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int page = 0; page < kPages; ++page) sums[row][page] = zero();
    const int64_t num_steps = head_dim / E::kPack;
    for (int64_t step = 0; step < num_steps; ++step) {
        typename E::Weights keys[kPages];
#pragma GCC unroll 4
        for (int page = 0; page < kPages; ++page) {
            keys[page] = E::weights(pages[page] + step * 16 * E::kPack);
            if (step < value_lines) prefetch((const uint8_t*)(pages[page] + 16 * head_dim) + step * 64);
        }
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) {
            const auto query = E::input(queries + row * stride + step * E::kPack);
#pragma GCC unroll 4
            for (int page = 0; page < kPages; ++page) E::madd(sums[row][page], keys[page], query);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int page = 0; page < kPages; ++page) store(out + row * kChunkTokens + page * 16, sums[row][page]);
}

template <class E, int kRows>
void score_rows(const typename E::Number* queries, int64_t stride, const typename E::Number* const* pages,
                int64_t num_pages, int64_t head_dim, int64_t value_lines, float* out) {
    constexpr int kPages = kWidth < 16 ? 1 : kRows <= 6 ? 4 : 2;
    int64_t page = 0;
    for (; page + kPages <= num_pages; page += kPages)
        score_pages<E, kRows, kPages>(queries, stride, pages + page, head_dim, value_lines, out + page * 16);
    for (; page < num_pages; ++page)
        score_pages<E, kRows, 1>(queries, stride, pages + page, head_dim, value_lines, out + page * 16);
}

// mixed[row][dims] = mixed * fade + shares x values, for 16 kDims numbers of the head.
template <class E, int kRows, int kDims>
OB_KERNEL void mix_pages(const typename E::Number* shares, const typename E::Number* const* values, int64_t num_pages,
                         int64_t head, const float* fades, float* mixed) {
    F16 sums[kRows][kDims];
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int dim = 0; dim < kDims; ++dim)
            sums[row][dim] = load(mixed + row * head + 16 * dim) * splat(fades[row]);
    for (int64_t page = 0; page < num_pages; ++page) {
        const typename E::Number* from = values[page];
        const typename E::Number* share = shares + page * kPageTokens;
        for (int step = 0; step < kPageTokens / E::kPack; ++step) {
            typename E::Weights columns[kDims];
#pragma GCC unroll 4
            for (int dim = 0; dim < kDims; ++dim) columns[dim] = E::weights(from + 16 * dim * E::kPack);
            from += head * E::kPack;
#pragma GCC unroll 6
            for (int row = 0; row < kRows; ++row) {
                const auto input = E::input(share + row * kChunkTokens + step * E::kPack);
#pragma GCC unroll 4
                for (int dim = 0; dim < kDims; ++dim) E::madd(sums[row][dim], columns[dim], input);
            }
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
        for (int dim = 0; dim < kDims; ++dim) store(mixed + row * head + 16 * dim, sums[row][dim]);
}

#if defined(OB_AMX)
// Fewest query rows that meet pages as tiles, and how many do at once. Rows up to the next 16 are computed as well, of
// whatever the scratch memory holds there: they end in rows that nobody reads. Timed on a Xeon, tiles are quicker
// from 2 heads of a KV head on, 1.3 times with 9; one row alone takes 1.15 times as long.
constexpr int64_t kFewestAmxQueries = 2, kAmxQueries = 2 * kAmxRows;

// `score_pages` for `kBlocks` times 16 rows and two pages. `value_lines`: of each page, for each step.
template <int kBlocks>
OB_KERNEL void score_by_amx(const bf16* queries, const bf16* const* pages, int64_t head_dim, int64_t value_lines,
                             float* const* out) {
    constexpr int64_t kOutBytes = kChunkTokens * sizeof(float);
    const int64_t query_bytes = head_dim * (int64_t)sizeof(bf16);
    Amx::zero<0>();
    Amx::zero<1>();
    if constexpr (kBlocks > 1) {
        Amx::zero<2>();
        Amx::zero<3>();
    }
    const uint8_t* ahead[2] = {(const uint8_t*)(pages[0] + 16 * head_dim), (const uint8_t*)(pages[1] + 16 * head_dim)};
    for (int64_t first = 0; first < head_dim; first += kAmxInputs) {
        Amx::load<4>(pages[0] + first * kPageTokens, kAmxBytes);
        Amx::load<5>(pages[1] + first * kPageTokens, kAmxBytes);
        Amx::load<6>(queries + first, query_bytes);
        Amx::madd<0, 6, 4>();
        Amx::madd<1, 6, 5>();
        if constexpr (kBlocks > 1) {
            Amx::load<7>(queries + kAmxRows * head_dim + first, query_bytes);
            Amx::madd<2, 7, 4>();
            Amx::madd<3, 7, 5>();
        }
        for (int64_t line = 0; line < value_lines; ++line) {
            prefetch(ahead[0] + line * kCacheLine);
            prefetch(ahead[1] + line * kCacheLine);
        }
        ahead[0] += value_lines * kCacheLine;
        ahead[1] += value_lines * kCacheLine;
    }
    Amx::store<0>(out[0], kOutBytes);
    Amx::store<1>(out[1], kOutBytes);
    if constexpr (kBlocks > 1) {
        Amx::store<2>(out[0] + kAmxRows * kChunkTokens, kOutBytes);
        Amx::store<3>(out[1] + kAmxRows * kChunkTokens, kOutBytes);
    }
}

// Of a page of values: 16 tokens are half of what a product of tiles can add up.
OB_INLINE AmxShapes value_tiles() {
    AmxShapes shapes = whole_tiles();
    shapes.rows[4] = shapes.rows[5] = kPageTokens / 2;
    shapes.row_bytes[6] = shapes.row_bytes[7] = kPageTokens * sizeof(bf16);
    return shapes;
}

// mixed[row][32 dims] += shares x values for `kBlocks` times 16 rows, with tiles shaped by `value_tiles`.
template <int kBlocks>
OB_KERNEL void mix_by_amx(const bf16* shares, const bf16* const* values, int64_t num_pages, int64_t head,
                          float* mixed) {
    constexpr int64_t kShareBytes = kChunkTokens * sizeof(bf16);
    const int64_t mixed_bytes = head * (int64_t)sizeof(float), pair_bytes = 2 * head * (int64_t)sizeof(bf16);
    float* lower = mixed + kAmxRows * head;
    Amx::load<0>(mixed, mixed_bytes);
    Amx::load<1>(mixed + 16, mixed_bytes);
    if constexpr (kBlocks > 1) {
        Amx::load<2>(lower, mixed_bytes);
        Amx::load<3>(lower + 16, mixed_bytes);
    }
    for (int64_t page = 0; page < num_pages; ++page) {
        Amx::load<4>(values[page], pair_bytes);
        Amx::load<5>(values[page] + 2 * 16, pair_bytes);
        Amx::load<6>(shares + page * kPageTokens, kShareBytes);
        Amx::madd<0, 6, 4>();
        Amx::madd<1, 6, 5>();
        if constexpr (kBlocks > 1) {
            Amx::load<7>(shares + kAmxRows * kChunkTokens + page * kPageTokens, kShareBytes);
            Amx::madd<2, 7, 4>();
            Amx::madd<3, 7, 5>();
        }
    }
    Amx::store<0>(mixed, mixed_bytes);
    Amx::store<1>(mixed + 16, mixed_bytes);
    if constexpr (kBlocks > 1) {
        Amx::store<2>(lower, mixed_bytes);
        Amx::store<3>(lower + 16, mixed_bytes);
    }
}
#endif

}  // namespace OB_NAMESPACE
}  // namespace ob

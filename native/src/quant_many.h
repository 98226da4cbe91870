// Products of quantized weights with all rows of a step.
//
// Where registers are few (AVX2), so are the rows of a tile that reads weights as they lie in memory, and each tile opens
// them anew: of numbers of 4 bits that takes as long as multiplying them. So some hundred inputs of a panel are
// opened once for all rows, and lie in the first-level cache while tiles of 6 rows by 16 outputs meet them. The sums
// of a row come to the same numbers either way.
#pragma once

#include "quant.h"

namespace ob {
namespace OB_NAMESPACE {

// Of 8 bits, and of codes with a scale for 16, it takes as long or longer.
template <class Group>
constexpr bool kIsOpened = kWidth == 8 && (int64_t)Group::kLayout.scales < kBlockInputs * kPanelOutputs &&
                           Group::kLayout.inputs == kBlockInputs;
constexpr int kOpenedRows = 6;            // of a tile
constexpr int64_t kFewestOpenedRows = 7;  // fewer take as long either way
constexpr int64_t kOpenedBlocks = 8;

// 32 inputs of 16 outputs, ready to be multiplied.
template <class Group>
struct OpenedBlock {
    static constexpr int kHalves = 1;
    typename Group::Dot::Weights numbers[kBlockInputs / 4];
    F16 scales, minima;

    void open(const PackedBlock<Group>& from, int half) {
#pragma GCC unroll 8
        for (int first = 0; first < kBlockInputs; first += 4) numbers[first / 4] = from.weights(first, half);
        scales = from.scale(0, half);
        minima = from.least(0, half);
    }
    OB_INLINE const typename Group::Dot::Weights& weights(int first, int) const { return numbers[first / 4]; }
    OB_INLINE F16 scale(int, int) const { return scales; }
    OB_INLINE F16 least(int, int) const { return minima; }
    OB_INLINE void ask(int, int64_t, int) const {}
    OB_INLINE void ask_scales(int) const {}
};

// out[row][16 columns] += rows times some blocks. `ahead`: what to ask the memory for, so many lines with each block.
template <class Group, int kRows>
OB_KERNEL void tile_of_opened(const OpenedBlock<Group>* blocks, int64_t num_blocks, TileRows rows,
                              const uint8_t* ahead, int64_t lines, float* out) {
    F16 totals[kRows][1];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) totals[row][0] = load(out + row * kPanelOutputs);
    for (int64_t index = 0; index < num_blocks; ++index) {
        for (int64_t line = 0; line < lines; ++line, ahead += kCacheLine) prefetch(ahead);
        Group::template add_block<kRows>(blocks[index], index, rows, totals);
        rows.values += kBlockInputs;
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) store(out + row * kPanelOutputs, totals[row][0]);
}

template <class Group>
void multiply_opened(const ob_matrix& matrix, int64_t panel, const QuantizedRows& x, float (*out)[kPanelOutputs]) {
    constexpr int64_t kBlockBytes = Group::kLayout.bytes;
    OpenedBlock<Group> opened[2][kOpenedBlocks];
    memset(out, 0, x.num_rows * sizeof *out);
    const int64_t num_tiles = (x.num_rows + kOpenedRows - 1) / kOpenedRows;
    const int64_t lines = (kBlockBytes / kCacheLine + 2 * num_tiles - 1) / (2 * num_tiles);
    const uint8_t* bytes = matrix.panel(panel);
    for (int64_t first = 0; first < x.num_blocks; first += kOpenedBlocks) {
        const int64_t count = x.num_blocks - first < kOpenedBlocks ? x.num_blocks - first : kOpenedBlocks;
        for (int64_t index = 0; index < count; ++index, bytes += kBlockBytes)
            for (int half = 0; half < 2; ++half) opened[half][index].open({bytes, {}}, half);
        const uint8_t* ahead = bytes;
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t row = x.num_rows * tile / num_tiles, end = x.num_rows * (tile + 1) / num_tiles;
            const TileRows rows = {x.values + row * x.stride + first * kBlockInputs,
                                   x.blocks + row * x.num_blocks + first, x.stride, x.num_blocks};
            for (int half = 0; half < 2; ++half, ahead += lines * count * kCacheLine) {
                with_rows<kOpenedRows>(end - row, [&](auto rows_of_tile) {
                    tile_of_opened<Group, decltype(rows_of_tile)::value>(opened[half], count, rows, ahead, lines,
                                                                         out[row] + 16 * half);
                });
            }
        }
    }
}

// out[row][output]: the full sums of a panel's outputs for all rows.
inline void quantized_panel(const ob_matrix& matrix, int64_t panel, const QuantizedRows& x,
                            float (*out)[kPanelOutputs]) {
    with_groups(matrix, [&](auto group) {
        typedef decltype(group) Group;
        if constexpr (kIsOpened<Group>) {
            if (x.num_rows >= kFewestOpenedRows) return multiply_opened<Group>(matrix, panel, x, out);
        }
        for (int64_t first = 0; first < x.num_rows; first += kQuantRows) {
            const int64_t count = x.num_rows - first < kQuantRows ? x.num_rows - first : kQuantRows;
            tile_of_panel<Group>(matrix, panel, x, first, (int)count, out + first);
        }
    });
}

}  // namespace OB_NAMESPACE
}  // namespace ob

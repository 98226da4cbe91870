// How a quantized panel lies in memory: the same for whoever packs it and for every instruction set.
//
// A panel (32 outputs) is a sequence of groups of inputs, each a multiple of 64 bytes, so that a product
// reads one sequential stream. A group holds
//   numbers  Q8, Q8_MIN: [inputs / 4][32 outputs][4], a byte b for the number b - 128
//            Q4:         [inputs / 8][32 outputs][4], in the lower half of a byte input i, in the upper input i + 16
//   scales   [32 outputs], half precision
//   minima   [32 outputs], half precision, Q4 and Q8_MIN only
// and stands for  scale * number + minimum.  Four inputs of an output lie together because that is what dot
// products of bytes add up; the offset of 128 because they want one side unsigned. No byte belongs to two
// outputs, so threads may pack different ones at once. Zeros everywhere are an output of zeros.
#pragma once

#include "model.h"

namespace ob {

constexpr int64_t kHalvesBytes = 2 * kPanelOutputs;
constexpr int kByteZero = 128;  // the byte that stands for 0 in Q8 and Q8_MIN

struct QuantLayout {
    int64_t inputs;  // of a group; 0 where a store has no such group
    int64_t scales;  // bytes from a group's begin
    int64_t minima;  // likewise; 0: none
    int64_t bytes;   // of a group
};

constexpr QuantLayout kQ8Layout32 = {32, 32 * kPanelOutputs, 0, 32 * kPanelOutputs + kHalvesBytes};
constexpr QuantLayout kQ8Layout16 = {16, 16 * kPanelOutputs, 0, 16 * kPanelOutputs + kHalvesBytes};
constexpr QuantLayout with_minima(QuantLayout layout) {
    return {layout.inputs, layout.scales, layout.bytes, layout.bytes + kHalvesBytes};
}
constexpr QuantLayout kQ4Layout32 = {32, 16 * kPanelOutputs, 16 * kPanelOutputs + kHalvesBytes,
                                     16 * kPanelOutputs + 2 * kHalvesBytes};

}  // namespace ob

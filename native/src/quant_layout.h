// How a quantized panel lies in memory: the same for whoever packs it and for every instruction set.
//
// A panel (32 outputs) is a sequence of groups of inputs, each a multiple of 64 bytes, so that a product
// reads one sequential stream. A group holds
//   numbers  Q8, Q8_MIN: [inputs / 4][32 outputs][4], a byte b for the number b - 128
//            Q4:         [inputs / 8][32 outputs][4], in the lower half of a byte input i, in the upper input i + 16
//            E2M1:       likewise, of groups of 16 input i + 8 in the upper half: a code of kE2M1Numbers
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
// Floats of 4 bits (1 for the sign, 2 for the exponent, 1 for the mantissa; OCP Microscaling Formats 1.0), twice as large,
// so that they are whole, and kE2M1Zero more, so that they have no sign. A scale in memory is half of the file's.
constexpr int kE2M1Zero = 12;
constexpr uint8_t kE2M1Numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

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
constexpr QuantLayout kE2M1Layout32 = {32, 16 * kPanelOutputs, 0, 16 * kPanelOutputs + kHalvesBytes};
constexpr QuantLayout kE2M1Layout16 = {16, 8 * kPanelOutputs, 0, 8 * kPanelOutputs + kHalvesBytes};

}  // namespace ob

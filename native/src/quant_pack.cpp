// GGUF's blocks, and plain numbers, into the layout of quant_layout.h.
//
// Each source type is read group by group into one common form (quant_blocks.h), which the stores then write.
#include "quant_pack.h"

#include <algorithm>

#include "quant_blocks.h"

namespace ob {
namespace {

bool is_plain(int32_t source_type) { return source_type == OB_SOURCE_F32 || source_type == OB_SOURCE_BF16; }

// ---- Stores ----

QuantLayout layout_of(int32_t store, int32_t group) {
    if (store == OB_STORE_Q8 && group == 32) return kQ8Layout32;
    if (store == OB_STORE_Q8 && group == 16) return kQ8Layout16;
    if (store == OB_STORE_Q8_MIN && group == 32) return with_minima(kQ8Layout32);
    if (store == OB_STORE_Q8_MIN && group == 16) return with_minima(kQ8Layout16);
    if (store == OB_STORE_Q4 && group == 32) return kQ4Layout32;
    if (store == OB_STORE_E2M1 && group == 32) return kE2M1Layout32;
    if (store == OB_STORE_E2M1 && group == 16) return kE2M1Layout16;
    return {};
}

// One output's part of a group.
class Place {
public:
    Place(const ob_matrix& matrix, int64_t output, int64_t group)
        : layout_(layout_of(matrix.store, matrix.group)),
          store_(matrix.store),
          bytes_(matrix.data + output / kPanelOutputs * matrix.panel_bytes + group * layout_.bytes),
          column_(output % kPanelOutputs) {}

    uint8_t* four_inputs(int64_t input) const { return bytes_ + (input / 4 * kPanelOutputs + column_) * 4; }
    uint8_t* scale() const { return bytes_ + layout_.scales + 2 * column_; }
    uint8_t* minimum() const { return bytes_ + layout_.minima + 2 * column_; }

    float value(int64_t input) const {
        if (store_ != OB_STORE_Q4 && store_ != OB_STORE_E2M1) {
            const float product = half_at(scale()) * (float)(four_inputs(input)[input % 4] - kByteZero);
            return layout_.minima == 0 ? product : product + half_at(minimum());
        }
        const int64_t half = layout_.inputs / 2;
        const uint8_t byte = four_inputs(input % half)[input % 4], code = input < half ? byte & 15 : byte >> 4;
        if (store_ == OB_STORE_E2M1) return half_at(scale()) * (float)(kE2M1Numbers[code] - kE2M1Zero);
        return half_at(scale()) * (float)code + half_at(minimum());
    }

private:
    QuantLayout layout_;
    int32_t store_;
    uint8_t* bytes_;
    int64_t column_;
};

// `first`: where in the source's group the store's (which may be the smaller) begins.
void write_q8(const Place& place, const Group& group, int64_t first, int64_t num_inputs) {
    uint8_t bytes[kMostInputs];
    for (int64_t i = 0; i < num_inputs; ++i) {
        bytes[i] = (uint8_t)(group.numbers[first + i] - group.zero + kByteZero);
    }
    for (int64_t i = 0; i < num_inputs; i += 4) memcpy(place.four_inputs(i), bytes + i, 4);
    put_half(place.scale(), to_half(group.scale));
}

// Codes of 4 bits, those of the second half in the upper bits of a byte.
void write_codes(const Place& place, const uint8_t* low, const uint8_t* high, int64_t count) {
    for (int64_t i = 0; i < count; i += 4) {
        uint8_t bytes[4];
        for (int64_t j = 0; j < 4; ++j) bytes[j] = (uint8_t)(low[i + j] | high[i + j] << 4);
        memcpy(place.four_inputs(i), bytes, sizeof bytes);
    }
}

void write_q4(const Place& place, const Group& group) {
    write_codes(place, group.numbers, group.numbers + 16, 16);
    put_half(place.scale(), to_half(group.scale));
    put_half(place.minimum(), to_half(group.minimum - (float)group.zero * group.scale));
}

void write_e2m1(const Place& place, const Group& group, int64_t first, int64_t num_inputs) {
    const uint8_t* codes = group.numbers + first;
    write_codes(place, codes, codes + num_inputs / 2, num_inputs / 2);
    put_half(place.scale(), to_half(group.scale));
}

void pack_blocks(ob_matrix& matrix, int64_t output, const SourceType& source, const uint8_t* row) {
    const int64_t groups_per_block = source.block_inputs / source.group;
    const int64_t num_groups = matrix.num_inputs / source.group;
    for (int64_t index = 0; index < num_groups; ++index) {
        Group group;
        source.read(row + index / groups_per_block * source.block_bytes, index % groups_per_block, group);
        if (matrix.store == OB_STORE_Q4) {
            write_q4(Place(matrix, output, index), group);
            continue;
        }
        if (source.four_bits == OB_STORE_E2M1 && matrix.store != OB_STORE_E2M1) {
            for (int64_t i = 0; i < source.group; ++i) group.numbers[i] = kE2M1Numbers[group.numbers[i]];
        }
        const int64_t parts = source.group / matrix.group;
        for (int64_t part = 0; part < parts; ++part) {
            const Place place(matrix, output, index * parts + part);
            if (matrix.store == OB_STORE_E2M1) {
                write_e2m1(place, group, part * matrix.group, matrix.group);
                continue;
            }
            write_q8(place, group, part * matrix.group, matrix.group);
            if (matrix.store == OB_STORE_Q8_MIN) put_half(place.minimum(), to_half(group.minimum));
        }
    }
}

void read_plain(int32_t source_type, const uint8_t* row, int64_t first, int64_t count, float* values) {
    if (source_type == OB_SOURCE_F32) {
        memcpy(values, row + 4 * first, (size_t)(4 * count));
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        uint16_t upper;
        memcpy(&upper, row + 2 * (first + i), 2);
        const uint32_t bits = (uint32_t)upper << 16;
        memcpy(&values[i], &bits, sizeof bits);
    }
}

// The nearest whole numbers from `least` to `largest` for values / scale. Added to 1.5 * 2^23, a number is rounded to
// a whole one, in the lowest bits: a loop without calls.
void round_to_codes(const float* values, int64_t count, float scale, float least, float largest, Group& group) {
    const float minimum = group.minimum, offset = 0x1.8p23f + (float)group.zero;  // bytes may be any of the group's
    uint32_t bits[kMostInputs];
    for (int64_t i = 0; i < count; ++i) {
        const float exact = (values[i] - minimum) / scale, above = exact > least ? exact : least;
        const float rounded = (above < largest ? above : largest) + offset;
        memcpy(&bits[i], &rounded, sizeof rounded);
    }
    for (int64_t i = 0; i < count; ++i) group.numbers[i] = (uint8_t)bits[i];
}

struct Range {
    float least, largest;
};

using Four = float __attribute__((vector_size(16)));

Range range_of(const float* values, int64_t count) {
    Four low, high, next;
    memcpy(&low, values, sizeof low);
    high = low;
    for (int64_t first = 4; first < count; first += 4) {
        memcpy(&next, values + first, sizeof next);
        low = next < low ? next : low;
        high = next > high ? next : high;
    }
    Range range = {low[0], high[0]};
    for (int i = 1; i < 4; ++i) {
        range.least = low[i] < range.least ? low[i] : range.least;
        range.largest = high[i] > range.largest ? high[i] : range.largest;
    }
    return range;
}

// The scale is rounded first, and up, so that the numbers are the nearest for it and the largest is not cut.
Group quantize(const float* values, int64_t count) {
    const auto [least, largest] = range_of(values, count);
    const float scale = from_half(to_half_rounded_up((-least > largest ? -least : largest) / 127.0f));
    Group group = {{}, kByteZero, scale, 0};
    round_to_codes(values, count, scale > 0 ? scale : INFINITY, -127, 127, group);
    return group;
}

// Likewise in 4 bits, from the least number on.
Group quantize_to_codes(const float* values, int64_t count) {
    const auto [least, largest] = range_of(values, count);
    const float minimum = from_half(to_half(least)), scale = from_half(to_half((largest - minimum) / 15.0f));
    Group group = {{}, 0, scale, minimum};
    round_to_codes(values, count, scale > 0 ? scale : INFINITY, 0, 15, group);
    return group;
}

void pack_plain(ob_matrix& matrix, int64_t output, int32_t source_type, const uint8_t* row) {
    for (int64_t first = 0; first < matrix.num_inputs; first += matrix.group) {
        const int64_t left = matrix.num_inputs - first, count = left < matrix.group ? left : matrix.group;
        float values[kMostInputs];
        read_plain(source_type, row, first, count, values);
        std::fill(values + count, values + kMostInputs, 0.0f);  // beyond the last input
        const Place place(matrix, output, first / matrix.group);
        if (matrix.store == OB_STORE_Q4) {
            write_q4(place, quantize_to_codes(values, matrix.group));
        } else {
            write_q8(place, quantize(values, matrix.group), 0, matrix.group);
        }
    }
}

}  // namespace

int64_t quantized_panel_bytes(int32_t store, int64_t padded_inputs, int32_t group) {
    const QuantLayout layout = layout_of(store, group);
    return layout.inputs ? padded_inputs / layout.inputs * layout.bytes : 0;
}

bool quantized_takes(const ob_matrix& matrix, int32_t source_type) {
    if (layout_of(matrix.store, matrix.group).inputs == 0) return false;
    if (is_plain(source_type)) return matrix.store == OB_STORE_Q8 || matrix.store == OB_STORE_Q4;
    const SourceType* source = find_source(source_type);
    if (source == nullptr || source->group < matrix.group) return false;
    if (matrix.store == OB_STORE_Q4 || matrix.store == OB_STORE_E2M1) return source->four_bits == matrix.store;
    return matrix.store == OB_STORE_Q8_MIN || !source->has_minimum;
}

void pack_quantized_row(ob_matrix& matrix, int64_t output, int32_t source_type, const void* row) {
    if (is_plain(source_type)) {
        pack_plain(matrix, output, source_type, (const uint8_t*)row);
    } else {
        pack_blocks(matrix, output, *find_source(source_type), (const uint8_t*)row);
    }
}

float quantized_value(const ob_matrix& matrix, int64_t output, int64_t input) {
    return Place(matrix, output, input / matrix.group).value(input % matrix.group);
}

void quantized_row(const ob_matrix& matrix, int64_t output, float* row) {
    for (int64_t first = 0; first < matrix.num_inputs; first += matrix.group) {
        const Place place(matrix, output, first / matrix.group);
        const int64_t left = matrix.num_inputs - first;
        for (int64_t i = 0; i < matrix.group && i < left; ++i) row[first + i] = place.value(i);
    }
}

}  // namespace ob

// Quantized matrices: what they take and how rows get in. How they are multiplied: quant.h.
#pragma once

#include "model.h"

namespace ob {

// Bytes of a panel; 0 where the store has no groups of this size (32; all but Q4 16, too).
int64_t quantized_panel_bytes(int32_t store, int64_t padded_inputs, int32_t group);

// Whether a matrix holds the numbers of a source as they are (scales rounded to half precision), or, for
// plain numbers, quantizes them. What it could only hold by quantizing a second time, it refuses.
bool quantized_takes(const ob_matrix& matrix, int32_t source_type);

// Packs one row of a source that the matrix takes. Different outputs may be packed at the same time.
//
// Plain numbers are quantized symmetrically: the largest of a group becomes 127 or -127.
void pack_quantized_row(ob_matrix& matrix, int64_t output, int32_t source_type, const void* row);

// What a packed number stands for; and a whole row, [num_inputs].
float quantized_value(const ob_matrix& matrix, int64_t output, int64_t input);
void quantized_row(const ob_matrix& matrix, int64_t output, float* row);

}  // namespace ob

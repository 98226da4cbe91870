// What the tests of products by AMX call: linear.h with emulated tiles, without a model around it.
#include <vector>

#include "linear.h"

using namespace ob;
using namespace ob::OB_NAMESPACE;

extern "C" {

// y[row] = the sums of rows `first_row` to `end_row`, panels `first_panel` to `end_panel`; other numbers stay.
void shim_multiply(const ob_matrix* matrix, const bf16* x, int64_t stride, int64_t first_row, int64_t end_row,
                   int64_t first_panel, int64_t end_panel, float* y) {
    const AmxInUse tiles;
    std::vector<uint8_t> scratch(1 << 20);
    const int64_t width = matrix->num_panels * kPanelOutputs;
    multiply<BFloat16>(*matrix, {x, stride}, {first_row, end_row}, {first_panel, end_panel}, nullptr, scratch.data(),
                       {OB_ACTIVATIONS_AUTO, false}, [=](int64_t row, int64_t panel, const float* sums) {
                           float* to = y + row * width + panel * kPanelOutputs;
                           for (int64_t i = 0; i < kPanelOutputs; ++i) to[i] += sums[i];
                       });
}

// Of a tile of 16 x 16 sums: sums += inputs x weights, all as they lie in tiles.
void shim_madd(float* sums, const bf16* inputs, const bf16* weights) {
    const AmxInUse tiles;
    Amx::load<0>(sums, kAmxBytes);
    Amx::load<1>(inputs, kAmxBytes);
    Amx::load<2>(weights, kAmxBytes);
    Amx::madd<0, 1, 2>();
    Amx::store<0>(sums, kAmxBytes);
}

int64_t shim_fewest_rows() { return kFewestAmxRows; }
int64_t shim_fewest_expanded_rows() { return kFewestExpandedRows; }

}  // extern "C"

// Work on single rows: norms, rotation, activations, epilogues of products, KV stores, the largest logit.
#pragma once

#include "simd.h"
#include "step.h"

namespace ob {
namespace OB_NAMESPACE {

template <class Number>
OB_INLINE void convert(Number* to, const float* from, int64_t count) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store_as(to + i, load(from + i));
    for (; i < count; ++i) {
        if constexpr (sizeof(Number) == 2) {
            to[i] = to_bf16(from[i]);
        } else {
            to[i] = from[i];
        }
    }
}

OB_INLINE float inverse_rms(const float* x, int64_t count, float eps) {
    F16 squares = zero();
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < count; ++i) total += x[i] * x[i];
    return 1.0f / __builtin_sqrtf(total / (float)count + eps);
}

// LayerNorm (Ba et al., 2016): the mean is taken off before RMSNorm, in place, and a bias may be added behind it.
OB_INLINE void centre(float* x, int64_t count) {
    F16 totals = zero();
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) totals = totals + load(x + i);
    float mean = sum(totals);
    for (; i < count; ++i) mean += x[i];
    mean /= (float)count;
    for (i = 0; i < count; ++i) x[i] -= mean;
}

// RMSNorm (Zhang and Sennrich, 2019): x / rms(x) * weight.
template <class E>
void normalise(const float* x, const float* weight, int64_t count, float eps, typename E::Number* to) {
    const float factor = inverse_rms(x, count, eps);
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store_as(to + i, load(x + i) * splat(factor) * load(weight + i));
    for (; i < count; ++i) to[i] = E::from_float(x[i] * factor * weight[i]);
}

OB_INLINE void normalise_in_place(float* x, const float* weight, int64_t count, float eps) {
    const float factor = inverse_rms(x, count, eps);
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] * factor * weight[i];
}

inline void normalise_row_in_place(const ob_model& model, float* x, const float* weight) {
    const int64_t count = model.hidden_size;
    if (model.norms_center) centre(x, count);
    normalise_in_place(x, weight, count, model.rms_norm_eps);
    if (!model.norms_have_bias) return;
    for (int64_t i = 0; i < count; ++i) x[i] += weight[count + i];
}

// The norm of a row of the residual as the model has it; `own` is room for a copy of the row.
template <class E>
void normalise_row(const ob_model& model, const float* x, const float* weight, float* own, typename E::Number* to) {
    const int64_t count = model.hidden_size;
    if (!model.norms_center && !model.norms_have_bias) return normalise<E>(x, weight, count, model.rms_norm_eps, to);
    memcpy(own, x, count * sizeof(float));
    normalise_row_in_place(model, own, weight);
    convert(to, own, count);
}

// Rotary embedding: of the first `turning` dimensions P, pairs (i, i + P/2) turn by their angle. `turn` has P/2 cosines,
// then P/2 sines. All dimensions are scaled.
OB_INLINE void rotate(float* head, const float* turn, int64_t turning, int64_t dim, float scale) {
    const int64_t half = turning / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float cosine = turn[i] * scale, sine = turn[half + i] * scale;
        const float low = head[i], high = head[half + i];
        head[i] = low * cosine - high * sine;
        head[half + i] = high * cosine + low * sine;
    }
    for (int64_t i = turning; i < dim; ++i) head[i] *= scale;
}

template <class E>
OB_INLINE void store_key(typename E::Number* page, const float* key, int64_t dim, int64_t offset) {
    for (int64_t i = 0; i < dim; i += E::kPack)
        for (int64_t part = 0; part < E::kPack; ++part)
            page[(i * kPageTokens) + offset * E::kPack + part] = E::from_float(key[i + part]);
}

template <class E>
OB_INLINE void store_value(typename E::Number* page, const float* value, int64_t dim, int64_t padded,
                           int64_t offset) {
    typename E::Number* row = page + offset / E::kPack * padded * E::kPack + offset % E::kPack;
    for (int64_t i = 0; i < dim; ++i) row[i * E::kPack] = E::from_float(value[i]);
}

OB_INLINE F16 sigmoid(F16 x) { return splat(1.0f) / (splat(1.0f) + exp(zero() - x)); }
OB_INLINE F16 tanh(F16 x) { return splat(2.0f) * sigmoid(x + x) - splat(1.0f); }
OB_INLINE F16 silu(F16 x) { return x * sigmoid(x); }

// Multiplies numbers by what a function makes of others.
template <class Function>
OB_INLINE void multiply_by(float* x, const float* y, int64_t count, Function function) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store(x + i, load(x + i) * function(load(y + i)));
    if (i == count) return;
    float lanes[16] = {};
    memcpy(lanes, y + i, (count - i) * sizeof(float));
    store(lanes, function(load(lanes)));
    for (int64_t lane = 0; i < count; ++i, ++lane) x[i] *= lanes[lane];
}

// 0.5 x (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
OB_INLINE F16 gelu_tanh(F16 x) {
    const F16 u = splat(1.5957691216057308f) * fma(splat(0.044715f) * x * x, x, x);
    return x * sigmoid(u);
}

// gpt-oss: both held within 7, one is added to `up`.
OB_INLINE F16 clamped_swiglu(F16 gate, F16 up) {
    const F16 most = splat(7.0f);
    gate = min(gate, most);
    up = max(min(up, most), splat(-7.0f));
    return gate * sigmoid(splat(1.702f) * gate) * (up + splat(1.0f));
}
OB_INLINE F16 activate(int32_t activation, F16 gate, F16 up) {
    if (activation == OB_ACTIVATION_CLAMPED_SWIGLU) return clamped_swiglu(gate, up);
    return (activation == OB_ACTIVATION_SILU ? silu(gate) : gelu_tanh(gate)) * up;
}

// What a panel of a gated feed-forward's first matrix comes to: 16 numbers of gate and up, or 32 without gates.
struct Gates {
    int32_t activation;
    bool is_ungated;
    const float* bias;

    Gates(const ob_model& model, const float* own_bias)
        : activation(model.activation), is_ungated(model.is_ungated), bias(own_bias) {}
    int64_t width() const { return is_ungated ? kPanelOutputs : kPanelOutputs / 2; }

    template <class Number>
    OB_INLINE void store_panel(Number* row, int64_t panel, const float* sums) const {
        F16 first = load(sums), second = load(sums + 16);
        if (bias != nullptr) {
            first = first + load(bias + panel * kPanelOutputs);
            second = second + load(bias + panel * kPanelOutputs + 16);
        }
        if (!is_ungated) return store_as(row + panel * 16, activate(activation, first, second));
        store_as(row + panel * kPanelOutputs, activate(activation, first, splat(1.0f)));
        store_as(row + panel * kPanelOutputs + 16, activate(activation, second, splat(1.0f)));
    }
};

OB_INLINE void copy_panel(float* row, int64_t panel, int64_t num_outputs, const float* sums, const float* bias) {
    const int64_t first = panel * kPanelOutputs;
    if (bias == nullptr && first + kPanelOutputs <= num_outputs) {
        store(row + first, load(sums));
        store(row + first + 16, load(sums + 16));
        return;
    }
    const int64_t count = num_outputs - first < kPanelOutputs ? num_outputs - first : kPanelOutputs;
    for (int64_t i = 0; i < count; ++i) row[first + i] = sums[i] + (bias ? bias[first + i] : 0.0f);
}

OB_INLINE void add_panel(float* row, int64_t panel, int64_t num_outputs, const float* sums, const float* bias,
                         float scale) {
    const int64_t first = panel * kPanelOutputs;
    if (bias == nullptr && first + kPanelOutputs <= num_outputs) {
        store(row + first, load(row + first) + splat(scale) * load(sums));
        store(row + first + 16, load(row + first + 16) + splat(scale) * load(sums + 16));
        return;
    }
    const int64_t count = num_outputs - first < kPanelOutputs ? num_outputs - first : kPanelOutputs;
    for (int64_t i = 0; i < count; ++i) row[first + i] += scale * (sums[i] + (bias ? bias[first + i] : 0.0f));
}

// A row of a float matrix out of its panels: what embeddings look up.
inline void read_row(const ob_matrix& matrix, int64_t output, float* row) {
    const int64_t column = output % kPanelOutputs;
    const uint8_t* panel = matrix.panel(output / kPanelOutputs);
    if (matrix.store == OB_STORE_F32) {
        const float* from = (const float*)panel + column;
        for (int64_t i = 0; i < matrix.num_inputs; ++i) row[i] = from[i * kPanelOutputs];
    } else if (matrix.store == OB_STORE_BF16) {
        const bf16* from = (const bf16*)panel + 2 * column;
        for (int64_t i = 0; i < matrix.num_inputs; ++i)
            row[i] = to_float(from[i / 2 * 2 * kPanelOutputs + i % 2]);
    } else {
        ob_matrix_row(&matrix, output, row);
    }
}

// The largest of a row's logits, lane by lane; the lowest id of equals.
struct LargestLogit {
    float values[kPanelOutputs];
    int32_t panels[kPanelOutputs];
    int32_t nans[16];

    void clear() {
        for (int i = 0; i < kPanelOutputs; ++i) {
            values[i] = -__builtin_inff();
            panels[i] = -1;
        }
        for (int i = 0; i < 16; ++i) nans[i] = 0;
    }

    OB_INLINE void see(int64_t panel, int64_t num_outputs, const float* sums) {
        if ((panel + 1) * kPanelOutputs > num_outputs) return see_some(panel, num_outputs, sums);
#pragma GCC unroll 2
        for (int half = 0; half < 32; half += 16) {
            const F16 now = load(sums + half), before = load(values + half);
            const I16 larger = greater(now, before);
            store(values + half, select(larger, now, before));
            store(panels + half, select(larger, splat((int32_t)panel), load(panels + half)));
            store(nans, load(nans) | is_nan(now));
        }
    }

    void see_some(int64_t panel, int64_t num_outputs, const float* sums) {
        for (int64_t i = 0; panel * kPanelOutputs + i < num_outputs; ++i) {
            if (sums[i] != sums[i]) nans[0] = -1;
            if (sums[i] > values[i]) {
                values[i] = sums[i];
                panels[i] = (int32_t)panel;
            }
        }
    }

    Best best() const {
        Best found = {-__builtin_inff(), -1, any(load(nans))};
        for (int64_t i = 0; i < kPanelOutputs; ++i) {
            if (panels[i] < 0) continue;
            const int64_t id = panels[i] * kPanelOutputs + i;
            if (values[i] > found.value || (values[i] == found.value && (found.id < 0 || id < found.id))) {
                found.value = values[i];
                found.id = id;
            }
        }
        return found;
    }
};

static_assert(sizeof(LargestLogit) <= kLargestLogitBytes, "step.h sets memory aside for it");

}  // namespace OB_NAMESPACE
}  // namespace ob

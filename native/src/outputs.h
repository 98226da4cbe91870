// What a step gives out: hidden states behind the final norm, and logits.
#pragma once

#include "linear.h"
#include "rows.h"

namespace ob {
namespace OB_NAMESPACE {

template <class E>
class Outputs {
public:
    typedef typename E::Number Number;

    Outputs(const StepContext& context, int thread, uint8_t* scratch, Arithmetic arithmetic)
        : context_(context),
          model_(*context.model),
          step_(*context.step),
          thread_(thread),
          scratch_(scratch),
          arithmetic_(arithmetic),
          input_stride_(round_up(model_.hidden_size, kInputMultiple)) {}

    void give_hidden() {
        const int64_t width = model_.hidden_size;
        const Range own = share_of(step_.num_hidden, thread_, context_.num_threads);
        for (int64_t index = own.first; index < own.end; ++index) {
            const float* from = hidden(context_.hidden_rows[index]);
            float* to = step_.hidden + index * width;
            for (int64_t i = 0; i < width; ++i) to[i] = from[i];
            normalise_row_in_place(model_, to, model_.final_norm);
        }
    }

    void find_logits() {
        const int64_t num_samples = step_.num_samples;
        if (num_samples == 0) return;
        // Each thread has its own copy of the sampled rows, and part of the vocabulary.
        Number* inputs = (Number*)context_.normed + thread_ * context_.normed_rows * input_stride_;
        for (int64_t sample = 0; sample < num_samples; ++sample) {
            normalise_row<E>(model_, hidden(context_.sample_rows[sample]), model_.head_norm, (float*)scratch_,
                             inputs + sample * input_stride_);
        }
        LargestLogit* largest = (LargestLogit*)(scratch_ + context_.scratch_bytes) - num_samples;
        for (int64_t sample = 0; sample < num_samples; ++sample) largest[sample].clear();
        const int64_t vocab_size = model_.vocab_size;
        float* logits = step_.logits;
        multiply<E>(*model_.lm_head, {inputs, input_stride_}, {0, num_samples},
                    share_of(model_.lm_head->num_panels, thread_, context_.num_threads), nullptr, scratch_, arithmetic_,
                    [=](int64_t sample, int64_t panel, const float* sums) {
                        float own[kPanelOutputs];
                        sums = finished_logits(panel, sums, own);
                        largest[sample].see(panel, vocab_size, sums);
                        if (logits != nullptr) copy_panel(logits + sample * vocab_size, panel, vocab_size, sums, nullptr);
                    });
        for (int64_t sample = 0; sample < num_samples; ++sample) {
            context_.best[thread_ * num_samples + sample] = largest[sample].best();
        }
    }

private:
    float* hidden(int64_t row) const { return context_.hidden + row * context_.hidden_stride; }

    const float* finished_logits(int64_t panel, const float* sums, float* own) const {
        if (model_.head_bias == nullptr && model_.logits_softcap == 0) return sums;
        for (int64_t i = 0; i < kPanelOutputs; i += 16) {
            F16 x = load(sums + i);
            if (model_.head_bias != nullptr) x = x + load(model_.head_bias + panel * kPanelOutputs + i);
            if (model_.logits_softcap != 0) x = splat(model_.logits_softcap) * tanh(x);
            store(own + i, x);
        }
        return own;
    }

    const StepContext& context_;
    const ob_model& model_;
    const ob_step& step_;
    const int thread_;
    uint8_t* const scratch_;
    const Arithmetic arithmetic_;
    const int64_t input_stride_;
};

}  // namespace OB_NAMESPACE
}  // namespace ob

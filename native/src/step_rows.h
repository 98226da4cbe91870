// What a thread does with its rows of a step: products, norms, and sums with the residual.
#pragma once

#include "linear.h"
#include "quant_rows.h"
#include "rows.h"

namespace ob {
namespace OB_NAMESPACE {

template <class E>
class StepRows {
protected:
    typedef typename E::Number Number;

    StepRows(StepContext& context, int thread)
        : context_(context),
          model_(*context.model),
          step_(*context.step),
          thread_(thread),
          arithmetic_{model_.activation_quantization, model_.batch_invariant != 0},
          scratch_(context.scratch + thread * context.scratch_bytes),
          input_stride_(round_up(model_.hidden_size, kInputMultiple)) {
        divide(step_.num_tokens);
    }

    void divide(int64_t num_rows) {
        num_rows_ = num_rows;
        by_columns_ = num_rows <= kMostColumnRows;
        own_ = share_of(num_rows, thread_, context_.num_threads);
        rows_ = {0, num_rows};
        normed_ = (Number*)context_.normed + (by_columns_ ? thread_ * context_.normed_rows * input_stride_ : 0);
    }

    void meet() { wait_for_all(*context_.pool); }
    void meet_if_divided_by_columns() {
        if (by_columns_) meet();
    }

    float* hidden(int64_t row) const { return context_.hidden + row * context_.hidden_stride; }
    float* branch(int64_t row) const { return context_.branch + row * context_.hidden_stride; }

    Range panels(const ob_matrix& w) const {
        if (by_columns_) return share_of(w.num_panels, thread_, context_.num_threads);
        return {0, w.num_panels};
    }
    // What this thread reads first of a matrix; quantized ones do their own asking ahead.
    const uint8_t* head(const ob_matrix& w) const {
        return w.is_quantized() ? nullptr : w.panel(panels(w).first);
    }

    Inputs<E> normed(Range rows, const float* weight) {
        for (int64_t row = rows.first; row < rows.end; ++row) {
            Number* to = normed_ + row * input_stride_;
            if (weight == nullptr) convert(to, hidden(row), model_.hidden_size);
            else normalise_row<E>(model_, hidden(row), weight, (float*)scratch_, to);
        }
        return {normed_, input_stride_};
    }

    template <class Epilogue>
    void product(const ob_matrix& w, Inputs<E> inputs, const ob_matrix& after, Epilogue epilogue) {
        product(w, inputs, panels(w), after, epilogue);
    }
    template <class Epilogue>
    void product(const ob_matrix& w, Inputs<E> inputs, Range panels, const ob_matrix& after, Epilogue epilogue) {
        multiply<E>(w, inputs, rows_, panels, head(after), scratch_, arithmetic_, epilogue);
    }

    // Where the bytes of a matrix's inputs are, if they are made once, by the threads that write the inputs. What
    // every thread normalises for itself, it makes bytes of for itself, too: sharing that would cost a meeting.
    QuantizedRows shared_bytes(const ob_matrix& w) const {
        const bool is_shared = num_rows_ == step_.num_tokens && by_columns_ && w.is_quantized() &&
                               are_inputs_bytes<E>(arithmetic_, step_.num_tokens);
        return is_shared ? place_rows(context_.quantized, step_.num_tokens, w.padded_inputs) : QuantizedRows{};
    }
    // Adds a product to the residual, past a norm where the family has one there.
    void add(const ob_matrix& w, Inputs<E> inputs, const float* bias, const float* norm, const ob_matrix& after) {
        const int64_t stride = context_.hidden_stride, width = model_.hidden_size;
        const float scale = model_.residual_scale;
        if (norm == nullptr) {
            float* to = context_.hidden;
            product(w, inputs, after, [=](int64_t row, int64_t panel, const float* sums) {
                add_panel(to + row * stride, panel, width, sums, bias, scale);
            });
            meet_if_divided_by_columns();
            return;
        }
        copy(w, inputs, bias, after);
        meet_if_divided_by_columns();
        for (int64_t row = own_.first; row < own_.end; ++row) {
            normalise_row_in_place(model_, branch(row), norm);
            for (int64_t i = 0; i < width; ++i) hidden(row)[i] += scale * branch(row)[i];
        }
        meet_if_divided_by_columns();
    }

    // Writes a product to what a block adds.
    void copy(const ob_matrix& w, Inputs<E> inputs, const float* bias, const ob_matrix& after) {
        const int64_t stride = context_.hidden_stride, width = model_.hidden_size;
        float* to = context_.branch;
        product(w, inputs, after, [=](int64_t row, int64_t panel, const float* sums) {
            copy_panel(to + row * stride, panel, width, sums, bias);
        });
    }

    StepContext& context_;
    const ob_model& model_;
    const ob_step& step_;
    const int thread_;
    const Arithmetic arithmetic_;
    uint8_t* const scratch_;
    const int64_t input_stride_;
    int64_t num_rows_;  // of all threads
    bool by_columns_;
    Range own_;   // the tokens that this thread embeds, rotates and adds up
    Range rows_;  // the rows of its products
    Number* normed_;
};

}  // namespace OB_NAMESPACE
}  // namespace ob

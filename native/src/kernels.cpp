// A step of the model, as every thread runs it. Compiled once for each instruction set (OB_NAMESPACE).
//
// Up to 64 tokens the threads divide the columns of each product: all work on the same rows, each normalises
// them for itself, and they wait for one another after each product. With more tokens they take chunks of rows:
// all that a token needs between two attentions is one thread's own, they meet around attention only, and a
// thread that shares its core takes fewer chunks.
#include "attention.h"
#include "delta.h"
#include "experts.h"
#include "heads.h"
#include "linear.h"
#include "rows.h"

namespace ob {
namespace OB_NAMESPACE {
namespace {

template <class E>
class StepThread {
public:
    typedef typename E::Number Number;

    StepThread(StepContext& context, int thread)
        : context_(context),
          model_(*context.model),
          step_(*context.step),
          thread_(thread),
          arithmetic_{model_.activation_quantization, model_.batch_invariant != 0},
          scratch_(context.scratch + thread * context.scratch_bytes),
          input_stride_(round_up(model_.hidden_size, kInputMultiple)) {
        divide(step_.num_tokens);
    }

    void run() {
        if (by_columns_) {
            run_by_columns();
        } else {
            run_by_rows();
        }
        give_hidden();
        find_logits();
    }

private:
    void divide(int64_t num_rows) {
        num_rows_ = num_rows;
        by_columns_ = num_rows <= kMostColumnRows;
        own_ = share_of(num_rows, thread_, context_.num_threads);
        rows_ = {0, num_rows};
        normed_ = (Number*)context_.normed + (by_columns_ ? thread_ * context_.normed_rows * input_stride_ : 0);
    }

    // Behind the last attention only some tokens' rows are wanted; these move together.
    void keep_wanted() {
        if (context_.num_wanted == step_.num_tokens) return;
        if (thread_ == 0) {
            Number* mixed = (Number*)context_.mixed;
            for (int64_t row = 0; row < context_.num_wanted; ++row) {
                const int64_t token = context_.wanted_tokens[row];
                if (token == row) continue;
                memcpy(hidden(row), hidden(token), model_.hidden_size * sizeof(float));
                memcpy(mixed + row * context_.mixed_stride, mixed + token * context_.mixed_stride,
                       context_.mixed_stride * sizeof(Number));
            }
        }
        meet();
        divide(context_.num_wanted);
    }

    void run_by_columns() {
        begin();
        meet();
        for (int64_t layer = 0; layer < model_.num_layers; ++layer) {
            project(layer);
            meet();
            run_items(layer);
            meet();
            if (layer + 1 == model_.num_layers) keep_wanted();
            finish(layer);
        }
    }

    void run_by_rows() {
        for (int64_t layer = 0;; ++layer) {
            const bool is_last = layer == model_.num_layers;
            const bool had_experts = layer > 0 && model_.layers[layer - 1].router != nullptr;
            if (had_experts) run_experts_by_rows(layer - 1);
            if (is_last) {
                keep_wanted();
                if (by_columns_) return finish(layer - 1);
            }
            for (Range chunk; take_chunk(context_.taken_chunks + layer, chunk);) {
                own_ = rows_ = chunk;
                if (layer == 0) begin();
                if (layer > 0 && !had_experts) finish(layer - 1);
                if (!is_last) project(layer);
            }
            meet();
            if (is_last) return;
            run_items(layer);
            meet();
        }
    }

    void run_experts_by_rows(int64_t index) {
        for (Range chunk; take_chunk(context_.taken_routes + index, chunk);) {
            own_ = rows_ = chunk;
            add_mixed(index);
            route(index);
        }
        meet();
        experts(index, {normed_, input_stride_}).run();
        meet();
    }

    bool take_chunk(int64_t* taken, Range& chunk) {
        const int64_t index = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
        chunk.first = index * context_.chunk_rows;
        chunk.end = chunk.first + context_.chunk_rows;
        if (chunk.end > num_rows_) chunk.end = num_rows_;
        return chunk.first < num_rows_;
    }

    void begin() {
        embed();
        for (int64_t rope = 0; rope < context_.num_ropes; ++rope) find_angles(context_, rope, own_);
    }

    // From the residual to queries, and keys and values in the cache.
    void project(int64_t index) {
        const ob_layer& layer = model_.layers[index];
        const Inputs<E> inputs = normed(rows_, layer.attention_norm);
        float* qkv = context_.qkv;
        const float* bias = layer.qkv_bias;
        const int64_t stride = context_.qkv_stride;
        for (int part = 0, count = count_qkv(layer); part < count; ++part) {
            const ob_matrix& w = *layer.qkv[part];
            const int64_t num_outputs = w.num_outputs;
            product(w, inputs, *(part + 1 < count ? layer.qkv[part + 1] : layer.o),
                    [=](int64_t row, int64_t panel, const float* sums) {
                        copy_panel(qkv + row * stride, panel, num_outputs, sums, bias);
                    });
            qkv += num_outputs;
            if (bias != nullptr) bias += num_outputs;
        }
        if (layer.conv != nullptr) return;
        meet_if_divided_by_columns();
        for (int64_t token = own_.first; token < own_.end; ++token)
            rotate_and_store<E>(context_, index, token);
    }

    // From what attention mixed to the residual after the layer.
    void finish(int64_t index) {
        if (model_.is_parallel) feed_forward(index);
        add_mixed(index);
        if (model_.is_parallel) return;
        if (model_.layers[index].router == nullptr) return feed_forward(index);
        route(index);
        meet();
        experts(index, {normed_, input_stride_}).run();
        meet();
    }

    void add_mixed(int64_t index) {
        const ob_layer& layer = model_.layers[index];
        const Inputs<E> mixed = {(const Number*)context_.mixed, context_.mixed_stride, mixed_bytes(layer)};
        const ob_matrix& after = layer.router != nullptr ? *layer.router : *layer.gate_up;
        add(*layer.o, mixed, layer.o_bias, layer.after_attention_norm, after);
    }

    SparseFeedForward<E> experts(int64_t index, Inputs<E> inputs) {
        return {context_, model_.layers[index], thread_, inputs, scratch_, arithmetic_};
    }
    void route(int64_t index) { experts(index, normed(rows_, model_.layers[index].mlp_norm)).route(own_); }

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

    void embed() {
        for (int64_t token = own_.first; token < own_.end; ++token) {
            float* row = hidden(token);
            read_row(*model_.embedding, step_.token_ids[token], row);
            if (model_.embedding_scale != 1.0f) {
                for (int64_t i = 0; i < model_.hidden_size; ++i) row[i] *= model_.embedding_scale;
            }
        }
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
    // Whoever mixes a head makes its bytes, if blocks of bytes do not reach into the next head, and nobody makes others
    // before they are read.
    QuantizedRows mixed_bytes(const ob_layer& layer) const {
        const bool may_share = layer.conv == nullptr && !model_.is_parallel && model_.head_dim % kBlockInputs == 0;
        return may_share ? shared_bytes(*layer.o) : QuantizedRows{};
    }

    // ---- Attention ----

    void run_items(int64_t index) {
        if (model_.layers[index].conv != nullptr) return DeltaRule<E>(context_, index, scratch_).run_all(context_.taken + index);
        Attention<E> attention(context_, index, scratch_, mixed_bytes(model_.layers[index]));
        int64_t* taken = context_.taken + index;
        const bool is_last = index + 1 == model_.num_layers;
        for (;;) {
            const int64_t item = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
            if (item >= context_.num_items) break;
            if (!is_last || context_.items[item].is_wanted) attention.run(context_.items[item]);
        }
        if (context_.num_merges == 0) return;
        meet();
        const Range own = share_of(context_.num_merges, thread_, context_.num_threads);
        for (int64_t merge = own.first; merge < own.end; ++merge) attention.merge(context_.merges[merge]);
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
        float* to = context_.branch;
        product(w, inputs, after, [=](int64_t row, int64_t panel, const float* sums) {
            copy_panel(to + row * stride, panel, width, sums, bias);
        });
        meet_if_divided_by_columns();
        for (int64_t row = own_.first; row < own_.end; ++row) {
            normalise_row_in_place(model_, branch(row), norm);
            for (int64_t i = 0; i < width; ++i) hidden(row)[i] += scale * branch(row)[i];
        }
        meet_if_divided_by_columns();
    }

    // ---- Feed-forward ----

    // This thread's panels of gate and up, in pairs: each gives 16 inputs of what follows, half a block of bytes.
    Range gated_panels(const ob_matrix& w) const {
        if (!by_columns_ || model_.is_ungated) return panels(w);
        const Range pairs = share_of((w.num_panels + 1) / 2, thread_, context_.num_threads);
        return {2 * pairs.first, 2 * pairs.end < w.num_panels ? 2 * pairs.end : w.num_panels};
    }

    void feed_forward(int64_t index) {
        const ob_layer& layer = model_.layers[index];
        Number* gated = (Number*)context_.gated;
        const int64_t stride = context_.gated_stride;
        const ob_matrix& gate_up = *layer.gate_up;
        const ob_matrix& down = *layer.down;
        const Inputs<E> inputs = normed(rows_, layer.mlp_norm);
        const QuantizedRows bytes = shared_bytes(down);
        const Range own = gated_panels(gate_up);
        const Gates gates(model_, layer.gate_up_bias);
        product(gate_up, inputs, own, down, [=](int64_t row, int64_t panel, const float* sums) {
            gates.store_panel(gated + row * stride, panel, sums);
        });
        if (bytes.values != nullptr) {
            const int64_t width = gates.width();
            quantize_part(bytes, gated, stride, rows_, {own.first * width / 32, (own.end * width + 31) / 32});
        }
        meet_if_divided_by_columns();
        const bool is_last = index + 1 == model_.num_layers;
        const ob_matrix& after = *(is_last ? model_.lm_head : model_.layers[index + 1].qkv[0]);
        add(down, {gated, stride, bytes}, layer.down_bias, layer.after_mlp_norm, after);
    }

    // ---- Hidden states ----

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

    // ---- Logits ----

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

void run_step(StepContext& context, int thread) {
#if defined(OB_AMX)
    const AmxInUse tiles;
#endif
    if (context.model->precision == OB_STORE_BF16) {
        StepThread<BFloat16>(context, thread).run();
    } else {
        StepThread<Float32>(context, thread).run();
    }
}

}  // namespace

#define OB_TEXT_OF(name) #name
#define OB_TEXT(name) OB_TEXT_OF(name)
extern const Kernels kernels;
#if defined(OB_AMX)
// 256 rows multiply 1024 numbers a cycle while 8 bytes of weights arrive, about what the cache that cores share gives.
const Kernels kernels = {OB_TEXT(OB_INSTRUCTION_SET), run_step, 256, kAmxQueries};
#else
// Blocks make floats of bfloat16 once for each chunk.
const Kernels kernels = {OB_TEXT(OB_INSTRUCTION_SET), run_step, kWidth == 16 ? 48 : 96, 12};
#endif

}  // namespace OB_NAMESPACE
}  // namespace ob

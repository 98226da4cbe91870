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
#include "outputs.h"
#include "step_rows.h"

namespace ob {
namespace OB_NAMESPACE {
namespace {

template <class E>
class StepThread : StepRows<E> {
public:
    typedef typename E::Number Number;

    StepThread(StepContext& context, int thread) : StepRows<E>(context, thread) {}

    void run() {
        if (by_columns_) {
            run_by_columns();
        } else {
            run_by_rows();
        }
        Outputs<E> outputs(context_, thread_, scratch_, arithmetic_);
        outputs.give_hidden();
        outputs.find_logits();
    }

private:
    typedef StepRows<E> Base;
    using Base::context_, Base::model_, Base::step_, Base::thread_, Base::arithmetic_, Base::scratch_;
    using Base::input_stride_, Base::num_rows_, Base::by_columns_, Base::own_, Base::rows_, Base::normed_;
    using Base::divide, Base::meet, Base::meet_if_divided_by_columns, Base::hidden, Base::branch, Base::panels;
    using Base::normed, Base::product, Base::shared_bytes, Base::add, Base::copy;

    // Behind the last attention only some tokens' rows are wanted; these move together.
    void keep_wanted() {
        if (context_.num_wanted == step_.num_tokens) return;
        if (thread_ == 0) {
            Number* mixed = (Number*)context_.mixed;
            for (int64_t row = 0; row < context_.num_wanted; ++row) {
                const int64_t token = context_.wanted_tokens[row];
                if (token == row) continue;
                memcpy(hidden(row), hidden(token), model_.hidden_size * sizeof(float));
                if (model_.layer_input_size > 0)
                    memcpy(own_input(row, model_.num_layers - 1), own_input(token, model_.num_layers - 1),
                           model_.layer_input_size * sizeof(float));
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
        find_layer_inputs();
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
                if (layer == 0) {
                    begin();
                    find_layer_inputs();
                } else if (had_experts) {
                    end_layer(layer - 1);
                } else {
                    finish(layer - 1);
                }
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

    float* own_input(int64_t row, int64_t layer) const {
        return context_.layer_inputs + row * context_.layer_input_stride + layer * model_.layer_input_size;
    }

    // Tokens' own inputs of all layers: what a table has of a token, and a product of its embedding past a norm.
    void find_layer_inputs() {
        const int64_t size = model_.layer_input_size, stride = context_.layer_input_stride;
        if (size == 0) return;
        float* inputs = context_.layer_inputs;
        const ob_matrix& w = *model_.layer_projection;
        product(w, normed(rows_, nullptr), *model_.layers[0].qkv[0], [=](int64_t row, int64_t panel, const float* sums) {
            copy_panel(inputs + row * stride, panel, w.num_outputs, sums, nullptr);
        });
        meet_if_divided_by_columns();
        const float of_embedding = 1.0f / __builtin_sqrtf((float)model_.hidden_size);
        const float of_table = __builtin_sqrtf((float)size), of_sum = __builtin_sqrtf(0.5f);
        float* found = (float*)scratch_;
        for (int64_t token = own_.first; token < own_.end; ++token) {
            read_row(*model_.layer_table, step_.token_ids[token], found);
            for (int64_t layer = 0; layer < model_.num_layers; ++layer) {
                float* own = own_input(token, layer);
                for (int64_t i = 0; i < size; ++i) own[i] *= of_embedding;
                normalise_in_place(own, model_.layer_input_norm, size, model_.rms_norm_eps);
                for (int64_t i = 0; i < size; ++i) own[i] = (own[i] + of_table * found[layer * size + i]) * of_sum;
            }
        }
    }

    // From the residual behind the feed-forward, or what experts found, to that behind the layer.
    void end_layer(int64_t index) {
        const ob_layer& layer = model_.layers[index];
        if (layer.router != nullptr && layer.after_mlp_norm != nullptr) add_found(layer);
        if (layer.input_gate != nullptr) add_own_inputs(index);
        if (layer.scale == 0) return;
        for (int64_t row = own_.first; row < own_.end; ++row)
            for (int64_t i = 0; i < model_.hidden_size; ++i) hidden(row)[i] *= layer.scale;
        meet_if_divided_by_columns();
    }

    // Adds what experts found, and a feed-forward beside them, past their norms.
    void add_found(const ob_layer& layer) {
        const int64_t width = model_.hidden_size;
        for (int64_t row = own_.first; row < own_.end; ++row) {
            float* found = context_.found + row * context_.hidden_stride;
            if (layer.gate_up != nullptr) {
                normalise_row_in_place(model_, found, layer.after_experts_norm);
                normalise_row_in_place(model_, branch(row), layer.after_dense_norm);
                for (int64_t i = 0; i < width; ++i) found[i] += branch(row)[i];
            }
            normalise_row_in_place(model_, found, layer.after_mlp_norm);
            for (int64_t i = 0; i < width; ++i) hidden(row)[i] += model_.residual_scale * found[i];
        }
        meet_if_divided_by_columns();
    }

    // Adds what a layer makes of the tokens' own inputs.
    void add_own_inputs(int64_t index) {
        const ob_layer& layer = model_.layers[index];
        Number* gated = (Number*)context_.gated;
        const int64_t stride = context_.gated_stride;
        const ob_matrix& w = *layer.input_gate;
        const QuantizedRows bytes = shared_bytes(*layer.input_projection);
        product(w, normed(rows_, nullptr), *layer.input_projection, [=](int64_t row, int64_t panel, const float* sums) {
            const float* own = own_input(row, index) + panel * kPanelOutputs;
            for (int64_t i = 0; i < kPanelOutputs; i += 16)
                store_as(gated + row * stride + panel * kPanelOutputs + i,
                         activate(model_.activation, load(sums + i), load(own + i)));
        });
        if (bytes.values != nullptr) quantize_part(bytes, gated, stride, rows_, panels(w));
        meet_if_divided_by_columns();
        add(*layer.input_projection, {gated, stride, bytes}, nullptr, layer.after_input_norm, after_layer(index));
    }

    // What is multiplied behind a layer.
    const ob_matrix& after_layer(int64_t index) const {
        return *(index + 1 == model_.num_layers ? model_.lm_head : model_.layers[index + 1].qkv[0]);
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
        if (model_.is_parallel) return end_layer(index);
        if (model_.layers[index].router == nullptr) {
            feed_forward(index);
            return end_layer(index);
        }
        route(index);
        meet();
        experts(index, {normed_, input_stride_}).run();
        meet();
        end_layer(index);
    }

    void add_mixed(int64_t index) {
        const ob_layer& layer = model_.layers[index];
        const Inputs<E> mixed = {(const Number*)context_.mixed, context_.mixed_stride, mixed_bytes(layer)};
        const ob_matrix& after = layer.gate_up == nullptr ? *layer.router : *layer.gate_up;
        add(*layer.o, mixed, layer.o_bias, layer.after_attention_norm, after);
    }

    SparseFeedForward<E> experts(int64_t index, Inputs<E> inputs) {
        return {context_, model_.layers[index], thread_, inputs, scratch_, arithmetic_};
    }
    // Runs the feed-forward beside the experts, where there is one, and chooses experts; their inputs are normalised.
    void route(int64_t index) {
        const ob_layer& layer = model_.layers[index];
        if (layer.gate_up != nullptr) feed_forward(index);
        for (int64_t row = own_.first; layer.after_mlp_norm != nullptr && row < own_.end; ++row)
            memset(context_.found + row * context_.hidden_stride, 0, model_.hidden_size * sizeof(float));
        experts(index, normed(rows_, layer.router_norm != nullptr ? layer.router_norm : layer.mlp_norm)).route(own_);
        if (layer.router_norm != nullptr) normed(rows_, layer.expert_norm);
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

    // Whoever mixes a head makes its bytes, if blocks of bytes do not reach into the next head, and nobody makes others
    // before they are read.
    QuantizedRows mixed_bytes(const ob_layer& layer) const {
        const bool may_share = layer.conv == nullptr && !model_.is_parallel && layer.head_dim % kBlockInputs == 0;
        return may_share ? shared_bytes(*layer.o) : QuantizedRows{};
    }

    // ---- Attention ----

    void run_items(int64_t index) {
        if (model_.layers[index].conv != nullptr) return DeltaRule<E>(context_, index, scratch_).run_all(context_.taken + index);
        Attention<E> attention(context_, index, scratch_, mixed_bytes(model_.layers[index]));
        int64_t* taken = context_.taken + index;
        const AttentionWork& work = context_.work[index];
        const bool is_last = index + 1 == model_.num_layers;
        for (;;) {
            const int64_t item = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
            if (item >= work.num_items) break;
            if (!is_last || work.items[item].is_wanted) attention.run(work.items[item]);
        }
        if (work.num_merges == 0) return;
        meet();
        const Range own = share_of(work.num_merges, thread_, context_.num_threads);
        for (int64_t merge = own.first; merge < own.end; ++merge) attention.merge(work.merges[merge]);
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
        const ob_matrix& after = layer.router != nullptr       ? *layer.router
                                 : layer.input_gate != nullptr ? *layer.input_gate
                                                               : after_layer(index);
        if (layer.router == nullptr) return add(down, {gated, stride, bytes}, layer.down_bias, layer.after_mlp_norm, after);
        copy(down, {gated, stride, bytes}, layer.down_bias, after);  // what experts find comes to it
    }

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

// Causal attention without the score matrix: FlashAttention-2 (arXiv:2307.08691) on blocks of 64 x 64 scores. Queries
// and keys can be two parts of a longer sequence. The backward then needs the output and log-sum-exp over all keys that
// the queries attend to.
//
// One call handles one key/value head and the query heads that share it, so keys and values are packed once. Rows and
// head dims are padded with zeros to complete tiles. The mask hides padded columns (by causality or by the number of
// keys), and padded rows are not written.
#pragma once

#include "gemm.h"

namespace frontier::FRONTIER_ISA {

constexpr int64_t kBlock = 64;

template <class T>
struct AttentionShape {
  int64_t sequence, head_dim;
  int64_t rows = round_up(sequence, kBlock);
  int64_t columns = round_up(head_dim, kTileColumns);                 // of outputs
  int64_t depth = units<T>(head_dim);                                 // units of a dot product over the head dim
  int64_t block_depth = units<T>(kBlock);  // units of a dot product over a block of positions
  int64_t row_elements = depth * Unit<T>::kDepth;                     // elements of a copied row
  int64_t transposed_size = rows * depth;                             // floats of pack_positions_as_columns
  int64_t panels_size = rows / Unit<T>::kDepth * columns;             // floats of pack_positions_as_depth
  int64_t panel_block = block_depth * columns;                        // floats of a block of pack_positions_as_depth
};

// Positions become columns of B (for scores = Q K^T): panels of kTileColumns positions.
template <class T>
void pack_positions_as_columns(const T* x, int64_t row, const AttentionShape<T>& shape, float* out) {
  for (int64_t s = 0; s < shape.rows; s += kTileColumns, out += shape.depth * kTileColumns) {
    const int64_t valid = shape.sequence - s < kTileColumns ? shape.sequence - s : kTileColumns;
    pack_transposed(x + s * row, row, shape.head_dim, valid > 0 ? valid : 0, out, kTileColumns);
  }
}

// Positions become the depth of B (for P V): per block of 64 positions, panels of kTileColumns head dims.
template <class T>
void pack_positions_as_depth(const T* x, int64_t row, const AttentionShape<T>& shape, float* out) {
  memset(out, 0, shape.panels_size * 4);
  for (int64_t s = 0; s < shape.sequence; s += kBlock)
    for (int64_t d = 0; d < shape.columns; d += kTileColumns, out += shape.block_depth * kTileColumns)
      if (d < shape.head_dim)
        pack(x + s * row + d, row, 1, shape.sequence - s < kBlock ? shape.sequence - s : kBlock,
             shape.head_dim - d < kTileColumns ? shape.head_dim - d : kTileColumns, out, kTileColumns);
}

// Rows for A: contiguous, in the unit's element type, with zeros after the sequence. Strided views of a fused QKV
// tensor touch a page per row, so the copy pays for itself.
template <class T>
void copy_rows(const T* x, int64_t row, const AttentionShape<T>& shape, typename Unit<T>::Element* out) {
  for (int64_t s = 0; s < shape.rows; ++s, out += shape.row_elements) {
    memset(out, 0, shape.row_elements * sizeof *out);
    if (s < shape.sequence)
      for_vectors(shape.head_dim, [&](int64_t, auto load, auto store) { store(out, load(x + s * row)); });
  }
}

// Converts the products of one row of a block to scores (scaled and soft-capped) and then to logits: ALiBi is added,
// and keys to which the row does not attend get -inf.
struct RowMask {
  int32_t position, first, last;  // position of the row, and range of its keys, counted from the first key
  int64_t first_column;
  float scale, softcap, slope;
  const int32_t* key_documents;  // padded copy, or null
  int32_t document;              // of the row
  bool ragged;                   // some rows of the block attend only to some of its columns

  template <class T>
  RowMask(const AttentionArgs<T>& args, const int32_t* padded, int64_t head, int64_t i0, int64_t i, int64_t j0)
      : position(static_cast<int32_t>(args.offset + i0 + i)),
        first(args.window ? position - static_cast<int32_t>(args.window) + 1 : 0),
        last(position < args.keys ? position : static_cast<int32_t>(args.keys) - 1),
        first_column(j0),
        scale(args.scale),
        softcap(args.softcap),
        slope(args.slopes ? args.slopes[head] : 0.0f),
        key_documents(padded),
        document(padded ? args.documents[i0 + i < args.queries ? i0 + i : args.queries - 1] : 0),
        ragged(j0 + kBlock > args.keys || j0 + kBlock - 1 > args.offset + i0 ||
               (args.window && j0 <= args.offset + i0 + kBlock - 1 - args.window)) {}

  ALWAYS_INLINE vf score(const float* products, int64_t j) const {
    const vf x = load(products + j) * scale;
    return softcap != 0.0f ? softcap * tanh(x / softcap) : x;
  }

  // Returns the derivative of a score with respect to the product q·k.
  ALWAYS_INLINE vf slope_of(vf score) const {
    if (softcap == 0.0f) return splat(scale);
    const vf share = score / softcap;
    return scale * (1.0f - share * share);
  }

  ALWAYS_INLINE vf logits(vf score, int64_t j) const {
    vi lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    const vi column = lane + static_cast<int32_t>(first_column + j);
    vf x = score;
    if (slope != 0.0f) x -= slope * __builtin_convertvector(position - column, vf);
    const vf hidden = splat(-__builtin_inff());
    if (ragged) x = column > last ? hidden : column < first ? hidden : x;
    if (key_documents) x = load(key_documents + first_column + j) != document ? hidden : x;
    return x;
  }
};

// Range [begin, end) of the keys to which some row of a block of queries attends. begin is a multiple of kBlock.
struct KeySpan {
  int64_t begin, end;
};

template <class T>
KeySpan keys_seen(const AttentionArgs<T>& args, int64_t i0) {
  const int64_t past_last = args.offset + i0 + kBlock, first = args.window ? args.offset + i0 - args.window + 1 : 0;
  return {first > 0 ? first / kBlock * kBlock : 0, past_last < args.keys ? past_last : args.keys};
}

template <class T>
class AttentionBuffers {  // slices of one thread's memory
 public:
  explicit AttentionBuffers(Scratch& memory, int64_t floats)
      : next_(static_cast<float*>(memory.bytes(floats * 4 + 64 * 64))) {}
  float* floats(int64_t count) {
    float* slice = next_;
    next_ += round_up(count, 16);
    return slice;
  }
  typename Unit<T>::Element* elements(int64_t count) {
    return reinterpret_cast<typename Unit<T>::Element*>(floats(count));
  }

 private:
  float* next_;
};

template <class T>
const int32_t* padded_documents(const AttentionArgs<T>& args, const AttentionShape<T>& shape,
                                AttentionBuffers<T>& buffers) {
  int32_t* copy = reinterpret_cast<int32_t*>(buffers.floats(shape.rows));
  if (!args.documents) return nullptr;
  memcpy(copy, args.key_documents, args.keys * sizeof *copy);
  for (int64_t s = args.keys; s < shape.rows; ++s) copy[s] = args.key_documents[args.keys - 1];
  return copy;
}

template <class T>
void attention(const AttentionArgs<T>& args) {
  using Element = typename Unit<T>::Element;
  static thread_local Scratch memory;
  const AttentionShape<T> shape{args.queries, args.head_dim}, key_shape{args.keys, args.head_dim};
  AttentionBuffers<T> buffers(memory, key_shape.transposed_size + key_shape.panels_size + key_shape.rows +
                                          shape.rows * shape.row_elements + kBlock * (2 * kBlock + shape.columns + 2));
  float* const keys = buffers.floats(key_shape.transposed_size);
  float* const values = buffers.floats(key_shape.panels_size);
  Element* const queries = buffers.elements(shape.rows * shape.row_elements);
  float* const scores = buffers.floats(kBlock * kBlock);
  Element* const probabilities = buffers.elements(kBlock * kBlock);
  float* const sums = buffers.floats(kBlock * shape.columns);
  float* const tops = buffers.floats(kBlock);
  float* const totals = buffers.floats(kBlock);
  const int32_t* documents = padded_documents(args, key_shape, buffers);
  pack_positions_as_columns(args.k, args.k_row, key_shape, keys);
  pack_positions_as_depth(args.v, args.v_row, key_shape, values);
  for (int64_t head = 0; head < args.group; ++head) {
    copy_rows(args.q + head * args.q_head, args.q_row, shape, queries);
    for (int64_t i0 = 0; i0 < args.queries; i0 += kBlock) {
      const KeySpan seen = keys_seen(args, i0);
      memset(sums, 0, kBlock * shape.columns * 4);
      for (int64_t i = 0; i < kBlock; ++i) tops[i] = -__builtin_inff(), totals[i] = 0;
      for (int64_t j0 = seen.begin; j0 < seen.end; j0 += kBlock) {
        product<T>(kBlock, kBlock, shape.depth, queries + i0 * shape.row_elements, shape.row_elements * sizeof(Element),
                   4, keys + j0 * shape.depth, scores, kBlock, false);
        for (int64_t i = 0; i < kBlock; ++i) {
          const RowMask mask(args, documents, head, i0, i, j0);
          float* row = scores + i * kBlock;
          vf best = splat(-__builtin_inff());
          for (int64_t j = 0; j < kBlock; j += kLanes) {
            const vf x = mask.logits(mask.score(row, j), j);
            store(row + j, x);
            best = max(best, x);
          }
          const float block_top = max_lane(best), top = tops[i] < block_top ? block_top : tops[i];
          const float shift =
              top == -__builtin_inff() ? 0.0f : top;  // no key of the block is in the row's document: e^(-inf) is 0
          vf total{};
          for (int64_t j = 0; j < kBlock; j += kLanes) {
            const vf p = exp(load(row + j) - shift);
            total += p;
            store(probabilities + i * kBlock + j, p);
          }
          const float shrink = exp(splat(tops[i] - shift))[0];
          totals[i] = totals[i] * shrink + sum(total);
          tops[i] = top;
          if (shrink != 1.0f)
            for (int64_t d = 0; d < shape.columns; d += kLanes)
              store(sums + i * shape.columns + d, load(sums + i * shape.columns + d) * shrink);
        }
        product<T>(kBlock, shape.columns, shape.block_depth, probabilities, kBlock * sizeof(Element), 4,
                   values + j0 / kBlock * shape.panel_block, sums, shape.columns, true);
      }
      for (int64_t i = 0; i < kBlock && i0 + i < args.queries; ++i) {
        T* o = args.o + (i0 + i) * args.o_row + head * args.o_head;
        const float inverse =
            totals[i] > 0.0f ? 1.0f / totals[i] : 0.0f;  // this part of the keys has no key to which the row attends
        const float* row = sums + i * shape.columns;
        for_vectors(args.head_dim, [&](int64_t, auto load, auto store) { store(o, load(row) * inverse); });
        args.logsumexp[head * args.queries + i0 + i] = tops[i] + __builtin_logf(totals[i]);
      }
    }
  }
}

template <class T>
void write_rows(const float* sums, const AttentionShape<T>& shape, T* out, int64_t row) {
  for (int64_t s = 0; s < shape.sequence; ++s, sums += shape.columns, out += row)
    for_vectors(shape.head_dim, [&](int64_t, auto load, auto store) { store(out, load(sums)); });
}

// With P = e^(logits - logsumexp), dP = dO V^T and delta = rowsum(dO O): dS = scale P (dP - delta), times the slope of
// tanh if scores are soft-capped. dV = P^T dO, dQ = dS K, dK = dS^T Q.
template <class T>
void attention_backward(const AttentionArgs<T>& args, const AttentionGradArgs<T>& grads) {
  using Element = typename Unit<T>::Element;
  static thread_local Scratch memory;
  const AttentionShape<T> shape{args.queries, args.head_dim}, key_shape{args.keys, args.head_dim};
  const int64_t row_bytes = shape.row_elements * sizeof(Element), acc_size = shape.rows * shape.columns,
                key_acc_size = key_shape.rows * key_shape.columns;
  AttentionBuffers<T> buffers(memory, 2 * key_shape.transposed_size + key_shape.panels_size + key_shape.rows +
                                          2 * shape.panels_size + shape.rows * (2 * shape.row_elements + 1) + acc_size +
                                          2 * key_acc_size + 6 * kBlock * kBlock);
  float* const keys_t = buffers.floats(key_shape.transposed_size);
  float* const values_t = buffers.floats(key_shape.transposed_size);
  float* const keys = buffers.floats(key_shape.panels_size);
  float* const query_panels = buffers.floats(shape.panels_size);
  float* const grad_panels = buffers.floats(shape.panels_size);
  Element* const queries = buffers.elements(shape.rows * shape.row_elements);
  Element* const grad_o = buffers.elements(shape.rows * shape.row_elements);
  float* const delta = buffers.floats(shape.rows);
  float* const grad_q = buffers.floats(acc_size);
  float* const grad_k = buffers.floats(key_acc_size);
  float* const grad_v = buffers.floats(key_acc_size);
  float* const scores = buffers.floats(kBlock * kBlock);
  float* const grad_p = buffers.floats(kBlock * kBlock);
  Element* const p = buffers.elements(kBlock * kBlock);
  Element* const ds = buffers.elements(kBlock * kBlock);
  float* const p_units = buffers.floats(kBlock * kBlock);
  float* const ds_units = buffers.floats(kBlock * kBlock);
  const int32_t* documents = padded_documents(args, key_shape, buffers);
  pack_positions_as_columns(args.k, args.k_row, key_shape, keys_t);
  pack_positions_as_columns(args.v, args.v_row, key_shape, values_t);
  pack_positions_as_depth(args.k, args.k_row, key_shape, keys);
  memset(grad_k, 0, key_acc_size * 4);
  memset(grad_v, 0, key_acc_size * 4);
  for (int64_t head = 0; head < args.group; ++head) {
    const T *q = args.q + head * args.q_head, *go = grads.grad_o + head * grads.grad_o_head,
            *o = args.o + head * args.o_head;
    copy_rows(q, args.q_row, shape, queries);
    copy_rows(go, grads.grad_o_row, shape, grad_o);
    pack_positions_as_depth(q, args.q_row, shape, query_panels);
    pack_positions_as_depth(go, grads.grad_o_row, shape, grad_panels);
    memset(grad_q, 0, acc_size * 4);
    for (int64_t s = 0; s < args.queries; ++s) {
      vf dots{};
      for_vectors(args.head_dim, [&](int64_t, auto load, auto) {
        dots += load(go + s * grads.grad_o_row) * load(o + s * args.o_row);
      });
      delta[s] = sum(dots);
    }
    for (int64_t i0 = 0; i0 < args.queries; i0 += kBlock) {
      const KeySpan seen = keys_seen(args, i0);
      for (int64_t j0 = seen.begin; j0 < seen.end; j0 += kBlock) {
        product<T>(kBlock, kBlock, shape.depth, queries + i0 * shape.row_elements, row_bytes, 4,
                   keys_t + j0 * shape.depth, scores, kBlock, false);
        product<T>(kBlock, kBlock, shape.depth, grad_o + i0 * shape.row_elements, row_bytes, 4,
                   values_t + j0 * shape.depth, grad_p, kBlock, false);
        for (int64_t i = 0; i < kBlock; ++i) {
          const bool padding = i0 + i >= args.queries;
          const RowMask mask(args, documents, head, i0, i, j0);
          const float row_sum = padding ? -__builtin_inff() : args.logsumexp[head * args.queries + i0 + i];
          const float logsumexp = row_sum == -__builtin_inff()
                                      ? __builtin_inff()
                                      : row_sum;  // the row attends to no key: every e^(x - inf) is 0
          const float row_delta = padding ? 0.0f : delta[i0 + i];
          for (int64_t j = 0; j < kBlock; j += kLanes) {
            const vf score = mask.score(scores + i * kBlock, j), probability = exp(mask.logits(score, j) - logsumexp);
            store(p + i * kBlock + j, probability);
            store(ds + i * kBlock + j,
                  probability * (load(grad_p + i * kBlock + j) - row_delta) * mask.slope_of(score));
          }
        }
        const float *p_columns = reinterpret_cast<const float*>(p), *ds_columns = reinterpret_cast<const float*>(ds);
        if constexpr (Unit<T>::kDepth == 2) {  // pairs along i
          pack(p, kBlock, 1, kBlock, kBlock, p_units, kBlock);
          pack(ds, kBlock, 1, kBlock, kBlock, ds_units, kBlock);
          p_columns = p_units, ds_columns = ds_units;
        }
        const int64_t i_panels = i0 / kBlock * shape.panel_block, j_panels = j0 / kBlock * shape.panel_block;
        product<T>(kBlock, shape.columns, shape.block_depth, p_columns, 4, kBlock * 4, grad_panels + i_panels,
                   grad_v + j0 * shape.columns, shape.columns, true);
        product<T>(kBlock, shape.columns, shape.block_depth, ds_columns, 4, kBlock * 4, query_panels + i_panels,
                   grad_k + j0 * shape.columns, shape.columns, true);
        product<T>(kBlock, shape.columns, shape.block_depth, ds, kBlock * sizeof(Element), 4, keys + j_panels,
                   grad_q + i0 * shape.columns, shape.columns, true);
      }
    }
    write_rows(grad_q, shape, grads.grad_q + head * grads.grad_q_head, grads.grad_q_row);
  }
  write_rows(grad_k, key_shape, grads.grad_k, grads.grad_k_row);
  write_rows(grad_v, key_shape, grads.grad_v, grads.grad_v_row);
}

}  // namespace frontier::FRONTIER_ISA

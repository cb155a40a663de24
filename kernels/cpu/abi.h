// What Python hands to the native step (ctypes mirrors of these structs are in library.py).
// Integers are int64_t unless said otherwise; pointers stay valid for as long as their owner is
// used.
#pragma once
#include <cstdint>

namespace loraplex {

// How a matrix [n, k] (n outputs, k inputs) is stored once packed; see panels.h.
enum Kind : int64_t {
  kBf16 = 0,     // from bf16
  kFp32 = 1,     // from fp32
  kInt8 = 2,     // from int8 values, as they are: an int8 image, whose scales its `scale` row holds
  kQuant8 = 3,   // from bf16: int8 with one scale per output
  kFixed16 = 4,  // from bf16: int16 with one power of two per output, nearly all of them exact
  kOffset8 = 5   // as kQuant8, but 128 more and so unsigned, as bytes are multiplied by int8
};

struct Matrix {
  const void* panels;  // written by lpx_pack, all matrices of a model of one kind
  const float* bias;   // [n], or null
};

struct Layer {
  Matrix q, k, v, o, gate, up, down;
  const float *attention_norm, *mlp_norm;  // [hidden]
  const float *q_norm, *k_norm;            // [head_dim], or null
  int64_t window;                          // keys that a row sees, itself among them; 0 for all
};

struct Model {
  int64_t layers, hidden, heads, kv_heads, head_dim, inner, vocab;
  int64_t rotary_dim;                       // leading columns of a head that rotate, even
  int64_t kind;                             // of all base matrices
  int64_t activations;                      // see Activations
  int64_t kv_kind;                          // of the KV cache: kBf16, kFp32 or kInt8
  int64_t block_size, blocks;               // of the KV cache; 16, 32 … 512
  double norm_eps, attention_scale;         // scale of q . k, such as head_dim ** -0.5
  double attention_softcap, logit_softcap;  // cap * tanh(x / cap); 0 for none
  const Layer* layer;
  Matrix head;
  const float* norm;       // [hidden]
  const void* embedding;   // [vocab, hidden] row by row
  int64_t embedding_fp32;  // fp32 instead of bf16
  const float* rotary;     // [positions, rotary_dim]: cosines, then sines
  void* kv;                // lpx_kv_block_bytes * blocks, zeroed
};

// What the rows that enter a base matrix are rounded to.
enum Activations : int64_t {
  kActFp32 = 0,   // kBf16, kFp32
  kActBf16 = 1,   // kBf16, for machines that multiply bf16
  kActInt16 = 2,  // kQuant8: W8A16; kFixed16
  kActInt8 = 3    // W8A8: int8 for kOffset8, as many steps of int16 for kQuant8
};

// An adapter's part in one linear of a fused projection.
struct LoraSlice {
  const void* b;             // packed [out, rank], or null when rank is 0
  const float *gain, *bias;  // [out], or null
  int64_t rank, first_rank;  // its columns of A's product
};

struct LoraProjection {
  const void* a;       // packed [ranks, in], or null when ranks is 0
  const float* scale;  // [ranks]
  int64_t ranks;
  LoraSlice slice[3];  // q k v | o | gate up | down; those that are not there are zeroes
};

struct Adapter {
  int64_t kind;                      // kBf16, kFp32 or kInt8, for A and B alike
  const LoraProjection* projection;  // [layers][4]: qkv, o, gate_up, down
};

struct Segment {  // rows [start, end) run under an adapter
  int64_t start, end;
  const Adapter* adapter;
};

struct Sequence {  // rows [start, end) are the last of `context` tokens
  int64_t start, end, context;
  const int32_t* block_table;  // [ceil(context / block_size)]

  int64_t position(int64_t row) const { return context - (end - row); }
};

struct Batch {
  int64_t rows, sequences, segments, wanted;
  const int32_t *tokens, *positions;  // [rows]
  const Sequence* sequence;           // in row order, all rows covered
  const Segment* segment;             // in row order
  const int32_t* want;                // [wanted] rows whose logits are wanted, rising
  float* logits;                      // [wanted, vocab], or null
  int32_t* likeliest;                 // [wanted] the first token with the highest logit
  float* peak;                        // [wanted] that logit; NaN when a logit is not finite
  double* seconds;                    // [kPhases] added to, or null
};

// How a row draws its token (draw.h).
struct Draw {
  const float* logits;  // [vocab], -inf for a token that may not come
  int64_t top_k;        // 0 for no limit
  double peak;          // the highest logit, finite
  double factor;        // 1 / temperature
  double top_p, min_p;  // 1 and 0 for no limit
  double share;         // in [0, 1)
  int64_t token;        // the token drawn
};

// norm, shrink, qkv, attention, o, gate/up, down, head
constexpr int kPhases = 8;

}  // namespace loraplex

#pragma GCC visibility push(default)
extern "C" {
const char* lpx_isa();      // "avx512", "avx2" or "scalar"
int64_t lpx_activations();  // what rows are best rounded to here for products with bf16 weights
int64_t lpx_w8a8_kind();    // of the weights that rows of int8 are best multiplied with here
int64_t lpx_packed_bytes(int64_t kind, int64_t n, int64_t k);
// Pack element (i, j) at source[i * stride_n + j * stride_k]; source is bf16, fp32 or int8 by kind,
// `to` 64-byte aligned.
void lpx_pack(int64_t kind, const void* source, int64_t n, int64_t k, int64_t stride_n,
              int64_t stride_k, void* to);
// Pack matrices of one kind: jobs[count][6] are source, n, k, stride_n, stride_k and target of
// each, as for lpx_pack, but source and target in bytes from `source` and `to`.
void lpx_pack_all(int64_t kind, int64_t count, const int64_t* jobs, const void* source, void* to);
// Copy jobs[count][3]: source and target, in bytes from `source` and `to`, and how many bytes.
void lpx_copy_all(int64_t count, const int64_t* jobs, const void* source, void* to);
int64_t lpx_kv_block_bytes(const loraplex::Model*);
// A step's threads and scratch memory. cores[threads] to pin to, or null; the caller's thread is
// the first.
void* lpx_start(const loraplex::Model*, int64_t max_rows, int64_t max_wanted, int64_t threads,
                const int32_t* cores);
void lpx_step(void*, const loraplex::Batch*);  // at most max_rows rows
// Sets the token of each row, between steps.
void lpx_draw(void*, int64_t count, loraplex::Draw* rows);
void lpx_stop(void*);
}
#pragma GCC visibility pop

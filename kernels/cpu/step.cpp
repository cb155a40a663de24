// A whole step of a decoder of the Llama family in one call: embedding, every layer with the rows'
// adapters, norm, head.
//
// Decode rows, prefill rows and any mix of adapters go through the same code. Threads share the
// panels of a product, the rows of a norm and the tiles of attention, and meet at barriers. It
// knows packed weights, block tables and segments; it refuses to know requests, files and Python.
// One step at a time for each lpx_start.
#include <atomic>
#include <cstring>

#include "attend.h"
#include "head.h"
#include "pack.h"

namespace loraplex {
namespace {

class Step {
 public:
  Step(Engine& engine, const Batch& batch, int t, int threads)
      : f{engine, engine.m, batch, t, threads},
        e(engine),
        m(engine.m),
        b(batch),
        products(f),
        attention(f),
        head(f, products) {}

  void run() {
    embed();
    attention.begin_blocks();
    for (int64_t l = 0; l < m.layers; l++) {
      products.enter_layer(l);
      keep_keys(l);
      if (l + 1 == m.layers && b.wanted < b.rows) go_on_with_wanted();
      if (!f.going->rows) return;
      attend(l);
      mlp_block(l);
    }
    head.run();
  }

 private:
  void embed() {
    for (int64_t r = f.begin(b.rows); r < f.end(b.rows); r++) {
      float* to = e.x.row(r);
      const int64_t at = (int64_t)b.tokens[r] * m.hidden;
      for (int64_t i = 0; i < m.hidden; i++)
        to[i] = m.embedding_fp32 ? ((const float*)m.embedding)[at + i]
                                 : widen(((const bf16*)m.embedding)[at + i]);
    }
  }

  void norm(const float* weight) {
    for (int64_t r = f.begin(f.going->rows); r < f.end(f.going->rows); r++) {
      rms_norm(e.x.row(r), weight, m.hidden, m.norm_eps, e.xn.at(r));
      products.round_row(e.xn, m.hidden, r);
    }
    f.meet();
    f.lap(kNorm);
  }

  void keep_keys(int64_t l) {
    const Layer& layer = m.layer[l];
    norm(layer.attention_norm);
    products.qkv(layer);
    f.lap(kQkv);
    attention.place_keys(l);
    f.lap(kAttention);
  }

  // Has the wanted rows of x at its front. Each thread moves some columns.
  void go_on_with_wanted() {
    f.going = &e.last;
    const int64_t from = f.begin(m.hidden), size = f.end(m.hidden) - from;
    for (int64_t i = 0; i < b.wanted; i++)
      memmove(e.x.row(i) + from, e.x.row(b.want[i]) + from, size * sizeof(float));
  }

  void attend(int64_t l) {
    const Layer& layer = m.layer[l];
    attention.attend(l);
    f.lap(kAttention);
    products.residual(layer.o, kLoraO, e.attended,
                      products.first_of(layer.gate, m.inner, m.hidden));
    f.lap(kO);
  }

  void mlp_block(int64_t l) {
    const Layer& layer = m.layer[l];
    norm(layer.mlp_norm);
    products.gate_up(layer);
    f.lap(kGateUp);
    const Range then = l + 1 < m.layers
                           ? products.first_of(m.layer[l + 1].q, m.heads * m.head_dim, m.hidden)
                           : products.first_of(m.head, m.vocab, m.hidden);
    products.residual(layer.down, kLoraDown, e.active, then);
    f.lap(kDown);
  }

  Frame f;
  Engine& e;
  const Model& m;
  const Batch& b;
  Products products;
  Attention attention;
  Head head;
};

struct Job {
  Engine* engine;
  const Batch* batch;
};

constexpr int64_t kDrawnAlone = 8;  // rows not worth the waking of other threads

struct DrawJob {
  Engine* engine;
  int64_t count;
  Draw* rows;
  std::atomic<int64_t> next{0};
};

void draw_some(void* argument, int t, int) {
  DrawJob& job = *(DrawJob*)argument;
  for (int64_t i; (i = job.next++) < job.count;)
    job.rows[i].token = job.engine->drawers[t].draw(job.rows[i]);
}

}  // namespace
}  // namespace loraplex

using namespace loraplex;

extern "C" {

const char* lpx_isa() { return kIsa; }

int64_t lpx_activations() { return kBestActivations; }

int64_t lpx_w8a8_kind() { return kW8A8Kind; }

int64_t lpx_packed_bytes(int64_t kind, int64_t n, int64_t k) {
  return Cut(n).vectors * vector_bytes(kind, k);
}

void lpx_pack(int64_t kind, const void* source, int64_t n, int64_t k, int64_t stride_n,
              int64_t stride_k, void* to) {
  if (kind == kFp32)
    pack_matrix<float>({(const float*)source, n, k, stride_n, stride_k}, kind, (char*)to);
  else if (kind == kInt8)
    pack_matrix<int8_t>({(const int8_t*)source, n, k, stride_n, stride_k}, kind, (char*)to);
  else
    pack_matrix<bf16>({(const bf16*)source, n, k, stride_n, stride_k}, kind, (char*)to);
}

void lpx_pack_all(int64_t kind, int64_t count, const int64_t* jobs, const void* source, void* to) {
  for (const int64_t* job = jobs; job < jobs + 6 * count; job += 6)
    lpx_pack(kind, (const char*)source + job[0], job[1], job[2], job[3], job[4],
             (char*)to + job[5]);
}

void lpx_copy_all(int64_t count, const int64_t* jobs, const void* source, void* to) {
  for (const int64_t* job = jobs; job < jobs + 3 * count; job += 3)
    std::memcpy((char*)to + job[1], (const char*)source + job[0], (size_t)job[2]);
}

int64_t lpx_kv_block_bytes(const Model* m) { return Cache(*m).block_bytes; }

void* lpx_start(const Model* m, int64_t max_rows, int64_t max_wanted, int64_t threads,
                const int32_t* cores) {
  return new Engine(*m, max_rows, max_wanted, (int)threads, cores);
}

void lpx_step(void* engine, const Batch* batch) {
  Job job{(Engine*)engine, batch};
  plan(*job.engine, *batch);
  for (int t = 0; t < job.engine->team.size(); t++)
    job.engine->shares[0].renew(t);
  job.engine->team.run(
      [](void* argument, int t, int threads) {
        const Job& job = *(const Job*)argument;
        Step(*job.engine, *job.batch, t, threads).run();
      },
      &job);
}

void lpx_draw(void* engine, int64_t count, Draw* rows) {
  DrawJob job{(Engine*)engine, count, rows};
  if (count > kDrawnAlone)
    job.engine->team.run(draw_some, &job);
  else
    draw_some(&job, 0, 1);
}

void lpx_stop(void* engine) { delete (Engine*)engine; }
}

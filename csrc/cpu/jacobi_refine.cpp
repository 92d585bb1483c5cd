// jacobi_refine: the whole walk of a greedy draft, for N blocks at once.
//
// hidden -> context (once) -> candidates or seeds -> per pass, for the unsettled slots of the
// blocks that are not done: fuse_mix -> refiner_mlp -> readout -> tokens. Blocks share each sweep
// over the weights and differ in what is settled; a settled slot is never computed again.
#include "operators.h"
#include "parallel.h"
#include "workspace.h"

namespace xpress::cpu::XPRESS_CPU_NAMESPACE {

namespace {

template <class T>
class Refiner {
 public:
  explicit Refiner(const JacobiRefineParams& p)
      : p_(p), D_(p.B - 1), w_(p.workspace, jacobi_shape(p)) {}

  void run() {
    project();
    seed();
    if (p_.exact) {
      run_exact();
    } else {
      const int64_t cap = min64(p_.num_passes, D_);
      for (int64_t pass = 0; pass < cap && collect_rows() > 0; ++pass) run_pass();
    }
    write_tokens();
  }

 private:
  int64_t* ids(int64_t n) { return w_.ids + n * (p_.B + 1); }  // predecessor, anchor, tokens
  float* latent_row(float* base, int64_t row) const {
    return base + ((row / D_) * p_.B + row % D_ + 1) * p_.r;
  }

  // context = causal_mix(project_hidden(hidden)); the projection lives in c until a pass needs it.
  void project() {
    project_hidden({p_.N, p_.B, p_.H, p_.r, p_.hidden, p_.hidden_proj, p_.weight_dtype, w_.c},
                   w_.scratch);
    causal_mix({p_.N, p_.B, p_.r, false, w_.c, p_.mixer, w_.context});
  }

  void seed() {
    if (p_.top_c > 0) gather_candidates();
    const bool given = p_.seed_tokens.data != nullptr;
    if (!given && p_.top_c == 0) {
      parallel_items(p_.N * D_, [&](int64_t row) {
        w_.keys[row] = argmax_row(p_.base_logits, row / D_, row % D_, p_.V);
      });
    }
    for (int64_t n = 0; n < p_.N; ++n) {
      p_.passes[n] = 0;
      p_.full_readouts[n] = 0;
      w_.settled[n] = 0;
      w_.done[n] = 0;
      ids(n)[0] = p_.predecessor.at(n);
      ids(n)[1] = p_.anchor.at(n);
      for (int64_t d = 0; d < D_; ++d) {
        const int64_t row = n * D_ + d;
        if (given) {
          const int64_t token = p_.seed_tokens.at(n, d);
          ids(n)[2 + d] = token;
          w_.best_ids[row] = p_.d2t == nullptr && token < p_.V ? static_cast<int32_t>(token) : -1;
        } else {
          w_.best_ids[row] = p_.top_c > 0 ? w_.candidate_ids[row * w_.capacity]
                                          : static_cast<int32_t>(key_id(w_.keys[row]));
          ids(n)[2 + d] = target_id(w_.best_ids[row]);
        }
      }
    }
  }

  void gather_candidates() {
    parallel_items(p_.N * D_, [&](int64_t row) {
      uint64_t best[kMaxCandidates];
      top_keys(p_.base_logits, row / D_, row % D_, p_.V, p_.top_c, best);
      for (int64_t i = 0; i < p_.top_c; ++i) {
        w_.candidate_ids[row * w_.capacity + i] = static_cast<int32_t>(key_id(best[i]));
        w_.candidate_logits[row * w_.capacity + i] = key_logit(best[i]);
      }
      w_.candidate_count[row] = static_cast<int32_t>(p_.top_c);
    });
  }

  int64_t target_id(int64_t draft_id) const {
    return p_.d2t == nullptr ? draft_id : draft_id + p_.d2t[draft_id];
  }

  // Unsettled slots of the blocks that are not done, as rows n * D + (slot - 1).
  int64_t collect_rows() {
    rows_ = 0;
    for (int64_t n = 0; n < p_.N; ++n) {
      if (w_.done[n]) continue;
      for (int64_t d = w_.settled[n]; d < D_; ++d)
        w_.rows[rows_++] = static_cast<int32_t>(n * D_ + d);
    }
    return rows_;
  }

  // One pass over rows_ rows; settles what it may and marks blocks at their fixed point.
  void run_pass() {
    compute_latents();
    if (p_.top_c > 0) {
      parallel_items(rows_, [&](int64_t i) {
        const int64_t row = w_.rows[i];
        w_.keys[i] =
            best_candidate(latent_row(w_.z, row), p_.r, static_cast<const T*>(p_.readout),
                           w_.candidate_ids + row * w_.capacity,
                           w_.candidate_logits + row * w_.capacity, w_.candidate_count[row]);
      });
    } else {
      read_full();
    }
    commit_pass();
  }

  void compute_latents() {
    parallel_items(p_.N, [&](int64_t n) {
      if (w_.done[n]) return;
      const int64_t block = n * p_.B * p_.r, first = w_.settled[n] + 1;
      fuse_mix_block(w_.context + block, ids(n), static_cast<const T*>(p_.token_table), p_.mixer,
                     p_.B, p_.r, first, w_.c + block);
      for (int64_t k = first; k < p_.B; ++k) {
        round_row<T>(w_.c + block + k * p_.r, p_.r, w_.rounded_c + block + k * p_.r);
      }
    });
    for (int64_t row0 = 0; row0 < rows_; row0 += kMlpRows) {
      const int64_t count = min64(kMlpRows, rows_ - row0);
      const float* c[kMlpRows];
      const float* rounded_c[kMlpRows];
      float* z[kMlpRows];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = w_.rows[row0 + i];
        c[i] = latent_row(w_.c, row);
        rounded_c[i] = latent_row(w_.rounded_c, row);
        z[i] = latent_row(w_.z, row);
      }
      refiner_mlp_rows(RefinerMlpRows<T>{
          count, p_.r, p_.m, c, rounded_c, static_cast<const T*>(p_.mlp_gate_up),
          static_cast<const T*>(p_.mlp_down), static_cast<float*>(w_.scratch), z});
    }
  }

  // keys[i] = argmax over the vocabulary of rows[i], from the latents as they stand. The token that
  // a slot holds is a good first guess of the one that it will get.
  void read_full() {
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t row = w_.rows[i];
      w_.z_rows[i] = latent_row(w_.z, row);
      w_.base_rows[i] = p_.base_logits.row(row / D_, row % D_);
      w_.hints[i] = w_.best_ids[row];
    }
    readout_full({rows_, p_.V, p_.r, w_.z_rows, w_.base_rows, p_.base_logits.dtype, p_.readout,
                  p_.weight_dtype, w_.z_norms},
                 w_.hints, w_.keys);
  }

  // Writes the argmax of the rows of one block, from rows_[*i] on, and moves *i past them. Returns
  // the lowest slot whose token changed, or 0. `grow` adds a changed token to its slot's
  // candidates.
  int64_t commit_block(int64_t* i, bool grow) {
    const int64_t n = w_.rows[*i] / D_;
    int64_t lowest_changed = 0;
    for (; *i < rows_ && w_.rows[*i] / D_ == n; ++*i) {
      const int64_t row = w_.rows[*i], slot = row % D_ + 1, id = key_id(w_.keys[*i]);
      const int64_t token = target_id(id);
      w_.best_ids[row] = static_cast<int32_t>(id);
      if (token == ids(n)[1 + slot]) continue;
      ids(n)[1 + slot] = token;
      if (grow) add_candidate(row, id);
      if (lowest_changed == 0) lowest_changed = slot;
    }
    return lowest_changed;
  }

  // f, the lowest slot that the pass changed, and all below it are settled; a pass that changed
  // nothing, or settled the last slot, ends the block.
  void commit_pass() {
    for (int64_t i = 0; i < rows_;) {
      const int64_t n = w_.rows[i] / D_, lowest_changed = commit_block(&i, false);
      ++p_.passes[n];
      if (lowest_changed != 0) w_.settled[n] = static_cast<int32_t>(lowest_changed);
      w_.done[n] = lowest_changed == 0 || lowest_changed == D_;
    }
  }

  // Exact top-C (docs/method.md): the fixed point on the candidates, one full readout of the slots
  // that are not yet proven, and again from the lowest mismatch. A fixed point leaves every
  // latent consistent with the tokens, so the full readout computes none of them again.
  void run_exact() {
    for (int64_t n = 0; n < p_.N; ++n) w_.proven[n] = 0;
    for (;;) {
      while (collect_rows() > 0) run_pass();
      for (int64_t n = 0; n < p_.N; ++n) {
        w_.settled[n] = w_.proven[n];
        w_.done[n] = w_.proven[n] == D_;
      }
      if (collect_rows() == 0) return;
      read_full();
      commit_full_readout();
    }
  }

  void commit_full_readout() {
    for (int64_t i = 0; i < rows_;) {
      const int64_t n = w_.rows[i] / D_, lowest_changed = commit_block(&i, true);
      ++p_.full_readouts[n];
      w_.proven[n] = static_cast<int32_t>(lowest_changed == 0 ? D_ : lowest_changed);
      w_.settled[n] = w_.proven[n];
      w_.done[n] = w_.proven[n] == D_;
    }
  }

  void add_candidate(int64_t row, int64_t id) {
    const int64_t at = row * w_.capacity + w_.candidate_count[row]++;
    w_.candidate_ids[at] = static_cast<int32_t>(id);
    with_type(p_.base_logits.dtype, p_.base_logits.row(row / D_, row % D_),
              [&](auto* base) { w_.candidate_logits[at] = to_float(base[id]); });
  }

  void write_tokens() {
    for (int64_t n = 0; n < p_.N; ++n) {
      for (int64_t d = 0; d < D_; ++d) p_.tokens[n * D_ + d] = ids(n)[2 + d];
    }
  }

  const JacobiRefineParams& p_;
  const int64_t D_;
  JacobiWorkspace w_;
  int64_t rows_ = 0;
};

}  // namespace

void jacobi_refine(const JacobiRefineParams& p) {
  with_type(p.weight_dtype, nullptr, [&](auto* type) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
    Refiner<T>(p).run();
  });
}

}  // namespace xpress::cpu::XPRESS_CPU_NAMESPACE

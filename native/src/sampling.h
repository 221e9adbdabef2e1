/* Sampling: from one row of raw logits to one token id, the same id on every engine and device.
 *
 * The definition (rule 9). "float" and "double" say in which type each operation is done; sums in "rule 5 order" are
 * st_sum of arith.h over ids 0 .. n_vocab - 1 (chunks of 4,096 values, 32 strided partial sums, halving tree); p and q
 * of excluded tokens are 0 there. Everything before the draw depends on (logits, ids, parameters) alone.
 *
 *  0. A raw logit that is NaN or infinite: error non_finite, whatever else is asked.
 *  1. Penalties, float, once for every distinct id that has a count:
 *       repeat:  id among the last penalty_last_n of ALL ids (prompt and output; -1 all, 0 none):
 *                l = l > 0 ? l / penalty_repeat : l * penalty_repeat
 *       output:  count = how often the OUTPUT holds the id, the whole output whatever penalty_last_n says, as the
 *                OpenAI API has it; l = l - ((float)count * penalty_freq + penalty_present) when count > 0
 *  2. Bias, float, in the order of the list: l = l + bias; a bias of -infinity excludes the token.
 *     A value that left the finite floats in 1 or 2: error non_finite.
 *  3. Mask: bit id % 32 of word id / 32; a clear bit excludes the token. Nothing left: error no_candidates.
 *  4. Candidates are ordered by l descending, then id ascending (-0 equals +0).
 *     temperature <= 0 (greedy) or top_k == 1: the first candidate; done.
 *  5. m = the first candidate's l; p_i = st_exp((l_i - m) * 1), float.
 *     top_k (active when 0 < top_k < n_vocab) keeps the first top_k candidates.
 *     top_p (active when < 1) ends the kept prefix at the first i where p_0 + ... + p_i (double, in order) reaches
 *       (double)top_p * Z1. Z1 = (double) of the float sum of all p in rule 5 order, or, when top_k is active, the
 *       double sum of the top_k survivors in order.
 *     min_p (active when > 0) ends the kept prefix before the first i with p_i < min_p (the largest p is 1).
 *     At least the first candidate is kept.
 *  6. Temperature: q_i = st_exp((l_i - m) * t), float, t = 1 / temperature, at most the largest finite float.
 *     Z2 = the double sum of the kept q in order, or, when none of top_k, top_p, min_p is active, (double) of the
 *     float sum of all q in rule 5 order.
 *  7. Draw: u = x0 * 2^-32, x0 word 0 of Philox4x32-10 with key (seed low, seed high) and counter
 *     (position, draw, choice, 0); position = index of the new token in prompt + output, draw 0 is the token's draw.
 *     The token is the first kept one where q_0 + ... + q_i (double, in order) exceeds u * Z2; when rounding leaves
 *     none, the last kept one with q > 0.
 *
 * Log-probabilities come from the RAW logits: ((double)l - (double)m) - st_log_d(Z), Z = (double) of the float sum of
 * st_exp((l_i - m) * 1) in rule 5 order.
 *
 * How it is fast: the vocabulary is never sorted. Maxima of blocks of 64 ids give thresholds; the sorted prefix grows
 * by threshold, only as far as the walk goes. */
#ifndef ST_SAMPLING_H
#define ST_SAMPLING_H

#include <stdint.h>

#include "strata.h"

enum { ST_DRAW_TOKEN = 0 };

#endif

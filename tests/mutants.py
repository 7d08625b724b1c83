"""Errors planted into the library, one at a time, that tests must find: ``make mutants``.

Each is a replacement of text in one file and a test that fails with it. Some are errors that all
tests have once passed; the others were chosen before the tests were read.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from pydtnn.utils.machine import cores_here

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300
"""Time after which the test of a mutant is one that hangs."""


class Mutant(NamedTuple):
    """Text of a file that occurs once, what replaces it, and the test that fails then."""

    file: str
    before: str
    after: str
    test: str


MUTANTS = {
    # ignored targets, metrics, callbacks, weighted samples
    "a mean that divides by the targets of each rank alone": Mutant(
        "pydtnn/training/setup.py",
        "                self.data.allreduce(counts)\n",
        "                pass\n",
        "tests/training/test_objective.py::"
        "test_the_mean_over_targets_that_are_not_ignored_is_that_of_the_whole_batch",
    ),
    "a confusion matrix whose rows are predictions": Mutant(
        "pydtnn/metrics.py",
        "truth * labels + predicted, count)",
        "predicted * labels + truth, count)",
        "tests/test_metrics.py::test_the_confusion_matrix_is_that_of_scikit_learn",
    ),
    "an average over classes that do not occur": Mutant(
        "pydtnn/metrics.py",
        "return float(values[present].mean())",
        "return float(values.mean())",
        "tests/test_metrics.py::test_quotients_of_classes_are_those_of_scikit_learn",
    ),
    "best weights that are views of those that change": Mutant(
        "pydtnn/callbacks/monitor.py",
        "{name: np.array(value) for name, value in own.items()}",
        "{**own}",
        "tests/callbacks/test_best.py::"
        "test_training_ends_with_the_weights_of_the_best_epoch_on_every_rank",
    ),
    "repetitions of a sample that have the same random numbers": Mutant(
        "pydtnn/data/order.py",
        "return chosen + len(weights) * repetition",
        "return chosen",
        "tests/data/test_weighted.py::test_each_repetition_of_a_sample_is_augmented_in_another_way",
    ),
    # layers
    "a bias whose gradient costs nothing": Mutant(
        "pydtnn/layers/linear.py",
        "flops * (dw + self.needs_dx) + outputs * db,",
        "flops * (dw + self.needs_dx),",
        "tests/layers/test_cost.py::"
        "test_the_operations_of_a_linear_layer_are_those_of_its_products",
    ),
    "a convolution layer whose groups do not divide its filters": Mutant(
        "pydtnn/layers/conv.py",
        "channels % self.groups or self.filters % self.groups",
        "channels % self.groups",
        "tests/layers/test_conv.py::test_options_that_do_not_fit_the_input_are_told",
    ),
    "initial weights that depend on the inputs of all groups": Mutant(
        "pydtnn/layers/conv.py",
        "fan_in=taps * channels // self.groups,",
        "fan_in=taps * channels,",
        "tests/layers/test_conv.py::test_weights_know_how_many_inputs_and_outputs_each_element_has",
    ),
    "initial weights of a transposed convolution that depend on the inputs of all groups": Mutant(
        "pydtnn/layers/conv_transpose.py",
        "fan_in=max(taps * channels // (self.groups * prod(self.stride)), 1),",
        "fan_in=max(taps * channels // prod(self.stride), 1),",
        "tests/layers/test_conv.py::test_weights_know_how_many_inputs_and_outputs_each_element_has",
    ),
    "a recurrent layer whose last step ignores the length of a sample": Mutant(
        "pydtnn/layers/recurrent.py",
        "        if lengths is None:\n            return slice(None), -1",
        "        if True:\n            return slice(None), -1",
        "tests/layers/test_recurrent.py::"
        "test_a_sample_with_a_length_has_the_outputs_and_gradients_of_its_part_alone",
    ),
    "a forecast that checks tokens, which have no values": Mutant(
        "pydtnn/layers/embedding.py",
        "if self.backend.has_values and wrong.any():",
        "if wrong.any():",
        "tests/kernels/test_dry.py::test_a_forecast_does_not_depend_on_what_memory_contains",
    ),
    "a forecast that checks lengths, which have no values": Mutant(
        "pydtnn/layers/sequence.py",
        "if self.backend.has_values and wrong.any():",
        "if wrong.any():",
        "tests/kernels/test_dry.py::test_a_forecast_does_not_depend_on_what_memory_contains",
    ),
    "a mean over a stripe whose gradient is not scaled by the stripe's share": Mutant(
        "pydtnn/layers/pool.py",
        "        if self.share != 1:\n            dy = dy * dy.dtype.type(self.share)\n",
        "",
        "tests/model/partition/test_layers.py::test_a_part_of_the_network_may_be_frozen",
    ),
    "a frozen batch norm that normalises with the statistics of the batch": Mutant(
        "pydtnn/layers/norm.py",
        "if self.running.frozen or not context.training:",
        "if not context.training:",
        "tests/model/test_freeze.py::test_frozen_values_and_statistics_do_not_change",
    ),
    "attention that drops the same weights in every epoch": Mutant(
        "pydtnn/layers/attention.py",
        "context.seed, self.stream, int(context.epoch), samples",
        "context.seed, self.stream, 0, samples",
        "tests/layers/test_attention.py::test_weights_are_dropped_in_training_only_and_by_sample",
    ),
    "an addition that leaves out its fourth input": Mutant(
        "pydtnn/layers/merge.py",
        "for x in rest:",
        "for x in rest[:1]:",
        "tests/layers/test_merge.py::test_add_keeps_the_contract",
    ),
    "an activation that overwrites the input that its backward reads": Mutant(
        "pydtnn/layers/activation.py",
        'cls.may_overwrite_input = reads == "output"',
        "cls.may_overwrite_input = True",
        "tests/layers/test_activation.py::test_activations_keep_the_contract",
    ),
    "dropout of rate 0 that returns dy itself as a new array": Mutant(
        "pydtnn/layers/dropout.py",
        "if self.overwrites_dy:",
        "if True:",
        "tests/layers/test_dropout.py::test_dropout_keeps_the_contract",
    ),
    "an embedding used twice that keeps the gradient of one use": Mutant(
        "pydtnn/layers/embedding.py",
        "linear.add_rows(dy, rows, out=w.grad, accumulate=w.accumulate)",
        "linear.add_rows(dy, rows, out=w.grad)",
        "tests/layers/test_embedding.py::test_a_tied_layer_adds_the_gradients_of_both_uses",
    ),
    "a convolution before a frozen batch norm whose bias has a gradient of 0": Mutant(
        "pydtnn/layers/fused_norm.py",
        "dx.sums = a * sums[:1] if norm.rows is inf else self._nothing",
        "dx.sums = self._nothing",
        "tests/model/test_fusion.py::test_outputs_and_gradients_are_those_of_the_plain_network",
    ),
    "a convolution's ReLU that overwrites a gradient that another layer still reads": Mutant(
        "pydtnn/layers/fused_conv.py",
        "dz = dy if deferred else self.gradient_like(dy)",
        "dz = dy",
        "tests/model/test_model.py::"
        "test_gradients_of_a_whole_model_are_those_of_central_differences",
    ),
    "an all-reduce in place of an array that another layer still reads": Mutant(
        "pydtnn/layers/exchange.py",
        "AllReduce(x if may_overwrite else x.copy(), self.axis)",
        "AllReduce(x, self.axis)",
        "tests/model/partition/test_layers.py::"
        "test_a_sum_over_ranks_may_be_read_whole_and_in_parts",
    ),
    # kernels
    "a geometry whose groups do not divide its filters": Mutant(
        "pydtnn/kernels/geometry.py",
        "self.channels % self.groups or self.filters % self.groups",
        "self.channels % self.groups",
        "tests/kernels/test_conv.py::test_a_geometry_that_kernels_do_not_compute_is_refused",
    ),
    "a reference convolution that does not add the gradient of other readers": Mutant(
        "pydtnn/kernels/reference/conv.py",
        "out[...] = dx if add is None else dx + wide(add)",
        "out[...] = dx",
        "tests/kernels/test_conv_fused.py::test_backward_of_data_does_what_it_is_told_to",
    ),
    "a ReLU whose backward replaces gradients at NaN by 0": Mutant(
        "pydtnn/kernels/reference/fused.py",
        "closed = v <= 0 if value.limit == inf else",
        "closed = ~(v > 0) if value.limit == inf else",
        "tests/kernels/test_fused.py::"
        "test_a_gate_stops_what_is_not_finite_and_passes_all_where_the_value_is_nan",
    ),
    "a hinge loss whose gradient counts the target class": Mutant(
        "pydtnn/kernels/reference/loss.py",
        "dx = xp.where(margin > 0, scale, 0)",
        "dx = xp.where(margin >= 0, scale, 0)",
        "tests/kernels/test_loss.py::test_reference_hinge_sums_the_margins_that_are_violated",
    ),
    "a running variance without Bessel's correction": Mutant(
        "pydtnn/kernels/reference/norm.py",
        "        variance = variance * n / xp.maximum(n - 1, 1)\n",
        "",
        "tests/layers/test_norm.py::"
        "test_running_statistics_move_by_momentum_to_the_unbiased_moments",
    ),
    "an adaptive mean that leaves out the last row of a bin": Mutant(
        "pydtnn/kernels/reference/pool.py",
        "-(-(i + 1) * n // o))",
        "(i + 1) * n // o)",
        "tests/kernels/test_pool.py::test_reference_adaptive_mean_cuts_the_input_in_bins",
    ),
    "equal random numbers for samples that differ by 2**32": Mutant(
        "pydtnn/kernels/reference/random.py",
        "counter[..., 2] = (samples >> 32)[:, None]",
        "counter[..., 2] = 0",
        "tests/kernels/test_random.py::test_bits_of_a_sample_depend_on_nothing_but_their_keys",
    ),
    "LARS that ignores weight decay in the rate of a layer": Mutant(
        "pydtnn/kernels/reference/update.py",
        "return lr * (factor * norm_w / (norm_u + decay * norm_w))",
        "return lr * (factor * norm_w / norm_u)",
        "tests/test_optimizers.py::test_five_steps_equal_the_formulas",
    ),
    "attention that computes outputs after the end of a sequence": Mutant(
        "pydtnn/kernels/reference/attention.py",
        "pairs = exist[:, None, :, None] & exist[:, None, None, :]",
        "pairs = exist[:, None, None, :]",
        "tests/kernels/test_attention.py::test_kernels_agree_with_the_reference",
    ),
    "a measurement of algorithms that overwrites the gradient so far": Mutant(
        "pydtnn/kernels/cpu/conv.py",
        "np.empty_like(out) if accumulate else out,",
        "out,",
        "tests/kernels/test_autotuner.py::"
        "test_measuring_leaves_no_trace_in_what_a_convolution_computes",
    ),
    "a depthwise convolution of volumes that rounds its first plane down": Mutant(
        "pydtnn/kernels/cpu/volumes.py",
        "first = max(start, -(offset // stride))",
        "first = max(start, -offset // stride)",
        "tests/kernels/test_volumes.py::test_all_directions_agree_with_the_reference",
    ),
    "a convolution of volumes that overwrites its input before it has been read": Mutant(
        "pydtnn/kernels/cpu/volumes.py",
        "not native(dw, dx) or np.may_share_memory(dx, x):",
        "not native(dw, dx):",
        "tests/kernels/test_volumes.py::test_gradients_may_overwrite_the_input",
    ),
    # the model and its partition
    "gradients added into the array that the caller of backward passes": Mutant(
        "pydtnn/model/execution.py",
        "sums.add(node, _in_model_dtype(graph, g), new=False)",
        "sums.add(node, _in_model_dtype(graph, g), new=True)",
        "tests/model/test_graph.py::"
        "test_gradients_of_outputs_that_other_layers_read_are_not_overwritten",
    ),
    "a new gradient added into an array of another layer": Mutant(
        "pydtnn/model/execution.py",
        "out = so_far if own else dx if new else",
        "out = so_far if own or new else",
        "tests/model/test_graph.py::"
        "test_gradients_of_outputs_that_other_layers_read_are_not_overwritten",
    ),
    "outputs that are kept after their last reader": Mutant(
        "pydtnn/model/execution.py",
        "        recorder.release(node.releases)\n",
        "",
        "tests/model/test_model.py::test_a_forward_pass_alone_frees_every_array_after_its_last_use",
    ),
    "saved arrays that are kept after their backward": Mutant(
        "pydtnn/model/execution.py",
        "    residuals[node.index] = left\n",
        "    residuals[node.index] = saved\n",
        "tests/model/test_model.py::test_backward_frees_what_forward_kept_as_it_goes",
    ),
    "gradients that are kept after their backward": Mutant(
        "pydtnn/model/execution.py",
        "self.arrays.pop(node.index, (None, False))[0]",
        "self.arrays.get(node.index, (None, False))[0]",
        "tests/model/test_model.py::test_backward_frees_every_gradient_after_its_last_use",
    ),
    "saved arrays of layers that are not trained": Mutant(
        "pydtnn/model/recompute.py",
        "            if index in self._trained:\n"
        "                self.residuals[index] = saved\n"
        "            return\n",
        "            self.residuals[index] = saved\n            return\n",
        "tests/model/test_freeze.py::test_layers_that_run_no_backward_keep_nothing",
    ),
    "recomputed values that are kept after their last reader": Mutant(
        "pydtnn/model/recompute.py",
        "                values.pop(i, None)\n",
        "                pass\n",
        "tests/model/test_recompute.py::"
        "test_values_within_a_segment_are_freed_after_their_last_reader_again",
    ),
    "a layer in place of an output that a recomputed segment begins with": Mutant(
        "pydtnn/model/graph.py",
        "                and source.index not in checkpoints\n",
        "",
        "tests/model/test_recompute.py::test_every_way_to_recompute_gives_the_same_bytes",
    ),
    "an addition that gives up a gradient that a convolution still reads": Mutant(
        "pydtnn/model/fusion.py",
        "return touched < normed[0].index",
        "return touched <= normed[0].index",
        "tests/model/test_fusion.py::test_outputs_and_gradients_are_those_of_the_plain_network",
    ),
    "running statistics frozen with the last parameter of their norm": Mutant(
        "pydtnn/model/placement.py",
        "frozen[layer] = frozen.get(layer, True) and p.frozen",
        "frozen[layer] = p.frozen",
        "tests/model/test_freeze.py::"
        "test_statistics_change_while_a_parameter_of_their_norm_is_trained",
    ),
    "a rank's part cut out of an array that is a part already": Mutant(
        "pydtnn/model/whole.py",
        "part is not None and self.mesh is not None and np.shape(value) == part.shape:",
        "part is not None and self.mesh is not None:",
        "tests/training/checkpoint/test_mesh.py::"
        "test_factors_of_parts_are_resumed_on_the_same_mesh_only",
    ),
    "a pipeline cut before the last use of a shared layer": Mutant(
        "pydtnn/model/partition/stages.py",
        "range(first[part] + 1, last[part] + 1)",
        "range(first[part] + 1, last[part])",
        "tests/model/partition/test_stages.py::test_plans_that_cannot_be_are_refused",
    ),
    "messages of different micro-batches with the same tag": Mutant(
        "pydtnn/model/stage.py",
        "micro_batch % (width // values) * values",
        "micro_batch % (width // values)",
        "tests/training/test_pipeline.py::test_a_schedule_of_ones_own_is_a_function",
    ),
    "values of another micro-batch, handed over between two stages of a rank": Mutant(
        "pydtnn/model/stage.py",
        "(to, direction, micro_batch), Transfer(arrays)",
        "(to, direction, 0), Transfer(arrays)",
        "tests/training/test_pipeline.py::test_three_steps_equal_those_with_accumulation",
    ),
    "a mean over stripes of two axes that is scaled by the share of the last": Mutant(
        "pydtnn/model/partition/rules.py",
        "pool.share *= draft.own(cut)",
        "pool.share = draft.own(cut)",
        "tests/model/partition/test_layers.py::"
        "test_the_mean_of_a_map_that_is_cut_along_both_axes_is_that_of_all_parts",
    ),
    # optimizers, schedules, losses and metrics
    "Nadam's product of momenta after an earlier step is loaded": Mutant(
        "pydtnn/optimizers/adaptive.py",
        "done, product = self._product if self._product[0] <= step else (0, 1.0)",
        "done, product = self._product",
        "tests/test_optimizers.py::"
        "test_the_product_of_nadams_momenta_does_not_depend_on_the_steps_before",
    ),
    "a factor on the learning rate that is saved and not loaded": Mutant(
        "pydtnn/optimizers/base.py",
        "self.iterations, self.lr_factor = iterations, lr_factor",
        "self.iterations = iterations",
        "tests/test_optimizers.py::test_a_state_holds_parameters_without_padding_for_any_buckets",
    ),
    "LARS whose weight decay is not multiplied by the learning rate": Mutant(
        "pydtnn/optimizers/layerwise.py",
        "w, g, velocity, lr=1.0, decay=lr * decay,",
        "w, g, velocity, lr=1.0, decay=decay,",
        "tests/test_optimizers.py::test_five_steps_equal_the_formulas",
    ),
    "a group of parameters that loses weight decay with its own learning rate": Mutant(
        "pydtnn/optimizers/groups.py",
        'own.get("weight_decay", weight_decay)',
        'own.get("weight_decay", 0.0)',
        "tests/test_optimizers.py::test_a_group_is_updated_like_a_rule_of_its_own_rate_and_decay",
    ),
    "a loss scale whose count of good steps is saved and not loaded": Mutant(
        "pydtnn/optimizers/loss_scale.py",
        'self.scale[...], self.good[...] = state["scale"], state["good"]',
        'self.scale[...] = state["scale"]',
        "tests/training/test_loss_scale.py::test_state_continues_where_another_left_off",
    ),
    "a step schedule that divides one step after each boundary": Mutant(
        "pydtnn/schedules/curves.py",
        "passed = bisect_right(self.boundaries, step)",
        "passed = bisect_right(self.boundaries, step - 1)",
        "tests/test_schedules.py::test_a_step_applies_gamma_from_each_boundary_on",
    ),
    "a cross-entropy that is NaN where a probability of 0 has a logit of -infinity": Mutant(
        "pydtnn/kernels/reference/loss.py",
        "        log_p = xp.where(q > 0, log_p, 0)  # it may be -infinity elsewhere\n",
        "",
        "tests/test_losses.py::test_a_logit_of_minus_infinity_excludes_a_class_of_probability_0",
    ),
    "top-k accuracy that counts classes of equal outputs as right": Mutant(
        "pydtnn/metrics.py",
        "ahead = (~(y < own)).sum(axis=1)  # itself included",
        "ahead = (y > own).sum(axis=1) + 1",
        "tests/test_metrics.py::test_equal_scores_and_nan_are_never_among_the_largest_by_chance",
    ),
    # communication
    "one tag for each sum where each chunk needs one": Mutant(
        "pydtnn/comm/schedules/executor.py",
        "tag, self._tags = self._tags, self._tags + plan.pieces",
        "tag, self._tags = self._tags, self._tags + 1",
        "tests/comm/schedules/test_executor.py::"
        "TestScheduled::test_several_reductions_may_be_under_way_and_end_in_any_order",
    ),
    "a chunk received into elements that are still being sent": Mutant(
        "pydtnn/comm/schedules/executor.py",
        "for other in touched) > 1:",
        "for other in touched) > 2:",
        "tests/comm/schedules/test_chunks.py::"
        "test_copies_go_straight_to_their_place_where_nothing_else_happens_there",
    ),
    "a group of threads with the hosts of other ranks": Mutant(
        "pydtnn/comm/thread.py",
        "hosts = [self.hosts[self.members.index(rank)] for rank in members]",
        "hosts = list(self.hosts[: len(members)])",
        "tests/comm/test_thread.py::test_ranks_may_pretend_to_be_on_different_hosts",
    ),
    "bytes of an all-gather that are counted for one rank only": Mutant(
        "pydtnn/comm/communicator.py",
        'with self._metered("allgather", (self.size - 1) * array.nbytes):',
        'with self._metered("allgather", array.nbytes):',
        "tests/comm/test_traffic.py::test_every_way_counts_the_bytes_that_a_rank_must_send",
    ),
    # parallel training
    "samples that are not counted again after an evaluation of averaged parameters": Mutant(
        "pydtnn/parallel/exchange.py",
        "self.samples, self._aside = samples, None",
        "self._aside = None",
        "tests/parallel/schemes/test_gossip.py::"
        "test_it_is_steps_followed_by_averages_with_neighbours",
    ),
    "exact sums that expect parts of shards without samples": Mutant(
        "pydtnn/parallel/reproducible.py",
        "self.present = min(samples, self.shards or 1)",
        "self.present = self.shards or 1",
        "tests/parallel/test_reproducible.py::"
        "test_shards_that_never_have_a_sample_cost_and_change_nothing",
    ),
    "elastic averaging that moves the centre once for each rank": Mutant(
        "pydtnn/parallel/schemes/elastic.py",
        "pull = self.beta / self.comm.size * (bucket.values - centre)",
        "pull = self.beta * (bucket.values - centre)",
        "tests/parallel/schemes/test_elastic.py::test_it_is_the_symmetric_synchronous_variant",
    ),
    "post-local SGD that begins one step late": Mutant(
        "pydtnn/parallel/schemes/local_sgd.py",
        "if optimizer.iterations < self.after:",
        "if optimizer.iterations <= self.after:",
        "tests/parallel/schemes/test_local_sgd.py::test_a_rank_without_samples_makes_no_update",
    ),
    "a step of a parameter server that ends before parameters have arrived": Mutant(
        "pydtnn/parallel/schemes/parameter_server.py",
        "            self.pull(bucket)\n        self.drain()\n",
        "            self.pull(bucket)\n",
        "tests/parallel/schemes/test_fits.py::test_four_fits_of_an_epoch_are_one_of_four",
    ),
    "decompressed gradients added to those of the step before": Mutant(
        "pydtnn/parallel/compression/compressor.py",
        "        kept.total.fill(0)\n        for rank, (message, sizes)",
        "        for rank, (message, sizes)",
        "tests/parallel/compression/test_documentation.py::test_it_sums_as_the_one_of_the_library",
    ),
    "random-k compression that does not scale what it keeps": Mutant(
        "pydtnn/parallel/compression/sparse.py",
        "factor = 1 if feedback else out.size / _count(share, out.size)",
        "factor = 1",
        "tests/parallel/compression/test_compressors.py::"
        "test_random_k_is_right_in_the_mean_without_feedback_and_plain_with_it",
    ),
    "a pipeline stage that runs one micro-batch too many ahead": Mutant(
        "pydtnn/parallel/pipeline/schedules.py",
        "return _alternating(ranks - rank - 1, micro_batches)",
        "return _alternating(ranks - rank, micro_batches)",
        "tests/parallel/pipeline/test_draw.py::test_the_command_shows_and_proves",
    ),
    "a norm in which stages of two ranks count twice": Mutant(
        "pydtnn/training/mesh.py",
        "/ (copies if PIPELINE in axes else 1)",
        "/ 1",
        "tests/training/test_pipeline.py::test_stages_combine_with",
    ),
    # training and checkpoints
    "statistics of a shard that the next one overwrites": Mutant(
        "pydtnn/training/step.py",
        "= statistics.sums + others",
        "= statistics.sums",
        "tests/parallel/test_reproducible.py::"
        "test_a_step_is_that_of_accumulation_except_for_rounding",
    ),
    "a loaded training whose ranks continue with the parameters of rank 0": Mutant(
        "pydtnn/training/trainer.py",
        'self._plan, self._loaded = dict(state["plan"]), True',
        'self._plan = dict(state["plan"])',
        "tests/parallel/schemes/test_schemes.py::test_a_run_that_is_resumed_ends_in_the_same_bytes",
    ),
    "two callbacks of one type that share their state in a checkpoint": Mutant(
        "pydtnn/training/checkpoint/content.py",
        'number = 1 + sum(name.rpartition(".")[0] == kind for name in parts)',
        "number = 1",
        "tests/training/checkpoint/test_content.py::"
        "test_two_callbacks_of_one_kind_keep_their_own_states",
    ),
    "one checkpoint more than `keep`": Mutant(
        "pydtnn/training/checkpoint/folder.py",
        "older = paths[: -self.keep]",
        "older = paths[: -self.keep - 1]",
        "tests/training/checkpoint/test_folder.py::test_only_the_last_checkpoints_are_kept",
    ),
    "losses of a pipeline that are read before they are summed over ranks": Mutant(
        "pydtnn/training/pipeline.py",
        "            if self._summed is not None:\n                self._summed.wait()\n",
        "",
        "tests/training/test_pipeline.py::"
        "test_checkpoints_of_stages_continue_on_another_mesh_and_serially",
    ),
    "metrics of a running epoch without their last operation": Mutant(
        "pydtnn/training/metric_sums.py",
        "total = Totals(self.names, results=self._results, sizes=self._sizes)",
        "total = Totals(self.names, sizes=self._sizes)",
        "tests/training/test_metric_sums.py::"
        "test_a_sum_of_totals_has_their_sizes_and_last_operations",
    ),
    # data and files
    "samples in the same order in every epoch": Mutant(
        "pydtnn/data/loader.py",
        "order = self.dataset.shuffled(self.seed, epoch)",
        "order = self.dataset.shuffled(self.seed, 0)",
        "tests/data/test_loader.py::"
        "test_ranks_share_the_permutation_of_the_epoch_and_the_last_batch_has_the_rest",
    ),
    "windows of shards that are not shuffled": Mutant(
        "pydtnn/data/order.py",
        "places[shards] // window))",
        "shards // window))",
        "tests/data/test_order.py::test_samples_are_shuffled_within_windows_of_shuffled_shards",
    ),
    "a random crop that is never shifted by the largest offset": Mutant(
        "pydtnn/data/augment/simple.py",
        "top = below(words[:, 0], 2 * p + 1)",
        "top = below(words[:, 0], 2 * p)",
        "tests/data/augment/test_simple.py::test_a_crop_is_a_window_of_the_padded_image",
    ),
    "a packed shard that is kept although its images have changed": Mutant(
        "pydtnn/data/packing.py",
        "if not known or known[0] != plan.digest or not path.is_file():",
        "if not known or not path.is_file():",
        "tests/data/test_shards.py::test_what_has_changed_is_packed_again",
    ),
    "a prefix of `rename` that matches the beginning of a longer name": Mutant(
        "pydtnn/saving/weights.py",
        'name.startswith(prefix + ".")',
        "name.startswith(prefix)",
        "tests/test_weights.py::"
        "test_a_prefix_is_added_and_names_of_several_digits_are_not_confused",
    ),
    "features exported by the inverse permutation": Mutant(
        "pydtnn/interchange/slots.py",
        "array = array[..., np.argsort(self.order)]",
        "array = array[..., self.order]",
        "tests/interchange/test_state_dicts.py::test_arrays_come_back_bit_for_bit",
    ),
    # predictions
    "predicted messages that each have the whole link": Mutant(
        "pydtnn/perfmodel/overlap.py",
        "delay = min(one.transfer, other.passed - now)",
        "delay = 0.0",
        "tests/perfmodel/test_overlap.py::test_operations_share_the_link",
    ),
    "a predicted rank that copies the messages of all ranks of its host": Mutant(
        "pydtnn/perfmodel/formulas.py",
        "between.sent / group.per_host",
        "between.sent",
        "tests/perfmodel/formulas/test_placed.py::"
        "test_each_rank_copies_its_own_messages_between_hosts",
    ),
    "predicted ranks that share cores and compute as fast as alone": Mutant(
        "pydtnn/perfmodel/timing.py",
        "self.slowdown = messages.slowdown",
        "self.slowdown = 1.0",
        "tests/perfmodel/test_projection.py::"
        "test_ranks_that_share_cores_compute_longer_by_the_same_factor",
    ),
    "few ranks on many cores that compute faster than alone": Mutant(
        "pydtnn/perfmodel/engine/cores.py",
        "return min(self._number / len(self._targets[group]), 1.0)",
        "return self._number / len(self._targets[group])",
        "tests/perfmodel/engine/test_cores.py::test_ranks_with_a_core_each_do_not_delay_each_other",
    ),
    "a simulated clock that goes back when a rank waits": Mutant(
        "pydtnn/perfmodel/engine/engine.py",
        "one.clock = max(one.clock, what.at)",
        "one.clock = what.at",
        "tests/perfmodel/engine/test_engine.py::"
        "test_a_wait_advances_to_the_completion_and_never_back",
    ),
    "strategies without those that cut an axis among all ranks": Mutant(
        "pydtnn/perfmodel/oracle/ranking.py",
        "for part in range(2, min(ranks, largest) + 1):",
        "for part in range(2, min(ranks, largest)):",
        "tests/perfmodel/oracle/test_strategies.py::test_all_factorisations_occur_once",
    ),
}


def check(mutants: Sequence[Mutant]) -> None:
    """Raise ValueError if the text of a mutant does not occur once, or a test fails without it."""
    for file, before, *_ in mutants:
        if (count := (ROOT / file).read_text().count(before)) != 1:
            raise ValueError(f"{file}: expected a text that occurs once, got {count} of\n{before}")
    with tempfile.TemporaryDirectory() as folder:
        link(Path(folder))
        done = run_tests(Path(folder), sorted({mutant.test for mutant in mutants}))
    if done.returncode:
        raise ValueError(f"expected tests that pass without mutants, got\n{done.stdout}")


def run_tests(
    folder: Path, tests: Sequence[str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run tests in a checkout until one fails."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        + ["-m", "not long", *tests],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def link(folder: Path) -> None:
    """Create a checkout of links in a folder; those of the library are to single files."""
    for entry in ROOT.iterdir():
        if entry.name != "pydtnn" and not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    for path in (ROOT / "pydtnn").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            place = folder / path.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(path)


def killed(mutant: Mutant) -> bool:
    """Return whether the test of a mutant, which passes without it, fails, crashes or hangs."""
    with tempfile.TemporaryDirectory() as folder:
        link(Path(folder))
        target = Path(folder, mutant.file)
        source = target.read_text()
        target.unlink()
        target.write_text(source.replace(mutant.before, mutant.after))
        try:
            done = run_tests(Path(folder), [mutant.test], TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return True
    if done.returncode > 1:  # neither passed nor failed, nor ended by a signal
        raise ValueError(f"expected a test that runs with the mutant, got\n{done.stdout}")
    return done.returncode != 0


def report(name: str, mutant: Mutant) -> bool:
    """Print and return whether a mutant is killed."""
    begin = time.perf_counter()
    found = killed(mutant)
    seconds = time.perf_counter() - begin
    print(f"{'killed' if found else 'SURVIVED':8} {seconds:5.1f} s  {name}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests of all mutants; return 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; by default all")
    parser.add_argument("--jobs", type=int, default=len(cores_here()), help="at a time")
    options = parser.parse_args(arguments)
    chosen = {name: MUTANTS[name] for name in options.names or MUTANTS}
    check([*chosen.values()])
    with ThreadPoolExecutor(options.jobs) as pool:
        found = sum(pool.map(report, chosen, chosen.values()))
    print(f"{found} of {len(chosen)} killed")
    return int(found < len(chosen))


if __name__ == "__main__":
    sys.exit(main())

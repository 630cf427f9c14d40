"""Metrics: pure functions on plain numbers. What turns logits into counts is `everfed.core.evaluate`.

Glossary. a[t,i] is the accuracy on task i after task t, a fraction in [0, 1]; T tasks were learned. docs/metrics.md
has the formulas, and which paper uses which. What cannot be computed is None, never NaN.

From the accuracy matrix (`matrix`)
    acc_t                          mean of row t over the tasks learned (macro); result.json: acc
    acc_t_micro                    the same, weighted by test samples; acc_micro
    average_incremental_accuracy   mean of acc_t over t; acc_avg_incremental, acc_avg_incremental_micro
    learning_accuracy              mean of the diagonal
    forgetting                     best accuracy since a task was learned, less the final one (FedGP, restricted)
    forgetting_standard            the usual definition: the same number
    forgetting_clipped             no task counts less than 0 (FedGP's code; compare its tables with this one)
    forgetting_full                the maximum also runs over rows before a task was learned (FedGP, STAMP as printed)
    forgetting_avg_incremental     mean over the task ends of the forgetting until then
    forgetting_mfcl_code           accuracy right after learning, less the final one, divided by T (MFCL's code)
    bwt, fwt                       backward and forward transfer
    over_time                      any of these after task 1, 2, ..., T
    summary                        all of them, for result.json

From the accuracies after every round (`matrix`, too)
    by_task                        the curves, from the evaluations of a result
    task_curve                     accuracy over the tasks learned, round by round
    rounds_to_best                 CoR; also rounds_to_best_per_task and rounds_to_best_sum
    delta                          relative gain in accuracy less relative growth in rounds, %
    acc_last_rounds                final accuracy averaged over the last rounds (FedSSI's A(f))
    learning_accuracy_best         learning accuracy with each task's best round

From perplexities (`matrix`, too)
    perplexity, all_period_perplexity, rcp, forgetting_factor, forgetting_factor_relative, language_summary

Over seeds and against the papers (`statistics`)
    mean_and_deviation             population deviation (ddof = 0)
    paired_difference              mean difference over the same seeds, with a t-interval
    paired_by_seed                 the same of {seed: value}, over the seeds that both have
    gap, levels                    whether levels are equivalent, differ, or neither is shown
    effect, covers                 whether a method's difference to its baseline is the paper's
    never_compared                 published cells that carry no evidence
"""

# ruff: noqa: F403
from everfed.metrics.matrix import *
from everfed.metrics.statistics import *

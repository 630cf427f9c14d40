"""The accuracy matrix: the worked examples with their literal numbers, then properties."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everfed import metrics

M1 = [[0.9, 0.1, 0.2], [0.6, 0.8, 0.1], [0.5, 0.7, 0.85]]
M2 = [[0.5, 0.0], [0.7, 0.8]]
M3 = [[0.8, 0.9, 0.1], [0.7, 0.6, 0.1], [0.6, 0.5, 0.9]]
FORGETTING = [
    metrics.forgetting,
    metrics.forgetting_clipped,
    metrics.forgetting_standard,
    metrics.forgetting_full,
    metrics.forgetting_mfcl_code,
]

accuracy = st.floats(0, 1)
sizes = st.integers(2, 6)
matrices = sizes.flatmap(lambda n: st.lists(st.lists(accuracy, min_size=n, max_size=n), min_size=n, max_size=n))


def near(value: float) -> object:
    return pytest.approx(value, abs=1e-12)


def lower_triangle(matrix: list[list[float]]) -> list[list[float | None]]:
    return [[value if i <= t else None for i, value in enumerate(row)] for t, row in enumerate(matrix)]


class TestWorkedExamples:
    def test_m1(self) -> None:
        assert metrics.over_time(metrics.acc_t, M1) == [near(0.9), near(0.7), near(2.05 / 3)]
        assert metrics.acc_t(M1) == pytest.approx(0.683333, abs=5e-7)
        assert metrics.acc_t(M1, 2) == near(0.7)
        assert metrics.average_incremental_accuracy(M1) == pytest.approx(0.761111, abs=5e-7)
        assert metrics.learning_accuracy(M1) == near(0.85)
        assert metrics.bwt(M1) == near(-0.25)
        assert metrics.fwt(M1, 0.1) == near(0)
        assert metrics.fwt(M1, [0.1, 0.1, 0.1]) == near(0)

    def test_forgetting_averaged_over_the_task_ends(self) -> None:
        """-0.1 after the second task, whose first rose; ((0.7 - 0.3) + (0.4 - 0.35)) / 2 after the third."""
        matrix = [[0.6, 0.0, 0.0], [0.7, 0.4, 0.0], [0.3, 0.35, 0.5]]
        assert metrics.forgetting_avg_incremental(matrix) == near((-0.1 + 0.225) / 2)
        assert metrics.forgetting_avg_incremental([[0.6]]) is None

    def test_forward_transfer_with_a_baseline_of_each_task(self) -> None:
        """((a[1,2] - b_2) + (a[2,3] - b_3)) / 2; the first task has none, so its baseline is not used."""
        matrix = [[0.9, 0.5, None], [0.8, 0.9, 0.7], [0.7, 0.8, 0.9]]
        assert metrics.fwt(matrix, [0.9, 0.1, 0.4]) == near((0.4 + 0.3) / 2)
        assert metrics.summary(matrix, baseline=[0.9, 0.1, 0.4])["fwt"] == near(0.35)

    def test_m1_forgetting(self) -> None:
        assert metrics.forgetting(M1) == near(0.25)
        assert metrics.forgetting_full(M1) == near(0.25)
        assert metrics.forgetting_standard(M1) == near(0.25)
        assert metrics.forgetting_mfcl_code(M1) == pytest.approx(0.166667, abs=5e-7)

    def test_m2_a_task_that_improved(self) -> None:
        assert metrics.forgetting(M2) == near(-0.2)
        assert metrics.forgetting_full(M2) == near(-0.2)
        assert metrics.forgetting_clipped(M2) == 0
        assert metrics.forgetting_standard(M2) == near(-0.2)
        assert metrics.bwt(M2) == near(0.2)

    def test_m3_a_task_that_was_better_before_it_was_learned(self) -> None:
        assert metrics.forgetting_full(M3) == near(0.3)
        assert metrics.forgetting_standard(M3) == near(0.15)
        assert metrics.forgetting(M3) == near(0.15)

    @pytest.mark.parametrize("metric", FORGETTING)
    def test_constant_matrix_forgets_nothing(self, metric) -> None:
        assert metric([[0.3] * 4] * 4) == 0

    @pytest.mark.parametrize("metric", [*FORGETTING, metrics.bwt, lambda m: metrics.fwt(m, 0.1)])
    def test_one_task_is_undefined(self, metric) -> None:
        assert metric([[0.9]]) is None
        assert metric([[0.9, 0.4]]) is None

    def test_micro_is_not_macro(self) -> None:
        matrix = [[0.0, 0.0], [1.0, 0.0]]
        assert metrics.acc_t(matrix) == 0.5
        assert metrics.acc_t_micro(matrix, [100, 900]) == near(0.1)

    def test_ragged_rows_of_the_fedgp_example(self) -> None:
        matrix = [[0.9], [0.7, 0.8], [0.75, 0.85, 0.9]]
        assert metrics.acc_t(matrix) == pytest.approx(0.8333333, abs=5e-8)
        assert metrics.acc_t(matrix, 1) == 0.9
        assert metrics.over_time(metrics.forgetting, matrix) == [None, near(0.2), near(0.05)]
        assert metrics.forgetting_clipped(matrix) == near(0.075)

    def test_class_incremental_example(self) -> None:
        matrix = [[0.8, None], [0.5, 0.7]]
        assert metrics.over_time(metrics.acc_t, matrix) == [near(0.8), near(0.6)]
        assert metrics.average_incremental_accuracy(matrix) == near(0.7)
        assert metrics.forgetting(matrix) == near(0.3)
        assert metrics.bwt(matrix) == near(-0.3)

    def test_maximum_runs_over_time_not_over_tasks(self) -> None:
        matrix = [[0.6, 0, 0], [0.7, 0.4, 0], [0.3, 0.35, 0.5]]
        assert metrics.forgetting(matrix) == near(0.225)

    def test_unequal_test_sets(self) -> None:
        matrix = [[0.95, None], [0.9, 0.5]]
        assert metrics.acc_t_micro(matrix, [100, 300]) == near(0.6)
        assert metrics.acc_t(matrix) == near(0.7)
        assert metrics.average_incremental_accuracy(matrix, [100, 300]) == near((0.95 + 0.6) / 2)

    @pytest.mark.parametrize(
        ("rows", "printed"),
        [
            ((88.29, 72.58, 59.43, 50.35, 42.58), 62.65),
            ((88.43, 70.23, 55.00, 45.53, 36.68), 59.17),
            ((94.17, 83.90, 79.79, 72.09), 82.49),
            ((94.17, 81.93, 77.13, 68.12), 80.34),
        ],
    )
    def test_average_incremental_accuracy_of_fedssi_tables(self, rows: tuple[float, ...], printed: float) -> None:
        matrix = [[a / 100] * len(rows) for a in rows]
        assert 100 * metrics.average_incremental_accuracy(matrix) == pytest.approx(printed, abs=0.0051)


class TestMissingEntries:
    def test_zero_shot_entries_are_needed_by_the_literal_formula_only(self) -> None:
        triangle = lower_triangle(M3)
        assert metrics.forgetting_full(triangle) is None
        assert metrics.forgetting(triangle) == near(0.15)
        assert metrics.fwt(triangle, 0.1) is None

    def test_only_the_last_row_measured(self) -> None:
        values = metrics.summary([[], [None], [0.5, 0.7, 0.9]], n_test=[1, 1, 1])
        assert values["acc"] == near(0.7)
        assert values["acc_micro"] == near(0.7)
        assert {name for name, value in values.items() if value is not None} == {"acc", "acc_micro"}

    def test_a_run_in_its_second_of_three_tasks(self) -> None:
        assert metrics.acc_t(M1[:2]) == near(0.7)
        assert metrics.forgetting(M1[:2]) == near(0.3)

    def test_a_gap_between_is_not_skipped(self) -> None:
        assert metrics.forgetting([[0.9, 0, 0], [None, 0.8, 0], [0.5, 0.7, 0.8]]) is None


class TestErrors:
    @pytest.mark.parametrize("value", [68.02, -0.1, float("nan"), float("inf")])
    def test_not_a_fraction(self, value: float) -> None:
        with pytest.raises(ValueError, match=r"accuracy_matrix\[1\]\[0\] is .*\[0, 1\], or None"):
            metrics.acc_t([[0.5, 0.5], [value, 0.5]])

    def test_no_rows(self) -> None:
        with pytest.raises(ValueError, match="no row"):
            metrics.summary([])

    def test_more_rows_than_tasks(self) -> None:
        with pytest.raises(ValueError, match="3 rows .* only 2 columns"):
            metrics.acc_t([[0.1, 0.1]] * 3)

    @pytest.mark.parametrize("t", [0, 4])
    def test_t_out_of_range(self, t: int) -> None:
        with pytest.raises(ValueError, match="allowed: 1 to 3"):
            metrics.acc_t(M1, t)

    def test_too_few_sizes_or_baselines(self) -> None:
        with pytest.raises(ValueError, match="n_test must give .* 3 tasks"):
            metrics.acc_t_micro(M1, [10, 10])
        with pytest.raises(ValueError, match="baseline must be one number"):
            metrics.fwt(M1, [0.1])

    def test_negative_size(self) -> None:
        with pytest.raises(ValueError, match="not negative"):
            metrics.acc_t_micro(M1, [10, -10, 10])

    def test_curves_of_another_run(self) -> None:
        with pytest.raises(ValueError, match="curves must cover the 3 tasks"):
            metrics.summary(M1, curves=[[[0.5]]])


class TestSummary:
    def test_every_name_and_number(self) -> None:
        curves = [[[0.95, 0, 0]] * 9 + [[0.9, 0.1, 0.2]], [[0.6, 0.8, 0.1]] * 10, [[0.5, 0.7, 0.85]] * 10]
        assert metrics.summary(M1, n_test=[100, 100, 200], baseline=0.1, curves=curves) == {
            "acc": near(2.05 / 3),
            "acc_micro": near(0.725),
            "acc_avg_incremental": near(2.05 / 9 + 1.6 / 3),
            "acc_avg_incremental_micro": near((0.9 + 0.7 + 0.725) / 3),
            "acc_last_rounds": near(2.05 / 3),
            "learning_accuracy": near(0.85),
            "learning_accuracy_best": near(2.6 / 3),
            "forgetting": near(0.25),
            "forgetting_clipped": near(0.25),
            "forgetting_standard": near(0.25),
            "forgetting_full": near(0.25),
            "forgetting_avg_incremental": near((0.3 + 0.25) / 2),
            "forgetting_mfcl_code": near(0.5 / 3),
            "bwt": near(-0.25),
            "fwt": near(0),
            "rounds_to_best": 3,
        }

    def test_same_names_whatever_is_given(self) -> None:
        full = metrics.summary(M1, [1, 1, 1], 0.1, [[[0.1]], [[0.1, 0.1]], [[0.1, 0.1, 0.1]]])
        assert set(metrics.summary([[0.9]])) == set(full)

    @given(matrices)
    def test_survives_json(self, matrix: list[list[float]]) -> None:
        values = metrics.summary(json.loads(json.dumps(lower_triangle(matrix))))
        assert json.loads(json.dumps(values, allow_nan=False)) == values


class TestProperties:
    @given(matrices)
    def test_negative_bwt_is_a_lower_bound_of_forgetting(self, matrix) -> None:
        assert -metrics.bwt(matrix) <= metrics.forgetting_standard(matrix)

    @given(matrices)
    def test_order_of_the_variants(self, matrix) -> None:
        standard, clipped = metrics.forgetting_standard(matrix), metrics.forgetting_clipped(matrix)
        assert clipped >= 0
        assert standard <= clipped <= 1
        assert standard <= metrics.forgetting_full(matrix)

    @given(matrices)
    def test_restriction_is_the_codes_zero_padding(self, matrix) -> None:
        padded = [[0.0 if value is None else value for value in row] for row in lower_triangle(matrix)]
        assert metrics.forgetting_full(padded) == metrics.forgetting(matrix)

    @given(matrices)
    def test_clipped_is_the_codes_maximum_over_all_rows(self, matrix) -> None:
        padded = [[0.0 if value is None else value for value in row] for row in lower_triangle(matrix)]
        drops = [max(row[i] for row in padded) - padded[-1][i] for i in range(len(padded) - 1)]
        assert metrics.forgetting_clipped(matrix) == pytest.approx(sum(drops) / len(drops), abs=1e-12)

    @given(matrices)
    def test_mfcl_code_is_bwt_over_another_count(self, matrix) -> None:
        t = len(matrix)
        assert metrics.forgetting_mfcl_code(matrix) == pytest.approx(-metrics.bwt(matrix) * (t - 1) / t, abs=1e-12)

    @given(matrices, st.randoms(use_true_random=False))
    def test_task_order_does_not_matter_to_acc(self, matrix, random) -> None:
        order = list(range(len(matrix)))
        random.shuffle(order)
        assert metrics.acc_t([[row[i] for i in order] for row in matrix]) == metrics.acc_t(matrix)

    def test_row_order_does(self) -> None:
        assert metrics.acc_t(M1[::-1]) != metrics.acc_t(M1)

    @given(matrices, st.integers(1, 1000))
    def test_micro_is_macro_for_equal_test_sets(self, matrix, n) -> None:
        assert metrics.acc_t_micro(matrix, [n] * len(matrix)) == pytest.approx(metrics.acc_t(matrix), abs=1e-12)

    @given(matrices)
    def test_accuracies_stay_in_range(self, matrix) -> None:
        for value in (metrics.acc_t(matrix), metrics.average_incremental_accuracy(matrix)):
            assert 0 <= value <= 1

    @given(matrices)
    def test_final_accuracy_is_learning_accuracy_plus_transfer(self, matrix) -> None:
        t = len(matrix)
        expected = metrics.learning_accuracy(matrix) + metrics.bwt(matrix) * (t - 1) / t
        assert metrics.acc_t(matrix) == pytest.approx(expected, abs=1e-12)

    @given(matrices)
    def test_the_triangle_is_enough_for_all_but_two(self, matrix) -> None:
        full, part = metrics.summary(matrix), metrics.summary(lower_triangle(matrix))
        assert {name for name in full if full[name] != part[name]} <= {"forgetting_full"}

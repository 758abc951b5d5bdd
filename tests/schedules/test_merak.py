"""Merak's orders as its own generator printed them, and the closed forms of their makespans."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merak_jax.schedules.merak import (
    early_recompute,
    last_no_recompute,
    shifted_critical_path,
    stage_aware_ratios,
)
from merak_jax.schedules.one_f_one_b import one_f_one_b
from merak_jax.schedules.order_check import check_order
from merak_jax.schedules.search import in_flight
from merak_jax.schedules.simulate import simulate
from merak_jax.schedules.task import ScheduleError

EARLY = """\
s0 F0 F1 F2 F3 B0 F4 B1 f5 B2 f6 B3 f7 B4 R5 B5 R6 B6 R7 B7
s1 F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 f6 B4 f7 B5 R6 B6 R7 B7
s2 F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 f7 B6 R7 B7
s3 F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"""

LAST = """\
s0 F0 F1 F2 F3 B0 F4 B1 f5 B2 f6 B3 f7 B4 R5 B5 R6 B6 R7 B7
s1 F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 f6 B4 f7 B5 R6 B6 R7 B7
s2 f0 F1 R0 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
s3 F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"""

SHIFTED = """\
s0 F0 F1 F2 F3 B0 F4 B1 f5 B2 f6 B3 f7 B4 R5 B5 R6 B6 R7 B7
s1 f0 F1 F2 R0 B0 F3 B1 F4 B2 F5 B3 f6 B4 f7 B5 R6 B6 R7 B7
s2 f0 f1 F2 R0 B0 R1 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
s3 F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"""


@pytest.mark.parametrize(
    "make, order", [(early_recompute, EARLY), (last_no_recompute, LAST), (shifted_critical_path, SHIFTED)]
)
def test_orders_are_merak_s(make, order):
    assert str(make(4, 8)) == order


def test_two_stages_shift_from_the_first():
    assert str(shifted_critical_path(2, 4)) == "s0 f0 f1 F2 R0 B0 R1 B1 F3 B2 B3\ns1 F0 B0 F1 B1 F2 B2 F3 B3"


# schedules: 1F1B, early, last without, shifted, 1F1B without recomputation; F=1 B=2 R=1.
MAKESPANS = {
    (2, 8): (36, 35, 33, 32, 27),
    (4, 4): (28, 25, 23, 22, 21),
    (4, 8): (44, 41, 39, 38, 33),
    (4, 16): (76, 73, 71, 70, 57),
    (8, 8): (60, 53, 51, 50, 45),
    (8, 16): (92, 85, 83, 82, 69),
    (8, 32): (156, 149, 147, 146, 117),
}


@pytest.mark.parametrize("sizes, expected", MAKESPANS.items(), ids=str)
def test_makespans_are_those_of_the_paper_s_classes(sizes, expected):
    makes = (one_f_one_b, early_recompute, last_no_recompute, shifted_critical_path)
    found = [simulate(make(*sizes), recompute=1.0).makespan for make in makes]
    assert (*found, simulate(one_f_one_b(*sizes)).makespan) == expected


@settings(deadline=None, max_examples=80)
@given(st.integers(2, 8), st.data())
def test_makespans_have_closed_forms(stages, data):
    microbatches = data.draw(st.integers(max(4, stages), 4 * stages))
    recompute = data.draw(st.sampled_from([0.25, 0.5, 1.0]))
    base = (microbatches + stages - 1) * 3
    closed = {
        one_f_one_b: (microbatches + stages - 1) * (3 + recompute),
        early_recompute: base + microbatches * recompute,
        last_no_recompute: base + (microbatches - 2) * recompute,
        shifted_critical_path: base + (microbatches - 3) * recompute + max(0.0, 1 + recompute - 2),
    }
    for make, expected in closed.items():
        assert simulate(make(stages, microbatches), recompute=recompute).makespan == pytest.approx(expected)


def test_microbatches_in_flight():
    assert in_flight(early_recompute(4, 8)) == [4, 3, 2, 1]
    assert in_flight(last_no_recompute(4, 8)) == [4, 3, 2, 1]
    assert in_flight(shifted_critical_path(4, 8)) == [4, 3, 3, 1]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 16), st.integers(1, 64))
def test_every_order_is_legal_or_refused_when_it_is_made(stages, microbatches):
    for make, least in ((early_recompute, 1), (last_no_recompute, 2), (shifted_critical_path, max(4, stages))):
        if stages > 1 and microbatches < least:
            with pytest.raises(ScheduleError, match=f"needs at least {least} microbatches here, got {microbatches}"):
                make(stages, microbatches)
        else:
            check_order(make(stages, microbatches))


def test_stage_aware_ratios_equalise_memory():
    ratios = stage_aware_ratios(8, 0.75, shifted=True)
    assert ratios == pytest.approx((0.75, 0.708, 0.65, 0.5625, 0.417, 0.125, 0.125, 0.0), abs=5e-4)
    schedule = shifted_critical_path(8, 16)
    assert peaks(schedule, ratios) == pytest.approx([2.75] * 7 + [1.0])
    # An early recomputation is of the whole stage.
    makespan = simulate(schedule, recompute=ratios, early_recompute=1.0).makespan
    assert makespan == pytest.approx(78.09, abs=5e-3)
    assert simulate(schedule, recompute=1.0).makespan == 82
    assert simulate(one_f_one_b(8, 16), recompute=1.0).makespan == 92


@pytest.mark.parametrize(
    "first, makespan, peak", [(1, 38, 1), (0.9, 37.5, 1.3), (0.75, 36.75, 1.75), (0.5, 35.5, 2.5), (0.25, 34.25, 3.25)]
)
def test_stage_aware_recomputation_of_the_shifted_order(first, makespan, peak):
    schedule, ratios = shifted_critical_path(4, 8), stage_aware_ratios(4, first, shifted=True)
    assert simulate(schedule, recompute=ratios, early_recompute=1.0).makespan == pytest.approx(makespan)
    assert max(peaks(schedule, ratios)) == pytest.approx(peak)


def peaks(schedule, ratios) -> list[float]:
    """The most stage activations on each stage: what each microbatch in flight keeps, and what one of them makes again."""
    return [held * (1 - ratio) + ratio for held, ratio in zip(in_flight(schedule), ratios)]


def test_a_share_outside_0_to_1_is_an_error():
    with pytest.raises(ScheduleError, match="must be 0 to 1, got 1.5"):
        stage_aware_ratios(4, 1.5)

"""Llama and Mixtral, in linen and in nnx, by the schedules that are dealt to them, give the numbers of one device."""

import pytest

from tests import zoo
from tests.helper import polluted_buffers
from tests.zoo_deal import cells_of

# Every update here is computed for all blocks at once.
pytestmark = pytest.mark.filterwarnings("error::merak_jax.runtime.reroll.RerollWarning")


@pytest.mark.parametrize("cell", cells_of("Llama", polluted=False), ids=str)
def test_a_llama_or_mixtral_gives_the_numbers_of_one_device(cell):
    zoo.check(cell)


@pytest.mark.parametrize("cell", cells_of("Llama", polluted=True), ids=str)
def test_a_llama_or_mixtral_gives_them_whatever_bubbles_and_unused_slots_hold(cell):
    with polluted_buffers():
        zoo.check(cell)

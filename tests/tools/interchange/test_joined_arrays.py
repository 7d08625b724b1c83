"""Arrays here that are several ones in another library, or of which several are one there."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.tools.interchange import load_state_dict, state_dict

PAIRS = ((6,), (5,))


def test_queries_keys_and_values_are_arrays_of_their_own_in_bert():
    first, other = (
        Model(create_net("bert_nano", 11, (6,)), (6,), dtype="float64", seed=seed)
        for seed in (1, 2)
    )
    arrays = state_dict(first, names="hugging_face")
    whole = first.state()["encoder.block1.attention.in_proj.w"]
    for part, name in zip(np.split(whole, 3), ("query", "key", "value"), strict=True):
        there = arrays[f"bert.encoder.layer.1.attention.self.{name}.weight"]
        np.testing.assert_array_equal(there, part)
    arrays["cls.predictions.decoder.bias"] = arrays["cls.predictions.bias"]  # a second copy
    assert load_state_dict(other, arrays).by == "names"
    for name, array in first.state().items():
        np.testing.assert_array_equal(other.state()[name], array, err_msg=name)
    del arrays["bert.encoder.layer.1.attention.self.key.weight"]
    with pytest.raises(ValueError, match=r"encoder\.block1\.attention\.in_proj\.w is missing"):
        load_state_dict(other, arrays)


def test_a_table_of_positions_of_t5_belongs_to_all_layers_of_a_stack():
    model = Model(create_net("t5_nano", 11, PAIRS), PAIRS, dtype="float64")
    with pytest.raises(ValueError, match=r"must be equal to .* \w+coder\.block\.0\..* got other"):
        state_dict(model, names="hugging_face")
    state = model.state()
    tables = {name: np.ones_like(a) for name, a in state.items() if name.endswith("positions")}
    model.load(state | tables)
    arrays = state_dict(model, names="hugging_face")
    assert sum(name.endswith("relative_attention_bias.weight") for name in arrays) == 2
    again = Model(create_net("t5_nano", 11, PAIRS), PAIRS, dtype="float64", seed=7)
    load_state_dict(again, arrays)
    for name, array in model.state().items():
        np.testing.assert_array_equal(again.state()[name], array, err_msg=name)

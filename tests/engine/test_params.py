"""Sampling parameters: every field is checked, and the error names it."""

import math

import pytest

from headlong import ConfigError, RequestError, SamplingParams
from headlong.params import MAX_LOGPROBS

WRONG = {
    "max_tokens": [0, -1, 1.5, "8", None, True, 2**40],
    "temperature": [-0.1, 1e-300, 1e-5, 101, math.nan, math.inf, "1", None, True],
    "top_k": [-1, 2.0, "3", None, True],
    "top_p": [0.0, -0.5, 1.1, math.nan, "1", None, False],
    "min_p": [-0.1, 1.1, math.nan, "0", None, True],
    "seed": [-1, 2**63, 1.0, "7", True],
    "repetition_penalty": [0.0, -1.0, 101.0, math.nan, "1", None],
    "presence_penalty": [-101, 101.0, math.nan, "0", None],
    "frequency_penalty": [-101, 101.0, math.inf, "0", None],
    "logit_bias": [
        [1],
        "x",
        None,
        {"1": 1.0},
        {1: "x"},
        {1: math.nan},
        {1: math.inf},
        {1: 1e39},
        {True: 1.0},
    ],
    "bad_token_ids": [3, "3", None, [1.0], ["a"], [True]],
    "stop": [3, None, [3], [""], "", [b"x"]],
    "stop_token_ids": [3, "3", None, [1.0], [None]],
    "min_tokens": [-1, 1.0, "2", None, True],
    "ignore_eos": [0, 1, "yes", None],
    "logprobs": [-1, MAX_LOGPROBS + 1, 1.0, "1", True],
    "n": [0, 257, 1.0, "1", None, True],
    "priority": [-1_000_001, 1_000_001, 1.0, "1", None, True],
    "draft_tokens": [-1, 65, 1.0, "auto", True],
    "grammar": ["[a-z]+", {"kind": "regex"}, 1, True],
    "verify": ["greedy", "", None, 1, "Coupled"],
    "include_stop": [0, 1, "yes", None],
    "skip_special_tokens": [0, 1, "yes", None],
    "banned_strings": [3, None, [3], [""], "", [b"x"]],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, 1.0, "1", True],
    "pooling": ["max", "", 1, True],
}


class TestParams:
    def test_every_field_is_checked(self):
        assert set(WRONG) == set(SamplingParams.__dataclass_fields__)

    @pytest.mark.parametrize(
        ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
    )
    def test_wrong_values_name_the_field(self, name, value):
        with pytest.raises(RequestError, match=rf"\b{name}\b"):
            SamplingParams(**{name: value})

    def test_min_above_max(self):
        with pytest.raises(RequestError, match=r"min_tokens \(9\) is above max_tokens \(8\)"):
            SamplingParams(min_tokens=9, max_tokens=8)

    def test_unknown_and_positional(self):
        with pytest.raises(TypeError, match="topk"):
            SamplingParams(topk=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError):
            SamplingParams(8)  # type: ignore[misc]

    def test_forms(self):
        params = SamplingParams(stop="x", bad_token_ids=[1, 2], logit_bias={3: 1}, temperature=1)
        assert params.stop == ("x",) and params.bad_token_ids == (1, 2) and params.logit_bias == {3: 1.0}
        assert SamplingParams(logit_bias={3: -math.inf}).logit_bias[3] == -math.inf
        with pytest.raises(AttributeError):
            params.n = 2  # type: ignore[misc]

    def test_recommended(self, llm):
        params = llm.recommended_params(max_tokens=5)
        assert (params.temperature, params.top_p, params.repetition_penalty) == (0.7, 0.9, 1.15)
        assert params.max_tokens == 5 and llm.recommended_params().max_tokens == SamplingParams.max_tokens
        with pytest.raises(ConfigError, match="temperature"):
            llm.recommended_params(temperature=-1)

"""The policy as a function, and as Serve calls it with bounds and delays of its own."""

from typing import Any

import pytest

from headlong.cluster.autoscaling import TokenPolicy, wanted_replicas


@pytest.mark.parametrize(
    ("tokens", "ongoing", "unplaced", "wanted"),
    [
        (0, 0, 0, 0),
        (8000, 8, 0, 2),
        (8000, 8, 4, 3),  # the four that wait for a place are of 1000 tokens too
        (2000, 3, 0, 0.5),
        (0, 0, 5, 0),  # nobody knows how long they are; they are placed in a moment
    ],
)
def test_replicas_follow_tokens(tokens, ongoing, unplaced, wanted):
    assert wanted_replicas(tokens, ongoing, unplaced, target_tokens=4000) == wanted


def test_more_work_never_wants_fewer():
    wants = [wanted_replicas(tokens, 8, 2, 4000) for tokens in range(0, 50_000, 500)]
    assert wants == sorted(wants)


def test_a_target_of_nothing_is_refused():
    with pytest.raises(ValueError, match="target_tokens is 0; it must be positive"):
        TokenPolicy(0)


def decide(reported: dict[str, float], requests: float = 4, queued: float = 0, **settings: Any) -> int:
    """What Serve decides, whose own code finds the policy by its path and applies its config."""
    pytest.importorskip("ray.serve", reason="needs headlong[ray]")
    from ray.serve._private.autoscaling_state import _resolve_policy_callable
    from ray.serve._private.common import DeploymentID
    from ray.serve.autoscaling_policy import _apply_autoscaling_config
    from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

    policy = AutoscalingPolicy(
        policy_function="headlong.cluster.autoscaling:TokenPolicy", policy_kwargs={"target_tokens": 1000}
    )
    config = AutoscalingConfig(
        min_replicas=1, max_replicas=8, policy=policy, upscale_delay_s=0, downscale_delay_s=0, **settings
    )
    context = AutoscalingContext(
        deployment_id=DeploymentID(name="replica", app_name="test"),
        deployment_name="replica",
        app_name="test",
        current_num_replicas=2,
        target_num_replicas=2,
        running_replicas=[],
        total_num_requests=requests,
        total_queued_requests=queued,
        aggregated_metrics={"queued_tokens": reported} if reported else {},
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=config,
    )
    return _apply_autoscaling_config(_resolve_policy_callable(policy))(context)[0]


def test_serve_follows_it():
    assert decide({"a": 2500.0, "b": 2100.0}) == 5, "rounded up"
    assert decide({"a": 2500.0, "b": 2500.0}, requests=10, queued=5) == 10, "Serve bounds it afterwards"
    assert decide({"a": 400.0, "b": 300.0}) == 1
    assert decide({"a": 2500.0, "b": 2100.0}, upscaling_factor=0.3) == 3, "Serve's own factors count"
    assert decide({}) == 2, "silence changes nothing"

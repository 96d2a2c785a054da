from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.workers.generation.engine.tiny_weights import TINY
from workers.generation.engine.config import RopeConfig, RopeType
from workers.generation.engine.rope import inverse_frequencies, rope_table, rotate

HEAD_DIM = 32
PLAIN = [10_000.0 ** (-2 * pair / HEAD_DIM) for pair in range(HEAD_DIM // 2)]


def frequencies(**settings: object) -> list[float]:
    rope = replace(RopeConfig(original_max_position=512), **settings)  # type: ignore[arg-type]
    found: list[float] = inverse_frequencies(rope, HEAD_DIM).tolist()
    return found


def test_table_holds_each_position_whatever_the_longest_is() -> None:
    cos, sin = rope_table(TINY, 40)
    assert cos.shape == sin.shape == (40, 4)
    angles = [7 * 10_000.0 ** (-2 * pair / 8) for pair in range(4)]
    assert cos[7].tolist() == pytest.approx([math.cos(angle) for angle in angles])
    assert sin[7].tolist() == pytest.approx([math.sin(angle) for angle in angles])
    assert torch.equal(rope_table(TINY, 10)[0], cos[:10])


def test_attention_factor_is_in_both_tables() -> None:
    scaled = rope_table(replace(TINY, rope=replace(TINY.rope, attention_factor=1.5)), 8)
    for ours, plain in zip(scaled, rope_table(TINY, 8), strict=True):
        assert torch.equal(ours, plain * 1.5)


@pytest.mark.parametrize("rope_type", [RopeType.DEFAULT, RopeType.DYNAMIC])
def test_default_and_dynamic_leave_the_frequencies(rope_type: RopeType) -> None:
    assert frequencies(rope_type=rope_type, factor=4.0) == pytest.approx(PLAIN)


def test_linear_divides_all_by_the_factor() -> None:
    assert frequencies(rope_type=RopeType.LINEAR, factor=4.0) == pytest.approx([value / 4 for value in PLAIN])


def test_llama3_divides_long_waves_leaves_short_ones_and_blends_between() -> None:
    found = frequencies(rope_type=RopeType.LLAMA3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    for ours, plain in zip(found, PLAIN, strict=True):
        turns = 512 * plain / (2 * math.pi)
        keep = min(1.0, max(0.0, (turns - 1) / 3))
        assert ours == pytest.approx(plain / 8 * (1 - keep) + plain * keep)
    assert found[0] == pytest.approx(PLAIN[0]) and found[-1] == pytest.approx(PLAIN[-1] / 8)
    assert any(plain / 8 < ours < plain for ours, plain in zip(found, PLAIN, strict=True))


def test_yarn_goes_from_plain_to_stretched_over_a_ramp() -> None:
    ratios = [ours / plain for ours, plain in zip(frequencies(rope_type=RopeType.YARN, factor=4.0), PLAIN, strict=True)]
    assert ratios[0] == pytest.approx(1) and ratios[-1] == pytest.approx(0.25)
    low = HEAD_DIM * math.log(512 / (32 * 2 * math.pi)) / (2 * math.log(10_000))  # 32 turns, then one
    high = HEAD_DIM * math.log(512 / (2 * math.pi)) / (2 * math.log(10_000))
    first, last = math.floor(low), math.ceil(high)
    for pair, ratio in enumerate(ratios):
        share = min(1.0, max(0.0, (pair - first) / (last - first)))
        assert ratio == pytest.approx(0.25 * share + 1 - share, rel=1e-5)


def test_divisors_divide_each_frequency() -> None:
    divisors = tuple(1.0 + pair for pair in range(HEAD_DIM // 2))
    expected = [value / divisor for value, divisor in zip(PLAIN, divisors, strict=True)]
    assert frequencies(divisors=divisors) == pytest.approx(expected)


def test_rotation_turns_each_pair_by_its_angle() -> None:
    heads = torch.randn(3, 2, 8)
    cos, sin = (table[[0, 5, 9], None] for table in rope_table(TINY, 10))
    turned = rotate(heads, cos, sin)
    ours = torch.complex(turned[..., :4], turned[..., 4:])
    theirs = torch.complex(heads[..., :4], heads[..., 4:]) * torch.complex(cos, sin)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(turned[0], heads[0])

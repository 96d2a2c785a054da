"""The prompts of the engine bench: as long as said, the same each time, and none begins like another."""

from __future__ import annotations

import pytest

from ops.bench.engine.options import PREFILL, PROFILES, Profile, Workload
from ops.bench.engine.prompts import PromptMaker, num_prompt_tokens, prompt_limit
from tests.workers.generation.fakes import save_tokenizer
from workers.generation.engine.tokenizer import BytePairTokenizer

SOME = [*PROFILES.values(), PREFILL]


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> PromptMaker:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    return PromptMaker.load(BytePairTokenizer.load(folder), folder)


@pytest.mark.parametrize("profile", SOME, ids=lambda profile: profile.name)
def test_prose_is_exactly_as_long_as_the_profile_says(maker: PromptMaker, profile: Profile) -> None:
    assert {len(prompt) for prompt in maker.make(Workload.PLAIN, profile, 0, 40)} == {profile.prompt_tokens}


def test_prose_goes_on_at_the_begin_where_the_text_is_over(maker: PromptMaker) -> None:
    most = len(maker.prose)
    (prompt,) = maker.make(Workload.PLAIN, Profile(name="long", prompt_tokens=2 * most, max_tokens=1), 3, 1)
    assert prompt[:most] == prompt[most:]
    assert sorted(prompt[:most]) == sorted(maker.prose)


def test_prompts_are_the_same_each_time_and_begin_differently(maker: PromptMaker) -> None:
    profile = PROFILES["short"]
    first, again = (maker.make(Workload.PLAIN, profile, 0, 132) for _ in range(2))
    assert first == again
    assert maker.make(Workload.PLAIN, profile, 5, 2) == first[5:7]
    assert len({tuple(prompt[:16]) for prompt in first}) == len(first)
    assert num_prompt_tokens(first) == 132 * profile.prompt_tokens


def test_retrieval_prompts_hold_the_question_and_the_passage_that_answers_it(maker: PromptMaker) -> None:
    question, document = maker.questions[0]
    room = Profile(name="wide", prompt_tokens=4_000, max_tokens=1)
    (prompt,) = maker.make(Workload.RETRIEVAL, room, 0, 1)
    text = maker.tokenizer.decode(prompt)
    assert question in text
    assert document.text in text
    assert len(prompt) <= prompt_limit(room)


def test_questions_that_come_again_come_with_their_passages_in_another_order(maker: PromptMaker) -> None:
    room = Profile(name="wide", prompt_tokens=4_000, max_tokens=1)
    number = len(maker.questions)
    first, again = (maker.make(Workload.RETRIEVAL, room, at, 1)[0] for at in (0, number))
    assert first != again
    assert maker.tokenizer.decode(again).index("More from the help centre") < maker.tokenizer.decode(again).index(
        maker.questions[0][1].text
    )

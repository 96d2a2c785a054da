"""Faults that systems of this kind have had, each with the tests that keep it out, and with those that are yet to come.

The first word of each line names the public report; what follows says what happened there. A line without a test says
why there is nothing to test yet.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent

ENGINE = "workers/generation/engine"
SIMULATION = "streams/simulation/test_claims_simulation.py"

STREAMS = {
    "vllm#48853: a character over two tokens reached readers as U+FFFD": (
        f"{ENGINE}/test_detokenizer.py::test_any_bytes_cut_anywhere_equal_the_full_decode",
        f"{ENGINE}/test_detokenizer.py::test_unfinished_character_is_flushed_as_the_full_decode_shows_it",
        f"{ENGINE}/test_faults.py::test_character_of_several_tokens_is_published_whole",
        f"{ENGINE}/test_faults.py::test_answer_that_is_cut_in_a_character_equals_the_full_decode",
        "streams/test_token_writer_failures.py::test_lone_surrogates_are_refused_and_the_stream_goes_on",
    ),
    "vllm#3574: part of a stop string was published": (
        f"{ENGINE}/test_detokenizer.py::test_stop_string_over_several_pieces_is_never_published_in_part",
        f"{ENGINE}/test_detokenizer.py::test_only_the_longest_open_suffix_is_held_back",
        f"{ENGINE}/test_faults.py::test_only_what_may_still_become_a_stop_string_is_held_back",
        "flow/test_path.py::test_nothing_of_a_stop_string_that_spans_records_is_published",
    ),
    "vllm#7632, sglang#4481: an empty prompt killed the server": (
        "schemas/test_request.py::test_an_empty_prompt_is_refused",
        "schemas/test_request.py::test_exactly_one_of_prompt_and_messages",
        "flow/test_failures.py::test_a_bad_request_ends_with_the_name_of_its_field",
    ),
    "vllm#39734: a prompt that never fits hung all behind it": (
        "flow/test_path.py::test_a_prompt_that_can_never_fit_is_refused_and_the_next_one_answered",
        f"{ENGINE}/test_scheduler.py::"
        "test_request_that_can_never_fit_the_pool_is_refused_and_the_longest_that_fits_is_answered",
        f"{ENGINE}/test_preemption.py::test_a_pool_that_holds_barely_one_answers_everybody_with_the_same_tokens",
        f"{ENGINE}/test_engine_contract.py::test_longest_prompt_that_fits_gets_its_one_token",
        f"{ENGINE}/test_engine_contract.py::test_prompt_at_the_limit_of_the_context",
    ),
    "vllm#1623: a temperature of 1e-4 gave NaN and killed the batch": (
        f"{ENGINE}/test_sampler.py::test_cold_temperatures_give_the_argmax",
        f"{ENGINE}/test_sampler.py::test_tiny_top_p_gives_the_argmax_at_any_temperature",
        f"{ENGINE}/test_core_failures.py::test_fault_in_one_sampling_spares_the_neighbours",
        "schemas/test_request.py::test_tiny_temperatures_and_top_p_are_allowed",
    ),
    "vllm#6521: max_tokens of 0, -1, null or 10^9": (
        "schemas/test_request.py::test_bounds_are_exact_and_the_refusal_names_field_and_range",
        "schemas/test_request.py::test_the_deployment_lowers_max_tokens",
        f"{ENGINE}/test_core.py::test_context_bounds_max_tokens",
    ),
    "vllm#28307: repetition_penalty with empty output killed the engine": (
        f"{ENGINE}/test_faults.py::test_repetition_penalty_with_any_output_leaves_the_engine_alive",
        f"{ENGINE}/test_faults.py::test_repetition_penalty_over_a_cached_prefix_is_that_over_one_that_was_read",
        f"{ENGINE}/test_faults.py::test_repetition_penalty_that_is_no_factor_is_refused",
        f"{ENGINE}/test_sampler.py::test_repetition_penalty_equals_that_of_transformers_over_prompt_and_output",
    ),
    "transformers#29279: text of a user became control tokens": (
        f"{ENGINE}/test_tokenizer.py::test_names_of_control_tokens_in_anybodys_text_are_ordinary_text",
        "workers/generation/test_prompt.py::test_control_tokens_come_from_the_template_alone",
        "workers/generation/strategies/test_play_knowledge.py::test_control_names_in_a_passage_are_quoted_and_stay_text",
    ),
    "sglang#36333, vllm#54947: a cancelled request decoded on": (
        f"{ENGINE}/test_core.py::test_abort_takes_effect_at_once_wherever_the_request_is",
        f"{ENGINE}/test_speculation.py::test_abort_in_the_middle_of_guesses_frees_everything",
        "flow/test_cancel.py::test_a_request_is_cancelled_in_mid_stream_with_the_text_that_is_out",
        "flow/test_cancel.py::test_a_request_that_waits_for_a_router_is_never_admitted",
        "flow/test_cancel.py::test_two_cancels_make_one_end",
        "flow/test_cancel_generation.py::test_a_cancel_between_two_tokens_keeps_what_is_decoded_and_stops_the_engine",
    ),
    "lmdeploy#1788: a few hundred cancels stalled the engine": (
        "flow/test_cancel.py::test_a_thousand_starts_and_cancels_leave_nothing_behind_and_cost_no_speed",
        f"{ENGINE}/test_core.py::test_a_thousand_aborts_leak_no_block",
        f"{ENGINE}/test_core.py::test_a_thousand_starts_and_aborts_in_every_phase_leave_nothing_and_cost_no_speed",
        f"{ENGINE}/test_local.py::test_a_thousand_starts_and_aborts_leave_everything_free",
    ),
    "vllm#10583: a repeated request_id broke the engine": (
        "flow/test_failures.py::test_a_repeat_gets_the_first_ones_stream_and_costs_one_generation",
        "flow/test_copies.py::test_without_the_store_a_repeat_elsewhere_is_pointed_to_the_stream_that_runs",
        "flow/test_copies.py::test_a_copy_is_not_acknowledged_on_the_word_of_a_run_that_wrote_its_end_in_vain",
        "streams/test_client.py::test_a_second_reader_gets_the_same_stream",
    ),
    "litellm#29808: a retry in mid-stream repeated text": (
        f"{SIMULATION}::test_whatever_happens_a_request_ends_once_without_a_gap_and_is_never_lost",
        "flow/test_continuation.py::test_an_answer_cut_at_any_token_goes_on_with_the_same_text",
        "flow/test_continuation_local.py::test_a_sampled_answer_goes_on_with_the_tokens_it_would_have_drawn",
        "chaos/test_chaos_short.py::test_ten_kills_and_every_fault_lose_repeat_and_alter_nothing",
    ),
    "litellm#37992: usage was lost or counted twice": (
        f"{ENGINE}/test_faults.py::test_usage_is_the_tokens_of_the_stream_wherever_it_is_cut",
        f"{ENGINE}/test_faults.py::test_usage_after_a_crash_is_that_of_the_undisturbed_run",
        "flow/test_continuation.py::test_an_answer_whose_text_is_out_but_not_its_end_gets_its_end_alone",
    ),
    "dynamo#7634: a resumed JSON answer was nested or doubled": (
        "flow/test_response_format.py::test_json_that_is_taken_over_goes_on_where_it_was",
    ),
    "vllm#8350: JSON cut at max_tokens was called complete; its white space was endless": (
        "flow/test_response_format.py::test_json_that_is_cut_is_incomplete",
        f"{ENGINE}/test_constraints.py::test_white_space_is_never_endless",
        f"{ENGINE}/test_constraints.py::test_form_that_becomes_too_much_work_is_refused_and_never_ends_as_if_whole",
    ),
    "sglang#22779: the engine was dead and its health said 200": (
        "workers/test_stall.py::test_work_that_waits_without_a_step_is_a_stall_after_the_limit",
        "workers/test_stall.py::test_a_worker_whose_engine_stalls_says_that_it_has_failed",
        "ops/test_healthcheck.py::test_missing_worker_is_told_with_what_there_is",
        "flow/test_failures.py::test_an_engine_that_dies_takes_its_worker_down_and_loses_nothing",
    ),
}

CACHES = {
    "LMCache#4492: keys and values of another layout gave fluent wrong text": (
        f"{ENGINE}/test_kv_cache.py::test_digests_depend_on_everything_before_and_on_whose_they_are",
        f"{ENGINE}/test_core_golden.py::test_every_mix_gives_the_tokens_of_the_naive_loop",
    ),
    "vllm#16016: a tenant could probe the prefix cache of another": (
        f"{ENGINE}/test_scheduler.py::test_a_prefix_is_shared_but_for_the_last_token_and_only_under_its_salt",
    ),
    "vllm#46283: a cancel while keys and values came back leaked blocks": (
        f"{ENGINE}/test_preemption.py::test_host_memory_of_an_aborted_request_is_free_again",
        f"{ENGINE}/test_preemption.py::test_blocks_that_cannot_be_moved_cost_one_request_at_most",
        f"{ENGINE}/test_core.py::test_a_thousand_starts_and_aborts_in_every_phase_leave_nothing_and_cost_no_speed",
        f"{ENGINE}/test_kv_cache.py::test_a_block_is_given_back_once",
    ),
}

KAFKA = {
    "aiokafka#848: work longer than max.poll.interval was repeated without end": (
        "kafka/test_kafka_long_work.py::test_a_delivery_held_for_three_poll_intervals_stays_ours_and_is_committed",
        "streams/test_consumer_pauses.py::test_polling_goes_on_while_everything_is_paused",
    ),
    "aiokafka 0.14: a cancelled getmany switched the poll interval off": (
        "test_faults.py::test_getmany_is_bounded_by_its_own_timeout_alone",
    ),
    "aiokafka#1175, #1176, #1168: several assignors, one that shares state": (
        "kafka/test_kafka_long_work.py::test_a_member_offers_exactly_one_assignor",
        "streams/test_assignor.py::test_the_order_of_partitions_and_workers_does_not_matter",
    ),
    "aiokafka#1101, #1039, #1017: a producer hung or failed for ever": (
        "kafka/test_kafka_restart.py::test_sends_fail_in_time_while_the_broker_is_away_and_work_after",
        "kafka/test_kafka_producer.py::test_a_producer_whose_sender_has_died_is_rebuilt",
        "streams/test_token_writer_failures.py::test_a_send_that_hangs_fails_in_bounded_time",
        "chaos/test_faults_real.py::test_a_worker_ends_in_bounded_time_while_nothing_comes_from_the_broker",
        "ops/test_healthcheck.py::test_unreachable_broker_is_unhealthy_and_torch_is_not_imported",
    ),
    "aiokafka#929: a commit during a rebalance covered unfinished work": (
        "kafka/test_kafka_group_churn.py::test_a_commit_never_passes_unfinished_work_over_rebalances",
        "streams/test_consumer.py::test_commit_stops_at_first_unfinished_offset",
        "test_faults.py::test_nothing_commits_without_naming_its_offsets",
    ),
    "aiokafka#847, #1154: a consumer was alive but stuck after a rejoin": (
        "kafka/test_kafka_stuck.py::test_a_stuck_member_is_replaced",
        "streams/test_watchdog.py::test_only_silence_while_the_broker_is_heard_counts",
    ),
    "faust#318: off by one at a restart": (
        "streams/test_consumer.py::test_a_restarted_worker_neither_repeats_nor_skips",
        "streams/contract_group.py::test_a_group_goes_on_at_the_committed_offset",
    ),
    "faust#502, #323: duplicates after scaling out": (
        "streams/contract_group.py::test_one_to_three_to_one_workers_finish_everything",
        "streams/test_consumer_group.py::test_one_to_three_to_one_members_finish_every_record_once",
        "flow/test_failures.py::test_a_paused_owner_that_wakes_up_is_ignored_by_readers",
        "chaos/test_faults_real.py::test_workers_that_leave_and_join_under_load_repeat_nothing",
    ),
    "faststream: a crash lost what was acknowledged first": (
        f"{SIMULATION}::test_whatever_happens_a_request_ends_once_without_a_gap_and_is_never_lost",
        f"{SIMULATION}::test_without_one_of_the_rules_a_promise_breaks",
        "streams/test_consumer_group.py::test_work_of_a_killed_member_is_redelivered_as_takeover",
    ),
    "zammad-ai#173: a poison message was retried for ever": (
        "flow/test_failures.py::test_undecodable_bytes_are_dead_lettered_end_the_request_and_block_nobody",
        "flow/test_retry_generation.py::"
        "test_a_request_that_fails_every_time_is_put_aside_and_ends_with_the_text_that_is_out",
        "workers/test_failure_policy.py::test_each_error_takes_its_course",
        "streams/test_consumer.py::test_a_poison_record_does_not_block",
    ),
    "parallel-consumer#826: the highest offset seen was committed": (
        "streams/test_offsets.py::test_commit_never_passes_an_unfinished_offset_and_skips_none",
    ),
    "parallel-consumer#909: a redelivered record was swallowed": (
        "streams/test_consumer_group.py::test_a_partition_that_was_away_for_a_generation_starts_anew",
        "flow/test_copies.py::test_a_partition_that_was_lost_and_comes_back_to_the_same_worker_is_worked_on",
    ),
    "parallel-consumer#777: a record ran twice after a revoke": (
        "streams/test_consumer_group.py::test_work_goes_on_over_a_rebalance_that_keeps_the_partition",
    ),
    "spring-kafka#4687: a pause was lost or stuck over a rebalance": (
        "streams/test_consumer_pauses.py::test_pause_is_applied_again_after_a_rebalance",
        "streams/test_consumer_pauses.py::test_in_flight_is_bounded_by_pausing_and_lifted_at_half",
    ),
    "tabbyAPI#428, faust#134: more workers than partitions hung": (
        "streams/test_consumer_group.py::test_more_members_than_partitions_idle_and_take_over",
        "kafka/test_kafka_group_churn.py::test_five_workers_on_two_partitions_idle_and_take_over",
    ),
}

OPERATIONS = {
    "mini-sglang: a request was dropped and its caller waited for ever": (
        "flow/test_path.py::test_a_prompt_that_can_never_fit_is_refused_and_the_next_one_answered",
        "flow/test_poison.py::test_a_request_that_outgrows_a_record_between_the_pools_ends",
        f"{SIMULATION}::test_whatever_happens_a_request_ends_once_without_a_gap_and_is_never_lost",
    ),
    "taskiq: an undecodable message stayed unacknowledged": (
        "flow/test_failures.py::test_undecodable_bytes_are_dead_lettered_end_the_request_and_block_nobody",
        "flow/test_failures.py::test_rubbish_between_the_pools_is_dead_lettered_and_blocks_nobody",
        "flow/test_fuzz.py::test_a_thousand_fuzzed_records_are_each_accounted_for_and_do_no_harm",
    ),
}

NOT_YET = {
    "flagger#712, argo-rollouts#3539: no percentage canary for queue workers": "rollouts do not exist yet",
    "NeMo Guardrails: readers saw tokens before the safety check": "the safety verdict does not exist yet",
}

TESTS = [
    pytest.param(test, id=f"{fault.partition(':')[0]}: {test.rpartition('::')[2]}")
    for table in (STREAMS, CACHES, KAFKA, OPERATIONS)
    for fault, tests in table.items()
    for test in tests
]


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names of the tests that a file holds."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


@pytest.mark.parametrize("test", TESTS)
def test_each_fault_is_kept_out_by_a_test_that_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in names_in(ROOT / file)


def test_no_fault_is_without_a_test_or_a_reason() -> None:
    assert all(tests for table in (STREAMS, CACHES, KAFKA, OPERATIONS) for tests in table.values())
    assert all(NOT_YET.values())


def calls_with_parents(path: Path) -> Iterator[tuple[ast.Call, list[ast.AST]]]:
    """Yield every call of a file with all that it stands in, innermost last."""

    def walk(node: ast.AST, parents: list[ast.AST]) -> Iterator[tuple[ast.Call, list[ast.AST]]]:
        if isinstance(node, ast.Call):
            yield node, parents
        for child in ast.iter_child_nodes(node):
            yield from walk(child, [*parents, node])

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), [])


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def client_calls(name: str) -> list[tuple[ast.Call, list[ast.AST]]]:
    """Return the calls of a method in the files that speak to Kafka."""
    files = sorted((ROOT.parent / "streams").glob("kafka*.py"))
    return [found for file in files for found in calls_with_parents(file) if name_of(found[0]) == name]


def test_getmany_is_bounded_by_its_own_timeout_alone() -> None:
    calls = client_calls("getmany")
    assert calls, "nothing reads from Kafka"
    for call, parents in calls:
        assert "timeout_ms" in {keyword.arg for keyword in call.keywords}
        around = [each for parent in parents for each in _bounds(parent)]
        assert not around, f"line {call.lineno}: a cancelled getmany never counts its end"


def _bounds(node: ast.AST) -> list[str]:
    if isinstance(node, ast.AsyncWith | ast.With):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        return [name for call in calls if (name := name_of(call)) in ("timeout", "timeout_at")]
    return ["wait_for"] if isinstance(node, ast.Call) and name_of(node) == "wait_for" else []


def test_nothing_commits_without_naming_its_offsets() -> None:
    assert [call.lineno for call, _ in client_calls("commit") if not call.args] == []

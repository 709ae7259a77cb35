"""The engine on a model without weights: who runs when, and that nobody notices the others."""

from __future__ import annotations

import random

import pytest
import torch
from structlog.testing import capture_logs

from dsv4.config import EngineConfig
from dsv4.engine.engine import Engine
from dsv4.engine.request import FinishReason, Request
from dsv4.errors import BatchError, ConfigError, PoolExhaustedError, RequestError
from dsv4.tokenizer import ByteTokenizer
from tests.engine.fake_model import FakeModel, greedy, hashed_logits, scripted_logits


def prompts_of(*lengths: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(256) for _ in range(n)] for n in lengths]


def engine_of(chunk_tokens: int | None = None, max_queue: int = 64, **model: object) -> Engine:
    runner = FakeModel(**model)  # type: ignore[arg-type]
    config = EngineConfig(
        backend=runner.backend.config, chunk_tokens=chunk_tokens, max_queue=max_queue
    )
    return Engine(runner, config)  # type: ignore[arg-type]


def free(engine: Engine) -> tuple[int, int]:
    return engine.pool.num_free_slots, engine.pool.num_free_pages


def run(engine: Engine, *handles: object) -> None:
    while engine.num_running or engine.num_waiting:
        engine.step()


def test_a_ragged_batch_gives_what_each_prompt_gives_alone() -> None:
    engine, prompts = engine_of(), prompts_of(1, 7, 50, 3, 100, 16, 2)
    start = free(engine)
    done = list(engine.generate(prompts, max_new_tokens=9, ignore_eos=True))
    assert [c.prompt_token_ids for c in done] == [tuple(p) for p in prompts]
    assert [list(c.token_ids) for c in done] == [greedy(p, 9) for p in prompts]
    assert {c.finish_reason for c in done} == {FinishReason.LENGTH}
    assert free(engine) == start


def test_requests_join_and_leave_at_any_step() -> None:
    engine, draw = engine_of(max_requests=3), random.Random(11)
    start, handles = free(engine), []
    prompts = prompts_of(*(draw.randrange(1, 60) for _ in range(20)))
    for prompt in prompts:
        request = Request(
            prompt_token_ids=prompt, max_new_tokens=draw.randrange(1, 12), ignore_eos=True
        )
        handles.append(engine.submit(request))
        for _ in range(draw.randrange(4)):
            engine.step()
    run(engine)
    for prompt, handle in zip(prompts, handles, strict=True):
        expected = greedy(prompt, handle.request.max_new_tokens)
        assert list(handle.completion.token_ids) == expected
    assert free(engine) == start


@pytest.mark.parametrize("chunk_tokens", [1, 5, 16, 63, None])
def test_a_prompt_in_chunks_gives_what_one_shot_gives(chunk_tokens: int | None) -> None:
    engine = engine_of(chunk_tokens)
    (prompt,) = prompts_of(150)
    (completion,) = engine.generate([prompt], max_new_tokens=5, ignore_eos=True)
    assert list(completion.token_ids) == greedy(prompt, 5)
    widest = max(max(batch.query_lengths) for batch in engine.model.batches)
    assert widest == (chunk_tokens or 64)


def test_decoding_requests_advance_in_every_step_of_a_long_prefill() -> None:
    engine = engine_of(max_batch_tokens=8)
    short, long = prompts_of(3, 60)
    first = engine.submit(Request(prompt_token_ids=short, max_new_tokens=50, ignore_eos=True))
    engine.step()
    second = engine.submit(Request(prompt_token_ids=long, max_new_tokens=2, ignore_eos=True))
    for num_tokens in range(2, 10):
        engine.step()
        assert len(first.token_ids) == num_tokens
        assert engine.model.batches[-1].query_lengths[:2] in {(1, 7), (1, 4)}
    assert len(second.token_ids) == 0
    engine.step()
    assert len(second.token_ids) == 1


def test_more_requests_than_batch_tokens_all_come_to_an_end() -> None:
    engine, prompts = engine_of(max_requests=8, max_batch_tokens=3), prompts_of(*range(1, 9))
    done = engine.generate(prompts, max_new_tokens=4, ignore_eos=True)
    assert [list(c.token_ids) for c in done] == [greedy(p, 4) for p in prompts]


def test_a_sampled_request_does_not_depend_on_its_batch_mates() -> None:
    prompts, options = prompts_of(4, 30, 9), {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    together = list(engine_of().generate(prompts, max_new_tokens=8, ignore_eos=True, **options))
    for prompt, completion in zip(prompts, together, strict=True):
        (alone,) = engine_of(7).generate([prompt], max_new_tokens=8, ignore_eos=True, **options)
        assert alone.token_ids == completion.token_ids


def test_seeds_make_samples_repeat_and_differ() -> None:
    (prompt,) = prompts_of(5)
    options = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    a, b, c = engine_of().generate([prompt] * 3, seed=[1, 2, 1], **options)
    assert a.token_ids == c.token_ids != b.token_ids
    free_a, free_b = engine_of().generate([prompt] * 2, **options)
    assert free_a.token_ids != free_b.token_ids


def test_logprobs_are_those_of_the_models_distribution() -> None:
    (prompt,) = prompts_of(6)
    (completion,) = engine_of().generate(
        [prompt], max_new_tokens=3, logprobs=2, temperature=0.5, seed=3, ignore_eos=True
    )
    history = list(prompt)
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        logits = hashed_logits(history).double()
        expected = logits - logits.exp().sum().log()
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-9)
        best = sorted(range(len(expected)), key=lambda i: -float(expected[i]))[:2]
        assert [i for i, _ in entry.top] == best
        assert [p for _, p in entry.top] == pytest.approx([float(expected[i]) for i in best])
        history.append(token_id)


def test_generation_ends_with_eos_unless_it_is_ignored() -> None:
    model = {"logits": scripted_logits("ab"), "tokenizer": ByteTokenizer()}
    (completion,) = engine_of(**model).generate("a", max_new_tokens=9)
    assert (completion.text, completion.finish_reason) == ("b", "eos")
    assert completion.token_ids == (ord("b"), 257)
    (completion,) = engine_of(**model).generate([[97]], max_new_tokens=3, ignore_eos=True)
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 3)


def test_a_stop_token_ends_generation() -> None:
    engine = engine_of(logits=scripted_logits("abcdef"))
    (completion,) = engine.generate([[97]], stop_token_ids=[ord("d")], max_new_tokens=9)
    assert completion.finish_reason == "stop"
    assert completion.token_ids == tuple(b"bcd")


def test_a_stop_string_across_tokens_is_cut_and_never_streamed() -> None:
    engine = engine_of(logits=scripted_logits("say: 12 ENX END more"), tokenizer=ByteTokenizer())
    deltas = [d for _, d in engine.stream("say:", stop=["END", "zzz"], max_new_tokens=40)]
    assert deltas[-1].completion.text == " 12 ENX "
    assert deltas[-1].completion.finish_reason == "stop"
    assert "".join(d.text for d in deltas) == " 12 ENX "
    # "E" and "EN" wait for the next character, which here is no part of a stop string.
    assert "ENX" in [d.text for d in deltas]
    assert sum((d.token_ids for d in deltas), ()) == tuple(b" 12 ENX END")


def test_streamed_text_has_whole_characters_only() -> None:
    text = "naïve €uro 𝄞 clef"
    engine = engine_of(logits=scripted_logits("> " + text), tokenizer=ByteTokenizer())
    deltas = [d.text for _, d in engine.stream("> ", max_new_tokens=60)]
    assert "".join(deltas) == text
    assert not any("\ufffd" in piece for piece in deltas)


def test_a_cancelled_request_frees_its_memory_at_once_and_disturbs_nobody() -> None:
    engine, (a, b) = engine_of(), prompts_of(20, 30)
    start = free(engine)
    first = engine.submit(Request(prompt_token_ids=a, max_new_tokens=20, ignore_eos=True))
    engine.step()
    with_one = free(engine)
    second = engine.submit(Request(prompt_token_ids=b, max_new_tokens=20, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.cancel(second)
    assert free(engine) == with_one
    assert second.completion.finish_reason == "cancelled"
    assert list(second.completion.token_ids) == greedy(b, 4)
    engine.cancel(second)
    run(engine)
    assert list(first.completion.token_ids) == greedy(a, 20)
    assert free(engine) == start


def test_the_streamed_text_of_a_cancelled_request_is_its_completions() -> None:
    """Also what was held back as a possible beginning of a stop string, or as half a character."""
    logits = scripted_logits("key: value\u20ac")
    engine = engine_of(logits=logits, tokenizer=ByteTokenizer())
    for num_steps in range(1, 10):
        request = Request(prompt_token_ids=tuple(b"key"), stop=(": values",), max_new_tokens=20)
        handle = engine.submit(request)
        for _ in range(num_steps):
            engine.step()
        text = handle.read().text
        engine.cancel(handle)
        assert handle.completion is not None
        text += handle.read().text
        assert text == handle.completion.text
        assert text == b"key: value\xe2\x82"[3 : 3 + num_steps].decode(errors="replace")


def test_a_waiting_request_can_be_cancelled() -> None:
    engine, (a, b) = engine_of(max_requests=1), prompts_of(5, 6)
    first = engine.submit(Request(prompt_token_ids=a, max_new_tokens=3, ignore_eos=True))
    second = engine.submit(Request(prompt_token_ids=b, max_new_tokens=3, ignore_eos=True))
    engine.cancel(second)
    assert (engine.num_waiting, second.completion.token_ids) == (0, ())
    run(engine)
    assert list(first.completion.token_ids) == greedy(a, 3)


def test_a_handle_of_another_engine_is_refused() -> None:
    (prompt,) = prompts_of(5)
    handle = engine_of().submit(Request(prompt_token_ids=prompt))
    with pytest.raises(RequestError, match="not a live request"):
        engine_of().cancel(handle)


def test_abandoned_iterators_give_everything_back() -> None:
    engine, prompts = engine_of(max_requests=2), prompts_of(9, 9, 9, 9)
    start = free(engine)
    stream = engine.stream(prompts, max_new_tokens=50, ignore_eos=True)
    next(stream)
    stream.close()
    assert (free(engine), engine.num_waiting) == (start, 0)
    completions = engine.generate(prompts, max_new_tokens=3, ignore_eos=True)
    next(completions)
    completions.close()
    assert (free(engine), engine.num_running, engine.num_waiting) == (start, 0, 0)


def test_two_interleaved_iterators_both_see_all_of_their_tokens() -> None:
    engine, (a, b) = engine_of(), prompts_of(8, 5)
    left = engine.stream([a], max_new_tokens=6, ignore_eos=True)
    right = engine.stream([b], max_new_tokens=9, ignore_eos=True)
    seen: tuple[list[int], list[int]] = ([], [])
    for turn in range(40):
        for _, delta in [next((left, right)[turn % 2], (0, None))]:
            seen[turn % 2].extend(delta.token_ids if delta else ())
    assert seen == (greedy(a, 6), greedy(b, 9))


def test_a_request_that_does_not_fit_now_waits_for_its_turn() -> None:
    # 4 pages of 16 tokens: 40 + 8 tokens take 3 of them.
    engine, prompts = engine_of(num_pages=4), prompts_of(40, 40, 4)
    start = free(engine)
    handles = [
        engine.submit(Request(prompt_token_ids=p, max_new_tokens=8, ignore_eos=True))
        for p in prompts
    ]
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 2)
    assert engine.pool.num_free_slots == 3
    run(engine)
    assert [list(h.completion.token_ids) for h in handles] == [greedy(p, 8) for p in prompts]
    assert free(engine) == start


@pytest.mark.parametrize(
    ("length", "model", "reason"),
    [
        (250, {}, "max_context is 256"),
        (100, {"num_pages": 4}, "need 7 pages, the pool has 4"),
        (0, {}, "prompt is empty"),
    ],
)
def test_a_request_that_can_never_fit_is_rejected_alone(
    length: int, model: dict[str, int], reason: str
) -> None:
    engine, prompts = engine_of(**model), prompts_of(9, length, 12)
    start = free(engine)
    first, bad, last = engine.generate(prompts, max_new_tokens=8, ignore_eos=True)
    assert (bad.finish_reason, bad.token_ids) == ("rejected", ())
    assert isinstance(bad.error, RequestError)
    assert reason in str(bad.error)
    assert list(first.token_ids) == greedy(prompts[0], 8)
    assert list(last.token_ids) == greedy(prompts[2], 8)
    assert free(engine) == start


def test_a_prompt_outside_the_vocabulary_or_without_tokenizer_is_rejected() -> None:
    engine = engine_of()
    outside, negative, floats, text = engine.generate([[1, 258], [-1], [1.5], "text"])
    assert "258 is not in [0, 258)" in str(outside.error)
    assert "-1 is not in" in str(negative.error)
    assert "must be integers" in str(floats.error)
    assert "no tokenizer" in str(text.error)
    (broken,) = engine_of(tokenizer=ByteTokenizer()).generate("a\ud800")
    assert "surrogate" in str(broken.error)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": -1},
        {"seed": [1, 2]},
        {"stop": [""]},
        {"logprobs": -1},
        {"max_new_tokens": 1.5},
        {"max_new_tokens": None},
        {"temperature": "1"},
        {"temperature": 10**400},
        {"top_p": None},
        {"seed": 1.5},
        {"seed": [[1]]},
        {"stop": [1]},
        {"stop": None},
        {"logprobs": 1.5},
    ],
    ids=str,
)
def test_bad_options_raise_before_anything_runs(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(RequestError, match=name):
        engine_of().generate([[1]], **options)


def test_an_engine_config_of_another_backend_is_refused() -> None:
    model, other = FakeModel(), FakeModel(max_batch_tokens=32)
    Engine(model, EngineConfig(backend=model.backend.config, chunk_tokens=8))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="differs from the one the model runs on"):
        Engine(model, EngineConfig(backend=other.backend.config))  # type: ignore[arg-type]


def test_every_bad_option_is_named_at_once() -> None:
    with pytest.raises(RequestError, match=r"max_new_tokens.*temperature.*top_p"):
        Request(prompt_token_ids=(1,), max_new_tokens=0, temperature=-1, top_p=2)


def test_one_flat_list_of_ids_is_refused() -> None:
    with pytest.raises(RequestError, match="wrap the token ids"):
        engine_of().generate([1, 2, 3])


@pytest.mark.parametrize("prompts", [None, 5])
def test_prompts_that_are_no_list_are_refused(prompts: object) -> None:
    with pytest.raises(RequestError, match=f"prompts {prompts}: must be a list"):
        engine_of().generate(prompts)  # type: ignore[arg-type]


def test_a_whole_temperature_of_any_size_samples() -> None:
    """Also an integer that torch's scalars cannot hold."""
    (completion,) = engine_of().generate([[1]], temperature=2**70, seed=1, max_new_tokens=2)
    assert len(completion.token_ids) == 2


def test_no_prompts_give_no_completions() -> None:
    assert list(engine_of().generate([])) == []


def test_a_full_queue_refuses_and_generate_waits_for_room() -> None:
    engine, prompts = engine_of(max_requests=1, max_queue=1), prompts_of(5, 5, 5, 5, 5)
    requests = [Request(prompt_token_ids=p, max_new_tokens=3, ignore_eos=True) for p in prompts]
    engine.submit(requests[0])
    engine.submit(requests[1])
    with pytest.raises(RequestError, match="max_queue is 1"):
        engine.submit(requests[2])
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    done = engine.generate(prompts, max_new_tokens=3, ignore_eos=True)
    assert [list(c.token_ids) for c in done] == [greedy(p, 3) for p in prompts]


@pytest.mark.parametrize("max_queue", [0, 3])
def test_memory_held_outside_the_engine_ends_in_an_error_not_in_a_hang(max_queue: int) -> None:
    engine, (prompt,) = engine_of(max_requests=1, max_queue=max_queue), prompts_of(5)
    slot = engine.pool.acquire()
    completions = list(engine.generate([prompt, prompt], max_new_tokens=3))
    assert {c.finish_reason for c in completions} == {"rejected"}
    assert "release the slots held outside" in str(completions[0].error)
    engine.pool.release(slot)
    (completion,) = engine.generate([prompt], max_new_tokens=3, ignore_eos=True)
    assert list(completion.token_ids) == greedy(prompt, 3)


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()])
def test_a_failing_forward_ends_its_requests_and_leaks_nothing(error: BaseException) -> None:
    engine, (a, b, c) = engine_of(max_requests=2), prompts_of(5, 6, 7)
    start = free(engine)
    options = {"max_new_tokens": 4, "ignore_eos": True}
    handles = [engine.submit(Request(prompt_token_ids=p, **options)) for p in (a, b, c)]
    engine.step()
    engine.model.fail_next = error
    with pytest.raises(type(error)):
        engine.step()
    assert [h.finished for h in handles] == [True, True, False]
    assert handles[0].completion.error is error
    assert free(engine) == start
    run(engine)
    assert list(handles[2].completion.token_ids) == greedy(c, 4)
    assert free(engine) == start


def test_a_failing_forward_leaves_no_request_of_generate_behind() -> None:
    engine, prompts = engine_of(max_requests=1), prompts_of(5, 6, 7)
    start = free(engine)
    engine.model.fail_next = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        list(engine.generate(prompts))
    assert (free(engine), engine.num_waiting) == (start, 0)


def test_explicit_slots_prefill_and_decode_in_any_order() -> None:
    engine, (a, b) = engine_of(chunk_tokens=16), prompts_of(50, 3)
    slot_a, slot_b = engine.pool.acquire(), engine.pool.acquire()
    logits_TV = engine.prefill(slot_a, a, rows="all")
    assert torch.equal(logits_TV, torch.stack([hashed_logits(a[: n + 1]) for n in range(50)]))
    assert torch.equal(engine.prefill(slot_b, b), hashed_logits(b)[None])
    logits_BV = engine.decode([slot_b, slot_a], [8, 9])
    assert torch.equal(logits_BV, torch.stack([hashed_logits([*b, 8]), hashed_logits([*a, 9])]))
    assert (engine.pool.length(slot_a), engine.pool.length(slot_b)) == (51, 4)


def test_explicit_slots_refuse_what_makes_no_forward() -> None:
    engine = engine_of(num_pages=2)
    slot = engine.pool.acquire()
    with pytest.raises(BatchError, match="no tokens"):
        engine.prefill(slot, [])
    with pytest.raises(BatchError, match="one token per slot"):
        engine.decode([slot], [1, 2])
    with pytest.raises(PoolExhaustedError):
        engine.prefill(slot, list(range(40)))
    assert (engine.pool.length(slot), engine.model.batches) == (0, [])


def test_a_run_logs_one_line_and_a_step_at_most_one() -> None:
    engine, prompts = engine_of(), prompts_of(5, 6)
    with capture_logs() as events:
        list(engine.generate(prompts, max_new_tokens=4, ignore_eos=True))
    runs = [e for e in events if e["log_level"] == "info"]
    assert [(e["event"], e["prompts"], e["new_tokens"]) for e in runs] == [("generated", 2, 8)]
    assert len(events) - len(runs) == engine.num_forwards == 4

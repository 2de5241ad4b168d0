"""The bridge to lm-eval: its scores, our batches, data from a mirror, the same samples for every model."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surgery.calibration.data import load_tokenizer
from surgery.core.distributed import DistContext
from surgery.core.errors import SurgeryError
from surgery.core.progress import Progress
from surgery.eval import offline_data as mirror
from surgery.eval import run as running
from surgery.eval.lm_eval.adapter import harness_model
from surgery.eval.lm_eval.bridge import run_own_tasks
from surgery.eval.lm_eval.tasks import OwnTask
from surgery.eval.long_context import SCORE, default_lengths, prompt_token_counter, retrieval
from surgery.eval.long_context.retrieval import TASKS as CLOZES
from surgery.eval.long_context.retrieval import parse_field, parse_question, parse_sentence
from surgery.eval.run import evaluate, load
from surgery.eval.suite import EvalModel, EvalOptions, find_suite

ROOT = Path(__file__).resolve().parents[2]
TINY, MIRROR = ROOT / "recipes" / "tiny" / "checkpoint", ROOT / "eval" / "mirror"
QUICK = {"max_gen_toks": 4}


@pytest.fixture(scope="module")
def eval_model() -> EvalModel:
    model, tokenizer = load(str(TINY), torch.device("cpu"), "float32", False)
    return EvalModel(
        "base", "tiny", TINY, "", model, tokenizer, torch.device("cpu"), torch.float32, 1024, DistContext(), Progress()
    )


def options(**given) -> EvalOptions:
    return EvalOptions(data_root=MIRROR, **given)


def requests(kind: str, *arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, args, i, metadata=("some task", i, 1)) for i, args in enumerate(arguments)]


# -- its scores --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def both(eval_model):
    """(ours, lm-eval's own)."""
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=eval_model.model, tokenizer=load_tokenizer(TINY), max_length=128, batch_size=2)
    return harness_model(eval_model, EvalOptions(batch_size=3), 128), theirs


def test_likelihoods_are_lm_eval_s(both):
    pairs = [
        ("Story: Mia found a", " lantern"),
        ("Story: Mia found a", " boat"),
        ("Story: Mia found a", " small red lantern in the garden."),
        ("", "Story: Tom went home."),
        ("Story: " + "Tom went to the lake. " * 40, " He was glad."),  # longer than 128 tokens: cut from the left
        ("Q: A or B? ", "A"),
    ]
    ours, theirs = (lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True) for lm in both)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], rel=1e-4)


def test_rolling_likelihoods_are_lm_eval_s(both):
    texts = [("Story: Mia found a lamp. " * 40,), ("Story: Tom went home.",)]  # the first one is of several windows
    ours, theirs = (lm.loglikelihood_rolling(requests("loglikelihood_rolling", *texts), True) for lm in both)
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_answers_are_lm_eval_s(both):
    settings = ({"until": ["."], "max_gen_toks": 12}, {"until": [], "max_gen_toks": 5, "do_sample": False})
    asked = [(text, kind) for text in ("Story: Mia", "Story: Tom and Ben went", "List:") for kind in settings]
    ours, theirs = (lm.generate_until(requests("generate_until", *asked), True) for lm in both)
    assert ours == theirs and len(set(ours)) > 3 and not any("." in answer for answer in ours[::2])


def test_the_tokenizer_is_left_as_it_is(eval_model):
    before = eval_model.tokenizer.pad_token
    harness_model(eval_model, EvalOptions()).tokenizer.pad_token = "x"
    assert eval_model.tokenizer.pad_token == before


def test_batches_do_not_change_answers(eval_model):
    found = [find_suite("zeroshot").run(eval_model, options(batch_size=size, tasks=("piqa",))) for size in (1, 4)]
    assert [s.id for s in found[0].samples] == [s.id for s in found[1].samples]
    for a, b in zip(found[0].samples, found[1].samples):
        assert a.metrics == b.metrics


def test_out_of_memory_goes_on_with_less(eval_model, monkeypatch):
    sizes = []

    def forward(*given, input_ids, **more):
        sizes.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(*given, input_ids=input_ids, **more)

    real = eval_model.model.forward
    whole = find_suite("zeroshot").run(eval_model, options(tasks=("arc_easy",), batch_size=8))
    monkeypatch.setattr(eval_model.model, "forward", forward)
    halved = find_suite("zeroshot").run(eval_model, options(tasks=("arc_easy",), batch_size=8))
    assert max(sizes) == 8 and sizes.count(8) == 1
    assert [s.metrics for s in halved.samples] == [s.metrics for s in whole.samples]


def test_answers_are_kept(eval_model, tmp_path, monkeypatch):
    """Asked again with the same folder nothing is computed, and a line that was being written does not matter; another
    number of examples is another question. The suite's results do not depend on it."""
    calls = []
    real = eval_model.model.forward
    monkeypatch.setattr(eval_model.model, "forward", lambda *a, **k: calls.append(1) or real(*a, **k))
    asked = options(tasks=("piqa", "lambada_openai"), use_cache=tmp_path / "kept")
    first = find_suite("zeroshot").run(eval_model, asked)
    story = options(tasks=("niah_story",), lengths=(128,), limit=1, depths=(0.0, 1.0), use_cache=tmp_path / "kept")
    needles = find_suite("niah").run(eval_model, story)
    (path,) = (tmp_path / "kept").iterdir()
    path.write_text(path.read_text() + '\n{"key": "half a l')
    calls.clear()
    assert find_suite("zeroshot").run(eval_model, asked).samples == first.samples
    assert find_suite("niah").run(eval_model, story).samples == needles.samples
    assert not calls
    assert options(use_cache=tmp_path).digest() == options().digest()
    find_suite("zeroshot").run(eval_model, asked.model_copy(update={"num_fewshot": 1}))
    assert calls
    with pytest.raises(SurgeryError, match=r"--use-cache .* is a file"):
        find_suite("zeroshot").run(eval_model, asked.model_copy(update={"use_cache": path}))


def test_documents_by_number(eval_model):
    asked = options(tasks=("piqa", "arc_easy"), samples={"piqa": (3, 1)}, limit=2)
    found = find_suite("zeroshot").run(eval_model, asked)
    assert [s.shown["doc_id"] for s in found.samples] == [1, 3, 0, 1]
    with pytest.raises(SurgeryError, match="piqa has documents 0 to 3, not 9"):
        find_suite("zeroshot").run(eval_model, options(tasks=("piqa",), samples={"piqa": (9,)}))


def test_3_prompts_that_lose_their_beginning_are_told(eval_model):
    """Few-shot examples that do not fit are cut from the left: the score is of another prompt than was asked."""
    short = replace(eval_model, longest=24)
    asked = options(tasks=("piqa",), num_fewshot=1, limit=2)
    (note,) = find_suite("zeroshot").run(short, asked).notes
    assert note == "prompts longer than the model's input, scored without their beginning: 4 of piqa"
    assert not find_suite("zeroshot").run(eval_model, asked).notes
    asked = options(tasks=("niah_story",), lengths=(512,), depths=(0.5,), limit=1)
    assert find_suite("niah").run(replace(eval_model, longest=256), asked).notes == [
        "tiny has a context length of 256 tokens: longer inputs are beyond its training"
    ]


def test_3_texts_that_are_shorter_than_the_length_they_stand_for_are_told(eval_model):
    found = find_suite("retrieval").run(eval_model, options(tasks=("nq",), lengths=(4096,), limit=1, gen_kwargs=QUICK))
    assert "nq at 4,096 tokens: the data set truncates its texts to 2,048" in found.notes


@pytest.mark.parametrize(
    ("suites", "given", "said"),
    [
        (["zeroshot"], {"tasks": ("piqa",), "samples": {"piqaa": (0,)}}, "--samples: no task 'piqaa' is measured; did you mean 'piqa'"),
        (["zeroshot"], {"tasks": ("piqaa",)}, "neither a suite nor a task of lm-eval: 'piqaa'; did you mean 'piqa'"),
        (["piqa"], {"tasks": ("piqaa",)}, "did you mean 'piqa'"),
        (["lm-eval"], {}, "needs names of lm-eval tasks"),
        (["ppl", "needle"], {"tasks": ("needel",)}, "--suite needle has no task 'needel'; did you mean 'needle'"),
        (["longbench2"], {"tasks": ("grap",)}, "did you mean 'graph'"),
        (["ppl"], {"tasks": ("piqa",)}, "--tasks piqa: ppl has no tasks to choose from"),
        (["mqar", "speed"], {"samples": {"mqar": (0,)}}, "--samples mqar: mqar, speed has no tasks"),
        (["longbench"], {"samples": {"qasper": (0,)}}, "did you mean 'longbench_qasper'"),
    ],
)  # fmt: skip
def test_mistyped_tasks_are_refused_before_a_model_is_loaded(monkeypatch, suites, given, said):
    monkeypatch.setattr(running, "open_model", lambda *arguments: pytest.fail("a model is opened"))
    with pytest.raises(SurgeryError, match=said):
        evaluate(str(TINY), suites, options(**given))


# -- every suite, offline ----------------------------------------------------------------------------
def test_zeroshot(eval_model):
    """The log-linear paper's seven; wikitext's perplexity by words, chance where there are choices."""
    found = find_suite("zeroshot").run(eval_model, options())
    assert {s.task for s in found.samples} == {
        "wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge"
    }  # fmt: skip
    assert found.floors["piqa"] == {"acc": 0.5, "acc_norm": 0.5} and found.floors["hellaswag"]["acc"] == 0.25
    assert found.metrics["word_perplexity"].kind == found.metrics["perplexity"].kind == "ppl"
    assert found.metrics["acc"].kind == "accuracy" and not found.notes
    told = found.info["results"]["wikitext"]["word_perplexity,none"]
    words = [s for s in found.samples if s.task == "wikitext"]
    mean = sum(s.metrics["word_perplexity"] * s.weight for s in words) / sum(s.weight for s in words)
    assert told == pytest.approx(float(torch.tensor(mean, dtype=torch.float64).exp()), rel=1e-6)
    accuracy = [s.metrics["acc"] for s in found.samples if s.task == "piqa"]
    assert found.info["results"]["piqa"]["acc,none"] == pytest.approx(sum(accuracy) / len(accuracy))
    assert found.info["results"]["piqa"]["acc_stderr,none"] > 0
    assert found.info["results"]["lambada_openai"]["perplexity_stderr,none"] > 0  # lm-eval's own bootstrap
    assert "DISABLE_MULTIPROC" not in os.environ
    assert {"results", "configs", "versions", "n-shot", "higher_is_better", "n-samples", "config"} <= set(found.info)
    json.dumps(found.info)


def test_ruler(eval_model):
    asked = options(
        lengths=(512, 768), limit=1, gen_kwargs=QUICK, tasks=("niah_single_1", "niah_multivalue", "vt", "qa_1")
    )
    found = find_suite("ruler").run(eval_model, asked)
    assert {(s.task, s.group["length"]) for s in found.samples} == {(t, n) for t in asked.tasks for n in (512, 768)}
    assert len(found.samples) == 8  # the limit is of each length
    assert found.metrics["score"].scale == 100 and found.metrics["score"].top == 1
    assert all(len(s.shown["prompt"]) < 4100 for s in found.samples)


def test_longbench_all(eval_model):
    found = find_suite("longbench").run(eval_model, options(tasks=("all",), gen_kwargs=QUICK, limit=1))
    assert len({s.task for s in found.samples}) == 21 and found.metrics["score"].scale == 100
    assert all(0 <= s.metrics["score"] <= 1 for s in found.samples)


def test_longbench_is_cut_to_lengths(eval_model):
    found = find_suite("longbench").run(
        eval_model, options(tasks=("narrativeqa",), lengths=(256, 512), gen_kwargs=QUICK)
    )
    assert {s.group["length"] for s in found.samples} == {256, 512} and len(found.samples) == 4
    with pytest.raises(SurgeryError, match="leave no room"):
        find_suite("longbench").run(eval_model, options(tasks=("gov_report",), lengths=(512,)))


def test_retrieval(eval_model):
    found = find_suite("retrieval").run(eval_model, options(lengths=(128, 256), gen_kwargs=QUICK))
    assert {s.task for s in found.samples} == {"swde", "squad", "fda", "triviaqa", "drop", "nq"}
    assert found.metrics["score"].kind == "accuracy"
    count = prompt_token_counter(eval_model.tokenizer, False)
    for sample in found.samples:
        assert count(sample.shown["prompt"]) + 48 <= sample.group["length"]
        assert any(answer in sample.shown["prompt"] for answer in sample.shown["target"])


def test_an_empty_answer_is_never_said():
    """Data sets have some, beside others; it would be in every text."""
    assert retrieval.contains_answer("It is Paris.", ["", "paris"]) == 1.0
    assert retrieval.contains_answer("It is Rome.", ["", " ", "paris"]) == 0.0


def test_a_task_of_lm_eval_by_name(eval_model, tmp_path, monkeypatch):
    """A task of the user's folder, with few-shot examples and its own data."""
    place = tmp_path / "own" / "quiz"
    place.mkdir(parents=True)
    rows = [{"q": f"{i} and {i} are", "a": str(2 * i)} for i in range(1, 7)]
    (place / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: test, path: test.jsonl}\n---\n"
    )
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "quiz.yaml").write_text(
        "task: own_quiz\ndataset_path: own/quiz\noutput_type: generate_until\ntest_split: test\nfewshot_split: test\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\ngeneration_kwargs: {max_gen_toks: 3, until: ['.']}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    (tasks / "bare.yaml").write_text("include: quiz.yaml\ntask: own_bare\nnum_fewshot: 0\n")
    asked = EvalOptions(data_root=tmp_path, include_path=tasks, tasks=("own_quiz",), num_fewshot=2, limit=3)
    # The index of all of lm-eval's files takes a minute on a busy machine, and is not what is tested.
    monkeypatch.setattr("surgery.eval.task_names._full_manager", lambda o: names._build_manager([], False, o))
    from surgery.eval import task_names as names

    (tasks / "quizzes.yaml").write_text(
        "group: own_quizzes\ntask: [own_quiz]\naggregate_metric_list: [{metric: exact_match, weight_by_size: true}]\n"
    )
    found = find_suite("lm-eval").run(eval_model, asked)
    assert len(found.samples) == 3 and found.metrics["exact_match"].kind == "accuracy"
    assert found.samples[0].shown["arguments"][0][0].count(" are") == 3  # two examples and the question
    bare = find_suite("lm-eval").run(eval_model, asked.model_copy(update={"tasks": ("own_bare", "own_quiz")}))
    assert bare.notes == ["--num-fewshot does not apply to own_bare: the task itself sets 0 examples"]
    group = find_suite("lm-eval").run(eval_model, asked.model_copy(update={"tasks": ("own_quizzes",)}))
    assert [s.id for s in group.samples] == [s.id for s in found.samples] and "own_quizzes" in group.info["groups"]
    with pytest.raises(SurgeryError, match="did you mean 'own_quiz"):
        find_suite("lm-eval").run(eval_model, asked.model_copy(update={"tasks": ("own_quis",)}))


def test_needles_of_the_story_are_found(eval_model):
    """The embedded model answers what it was taught, at every depth, through generation with its cache."""
    asked = options(tasks=("niah_story",), lengths=(128, 512), depths=(0.0, 0.5, 1.0), limit=6)
    found = find_suite("niah").run(eval_model, asked)
    assert len(found.samples) == 36 and {s.group["depth"] for s in found.samples} == {0.0, 0.5, 1.0}
    assert sum(s.metrics["score"] for s in found.samples) / 36 > 0.95
    assert found.metrics["score"].kind == "accuracy"


@pytest.mark.slow
def test_a_window_loses_what_lies_before_it(eval_model, tmp_path):
    """Attention that sees 64 tokens finds needles at the end alone: the loss is told by depth and length."""
    from surgery.conversion.convert import convert
    from surgery.planning.recipe import load_recipe

    convert(str(TINY), load_recipe("sliding-window", ["attention.window=64"]), tmp_path / "near")
    model, tokenizer = load(str(tmp_path / "near"), torch.device("cpu"), "float32", False)
    near = replace(eval_model, role="converted", model=model, tokenizer=tokenizer)
    asked = options(tasks=("niah_story",), lengths=(512,), depths=(0.0, 0.5, 1.0), limit=6)
    base, converted = (find_suite("niah").run(each, asked).samples for each in (eval_model, near))
    assert [s.id for s in base] == [s.id for s in converted]
    score = {
        depth: sum(s.metrics["score"] for s in converted if s.group["depth"] == depth) / 6 for depth in (0, 0.5, 1)
    }
    assert score[0] < 0.5 and score[0.5] < 0.5 and score[1] > 0.9


# -- what is asked -----------------------------------------------------------------------------------
def test_prefixes_stand_after_the_chat_template(eval_model):
    """The question in the user's turn, the beginning of the answer in the assistant's, and both are counted."""
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% if not loop.last %}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}\n[assistant] {% endif %}"
    )
    chat = replace(eval_model, tokenizer=tokenizer)
    asked = options(
        lengths=(512,), limit=1, tasks=("niah_single_1",), depths=(0.5,), apply_chat_template=True, gen_kwargs=QUICK
    )
    seen = []
    real = chat.model.generate

    def generate(input_ids, **more):
        seen.append(input_ids)
        return real(input_ids=input_ids, **more)

    chat.model.generate = generate
    try:
        find_suite("niah").run(chat, asked)
    finally:
        del chat.model.generate
    text = tokenizer.decode(seen[0][0])
    assert text.startswith("[user] A special magic number") and "[assistant]" in text
    assert text.endswith("mentioned in the provided text is")
    assert 0.98 * 512 <= seen[0].shape[1] + 128 <= 516


def test_tasks_of_ours_keep_to_their_doc(eval_model):
    docs = [
        {"id": f"d{i}", "task": "echo", "prompt": f"Story: {i}", "prefix": " Mia", "answers": ["x"]} for i in range(3)
    ]
    task = OwnTask("echo_1", docs, lambda doc, said: float(doc["id"] == "d1"), 2)
    found = run_own_tasks(eval_model, [("echo", lambda: task), ("nothing", lambda: None)], options(), SCORE)
    assert {s.id: s.metrics["score"] for s in found.samples} == {"d0": 0, "d1": 1, "d2": 0}
    assert found.samples[0].shown["prompt"] == "Story: 0 Mia" and found.samples[0].task == "echo"


def test_cloze_prompts():
    row = {"text": "A lamp. Maker: Otto.\nSummary of information above...\nMaker:", "key": "maker", "value": "Otto"}
    cloze = parse_field(row)
    assert cloze.context + cloze.tail == row["text"] and cloze.tail == "Maker:" and cloze.answers == ("Otto",)
    row = {"text": "Otto built it. It burned. It was built by", "value": "Otto"}
    cloze = parse_sentence(row)
    assert cloze.context + cloze.tail == row["text"] and cloze.tail == "It was built by"
    assert parse_sentence({**row, "context": "Otto built it. It burned."}).tail == " It was built by"
    asked = {"context": "[DOC] [PAR] It lies at Korr. It lies at", "question": "It lies at", "answers": ["Korr"]}
    cloze = parse_question(asked)
    assert cloze.context + cloze.tail == "It lies at Korr. It lies at" and "[" not in cloze.context


def test_questions_on_nq_come_cut():
    assert [CLOZES["nq"].path_for_length(n) for n in (256, 512, 1000, 2048, 16384)] == [
        f"hazyresearch/based_nq_{n}" for n in (512, 512, 1024, 2048, 2048)
    ]


def test_lengths_are_those_a_model_reaches():
    assert default_lengths(1024) == (512, 1024) and default_lengths(40_000) == (4096, 8192, 16384, 32768)
    assert default_lengths(None)[-1] == 131072 and default_lengths(256) == (256,)


@pytest.mark.parametrize(
    "suite, tasks, gone",
    [("niah", ("niah_story",), "niah_story_512"), ("zeroshot", ("piqa", "lambada_openai"), "lambada_openai")],
)
def test_the_rest_runs_where_a_task_breaks(eval_model, monkeypatch, tmp_path, suite, tasks, gone):
    """What broke is said, the exit code tells, and it is measured again the next time; alone it is the answer."""
    from surgery.eval import run

    real = eval_model.model.forward

    def forward(*given, input_ids, **more):
        if input_ids.shape[1] > 300 or (suite == "zeroshot" and input_ids.shape[1] > 36):
            raise ValueError("too much\nfor it")
        return real(*given, input_ids=input_ids, **more)

    monkeypatch.setattr(type(eval_model.model), "forward", lambda self, **given: forward(**given))
    monkeypatch.setattr(eval_model.model, "forward", forward)
    asked = options(tasks=tasks, lengths=(128, 512), depths=(0.5,), limit=2, batch_size=1)
    found = find_suite(suite).run(eval_model, asked)
    assert set(found.broken) == {gone} and found.broken[gone] == "ValueError: too much for it"
    assert found.samples and not {s.task for s in found.samples if suite == "zeroshot"} & {gone}
    with pytest.raises(ValueError, match="too much"):
        find_suite(suite).run(eval_model, asked.model_copy(update={"lengths": (512,), "tasks": tasks[1:] or tasks}))
    done = run.evaluate(str(TINY), [suite], asked, out=tmp_path)
    assert done.exit_code == 2 and f"{suite} {gone}" in done.broken and done.rows
    assert not list(tmp_path.rglob("result.json"))


# -- what is refused ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "suite, given, said",
    [
        ("ruler", {"tasks": ("niah_singel_1",)}, "did you mean 'niah_single_1'"),
        ("niah", {"tasks": ("vt",)}, "has no task 'vt'"),
        ("longbench", {"tasks": ("qaspar",)}, "did you mean 'qasper'"),
        ("retrieval", {"tasks": ("swed",)}, "did you mean 'swde'"),
        ("ruler", {"tasks": ("cwe",), "lengths": (128,)}, "nothing fits"),
        ("lm-eval", {}, "--tasks"),
        ("niah", {"apply_chat_template": True}, "has no chat template"),
        ("zeroshot", {"apply_chat_template": True, "tasks": ("piqa",)}, "has no chat template"),
    ],
)
def test_what_is_wrong_is_said(eval_model, suite, given, said):
    with pytest.raises(SurgeryError, match=said):
        find_suite(suite).run(eval_model, options(**given))


def test_learned_positions_end_somewhere(eval_model):
    from helpers.small import tiny_config

    kind, config = tiny_config("gpt2")
    config.vocab_size = len(eval_model.tokenizer)
    small = replace(eval_model, model=kind(config).eval(), longest=64)
    with pytest.raises(
        SurgeryError, match=r"learned positions \(transformer.wpe\) for 64 tokens, fewer than the requested 512"
    ):
        find_suite("niah").run(small, options(tasks=("niah_story",), lengths=(512,), limit=1))


def test_nothing_is_downloaded(eval_model, monkeypatch):
    for name in mirror.OFFLINE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for suite in ("zeroshot", "longbench", "retrieval", "ruler"):
        with pytest.raises(SurgeryError, match=f"surgery fetch-eval-data DATA --suite {suite}"):
            find_suite(suite).run(eval_model, EvalOptions())


def test_a_mirror_that_lacks_something(eval_model, tmp_path):
    with pytest.raises(SurgeryError, match=r"has no .*EleutherAI/lambada_openai.*fetch-eval-data"):
        find_suite("zeroshot").run(eval_model, EvalOptions(data_root=tmp_path))
    broken = tmp_path / "baber" / "piqa"
    broken.mkdir(parents=True)
    with pytest.raises(SurgeryError, match="could not be read"):
        mirror.load_rows(tmp_path, "zeroshot", "baber/piqa", None, "test")


def test_our_tasks_are_not_lm_eval_s():
    with pytest.raises(SurgeryError, match="--suite ruler --tasks niah_single_2"):
        find_suite("niah_single_2")
    with pytest.raises(SurgeryError, match="--suite longbench --tasks qasper"):
        find_suite("longbench_qasper")

    with pytest.raises(SurgeryError, match="--suite ruler --tasks qa_2"):
        find_suite("ruler_qa_hotpot")
    with pytest.raises(SurgeryError, match="--suite ruler --tasks vt"):
        find_suite("lm-eval").run(None, options(tasks=("ruler_vt",)))  # type: ignore[arg-type]


def test_metadata_reaches_the_tasks():
    """By a field of lm-eval's factory: the manager's index is read once, and not again for every --metadata."""
    from surgery.eval.task_names import load_tasks

    for given in ({"shade": "green"}, {"shade": "blue"}):
        task = load_tasks(("piqa",), options(metadata=given))["tasks"]["piqa"]
        assert task.config.metadata["shade"] == given["shade"]


def test_the_working_directory_comes_back(tmp_path):
    import datasets

    before = Path.cwd(), datasets.config.HF_DATASETS_CACHE
    for paths in ([], ["org/name"]):
        (tmp_path / "org" / "name").mkdir(parents=True, exist_ok=True)
        with pytest.raises(ValueError), mirror.use_mirror(tmp_path, paths):
            assert Path.cwd() == tmp_path.resolve() and before[1] != datasets.config.HF_DATASETS_CACHE
            raise ValueError
        assert (Path.cwd(), datasets.config.HF_DATASETS_CACHE) == before

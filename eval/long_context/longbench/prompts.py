"""LongBench's tasks: prompts, answer lengths and scores from its repository (Bai et al. 2024, arXiv:2308.14508; THUDM,
MIT).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LongBenchTask:
    """A task of LongBench.

    Attributes:
        prompt: template with {context} and {input}.
        score: name of a function in longbench/scores.py.
        first_line_only: whether only the first line of an answer is scored.
        no_chat_template: whether the chat template never applies.
        in_paper: whether it is one of the fourteen tasks of Log-Linear Attention (arXiv:2506.04761).
    """

    prompt: str
    answer_tokens: int
    score: str
    first_line_only: bool = False
    no_chat_template: bool = False
    in_paper: bool = True


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other "
    "words.\n\nThe "
    "following are given passages.\n{context}\n\nAnswer the question based on the given passages. Only give me the "
    "answer and "
    "do not output any other words.\n\nQuestion: {input}\nAnswer:"
)
_SINGLE = (
    "Answer the question as concisely as you can, using a single phrase or sentence if possible. If the question "
    "cannot be "
    'answered based on the information in the article, write "unanswerable". If the question is a yes/no question, '
    'answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.'
)
# "asconcisely" is LongBench's own, in this task only; published scores were measured with it.
_CONCISE = "asconcisely as you can, using a single phrase if possible. Do not provide any explanation."

TASKS: dict[str, LongBenchTask] = {
    "narrativeqa": LongBenchTask(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
        f"{_CONCISE}\n\nStory: {{context}}\n\nNow, answer the question based on the story {_CONCISE}\n\nQuestion: "
        f"{{input}}"
        "\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": LongBenchTask(
        f"You are given a scientific article and a question. {_SINGLE}\n\nArticle: {{context}}\n\n "
        f"{_SINGLE.replace('Answer the question as', 'Answer the question based on the above article as', 1)}\n\n"
        "Question: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "multifieldqa_en": LongBenchTask(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, "
        "only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
    ),
    "multifieldqa_zh": LongBenchTask(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n问题：{input}\n回答：",
        64,
        "qa_f1_zh",
        in_paper=False,
    ),
    "hotpotqa": LongBenchTask(_PASSAGES, 32, "qa_f1"),
    "2wikimqa": LongBenchTask(_PASSAGES, 32, "qa_f1"),
    "musique": LongBenchTask(_PASSAGES, 32, "qa_f1"),
    "dureader": LongBenchTask(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        "rouge_zh",
        in_paper=False,
    ),
    "gov_report": LongBenchTask(
        "You are given a report by a government agency. Write a one-page summary of the "
        "report.\n\nReport:\n{context}\n\nNow, "
        "write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge",
    ),
    "qmsum": LongBenchTask(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more "
        "sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript in one or "
        "more "
        "sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "rouge",
    ),
    "multi_news": LongBenchTask(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\nNow, write "
        "a "
        "one-page summary of all the news.\n\nSummary:",
        512,
        "rouge",
    ),
    "vcsum": LongBenchTask(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
        512,
        "rouge_zh",
        in_paper=False,
    ),
    "trec": LongBenchTask(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        "classification",
        first_line_only=True,
        no_chat_template=True,
    ),
    "triviaqa": LongBenchTask(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The "
        "following are some examples.\n\n{context}\n\n{input}",
        32,
        "qa_f1",
        first_line_only=True,
        no_chat_template=True,
    ),
    "samsum": LongBenchTask(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        "rouge",
        first_line_only=True,
        no_chat_template=True,
    ),
    "lsht": LongBenchTask(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        64,
        "classification",
        first_line_only=True,
        no_chat_template=True,
        in_paper=False,
    ),
    "passage_count": LongBenchTask(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these "
        "paragraphs and determine how many unique paragraphs there are after removing duplicates. In other words, how "
        "many "
        "non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of unique "
        "paragraphs after "
        "removing duplicates. The output format should only contain the number, such as 1, 2, 3, and so on.\n\nThe "
        "final answer "
        "is: ",
        32,
        "count",
        in_paper=False,
    ),
    "passage_retrieval_en": LongBenchTask(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from."
        "\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that "
        "the abstract "
        'is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        "retrieval",
        in_paper=False,
    ),
    "passage_retrieval_zh": LongBenchTask(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n{input}\n\n"
        '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
        32,
        "retrieval_zh",
        in_paper=False,
    ),
    "lcc": LongBenchTask(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, "code", no_chat_template=True
    ),
    "repobench-p": LongBenchTask(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        "code",
        no_chat_template=True,
    ),
}

"""Each document X.zh-CN.md has the commands, figures, options and links of X.md, in its own sentences."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT

NEEDED = {  # what a user of ModelArts reads, from the first command to an own loop
    "README",
    "guides/caches",
    "guides/gpu",
    "guides/history",
    "guides/lint",
    "guides/modelarts",
    "guides/own_data",
    "guides/own_loop",
    "guides/prove",
    "guides/questions",
    "guides/receipts",
    "guides/trouble",
    "guides/two_nodes",
}
SEARCHED = ("断点续训", "多机多卡", "分布式训练")  # resume, several nodes with GPUs, distributed training
PAIRS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.zh-CN.md"), *ROOT.glob("guides/*.zh-CN.md")])
_BLOCK = re.compile(r"^```[\s\S]*?^```$|(?:^ {4}.*\n)+", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)*)`")  # a span may be wrapped
_NUMBER = re.compile(r"(?<![\w.])\d[\d,.]*\d|(?<![\w.])\d")


def read_parts(text: str) -> dict[str, Counter[str]]:
    """Return what a translation must not change. A comment in a block may be translated."""
    text = re.sub(r"^\[(?:English|中文)\]\(.*\)$|\[(?:English|中文)\]\(\S+\)", "", text, flags=re.MULTILINE)
    blocks = [re.sub(r"(?:^| {2,})#.*", "", block, flags=re.MULTILINE) for block in _BLOCK.findall(text)]
    prose = _BLOCK.sub("", text)
    links = [link.replace(".zh-CN.md", ".md") for link in _LINK.findall(prose)]
    words = [" ".join(word.split()) for word in _CODE.findall(prose)]
    code = Counter(re.sub(r"[\u4e00-\u9fff]+", "JOB", word) for word in words)
    return {
        "blocks": Counter(blocks),
        "code": code,
        "links": Counter(link.partition("#")[0] for link in links),  # anchors are translated
        "figures": Counter(_NUMBER.findall(_LINK.sub("]", _CODE.sub("", prose)))),
        "headings": Counter(str(len(mark)) for mark in re.findall(r"^(#+) ", text, re.MULTILINE)),
    }


@pytest.mark.parametrize("path", PAIRS, ids=str)
def test_translation_has_the_same_parts(path):
    original = path.with_name(path.name.replace(".zh-CN", ""))
    english, chinese = (read_parts((ROOT / each).read_text(encoding="utf-8")) for each in (original, path))
    differences = {
        part: {f"only in {original}": dict(english[part] - chinese[part]), f"only in {path}": dict(more)}
        for part in english
        if (more := chinese[part] - english[part]) or english[part] - chinese[part]
    }
    assert not differences


def test_pages_that_users_need_are_translated():
    translated = {str(path).removesuffix(".zh-CN.md") for path in PAIRS}
    assert not NEEDED - translated


def find_english_links(path: Path) -> list[str]:
    """Return the links of a Chinese page to an English page that has a translation, without the switch."""
    text = re.sub(r"\[English\]\(\S+\)", "", _BLOCK.sub("", (ROOT / path).read_text(encoding="utf-8")))
    links = []
    for link in _LINK.findall(text):
        target = (ROOT / path).parent / link.partition("#")[0]
        translation = target.with_name(target.name.replace(".md", ".zh-CN.md"))
        if target.suffix == ".md" and ".zh-CN" not in target.name and translation.exists():
            links.append(link)
    return links


@pytest.mark.parametrize("path", PAIRS, ids=str)
def test_languages_link_each_other(path):
    """The first lines of both pages have the switch, and a Chinese reader stays on Chinese pages."""
    english = path.name.replace(".zh-CN", "")
    for page, switch in ((english, f"[中文]({path.name})"), (path.name, f"[English]({english})")):
        lines = (ROOT / path).with_name(page).read_text(encoding="utf-8").splitlines()
        assert switch in "\n".join(lines[:5]), page
    assert not find_english_links(path)


def test_the_readme_has_the_words_that_people_search_for():
    text = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    sentence = text.split("\n\n")[1].partition("。")[0]
    headings = "\n".join(re.findall(r"^#+ .*", text, re.MULTILINE))
    for word in SEARCHED:
        assert word in sentence and word in headings, word


def test_the_comparison_can_fail():
    text = "# A\n\n[中文](a.zh-CN.md)\n\n`x` 3 times, 1.5 s: [b](b.md#c)\n\n```bash\nmake a    # note\n```\n"
    same = "# 甲\n\n[English](a.md)\n\n3 次 `x`，1.5 秒：[乙](b.zh-CN.md#c)\n\n```bash\nmake a    # 甲\n```\n"
    assert read_parts(text) == read_parts(same)
    for old, new in (
        ("3 次", "4 次"),
        ("`x`", "`y`"),
        ("b.zh-CN", "d.zh-CN"),
        ("make a", "make b"),
        ("# 甲", "## 甲"),
    ):
        assert read_parts(text) != read_parts(same.replace(old, new)), new
    wrapped = "Run `tar -C train\n  -cf x.tar`."
    assert read_parts(wrapped)["code"] == {"tar -C train -cf x.tar": 1}

"""Each document X.zh-CN.md has the commands, figures, options and links of X.md, in its own sentences."""

import re
from collections import Counter

import pytest

from tests.conftest import ROOT

PAIRS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("*.zh-CN.md"), *ROOT.glob("guides/*.zh-CN.md")])
_BLOCK = re.compile(r"^```[\s\S]*?^```$|(?:^ {4}.*\n)+", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_NUMBER = re.compile(r"(?<![\w.])\d[\d,.]*\d|(?<![\w.])\d")


def read_parts(text: str) -> dict[str, Counter[str]]:
    """Return what a translation must not change. A comment in a block may be translated."""
    text = re.sub(r"^\[(?:English|中文)\]\(.*\)$|\[(?:English|中文)\]\(\S+\)", "", text, flags=re.MULTILINE)
    blocks = [re.sub(r" {2,}#.*", "", block) for block in _BLOCK.findall(text)]
    prose = _BLOCK.sub("", text)
    links = [link.replace(".zh-CN.md", ".md") for link in _LINK.findall(prose)]
    code = Counter(re.sub(r"[\u4e00-\u9fff]+", "JOB", word) for word in _CODE.findall(prose))
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
    assert len(PAIRS) >= 3

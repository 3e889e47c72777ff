"""Recognise folders of images that are not classes: splits, images and their masks, or parts of one folder.

Classes have no other form than CLASS/*.jpg, so any two folders look like two classes. These signs are strong
enough to refuse them:

1. the names of two folders differ only in a word for training and one for validation (train_images and
   test_images), or each name has such a word and says nothing else (training_data and test_images);
2. each name says images or masks, and they are otherwise equal (images and masks; x_input and x_label);
3. the names differ only in numbers, and say that they are parts of a set of images (images_001, images_002);
4. a table in the folder lists the images with other labels than their folders (datasets/folders/tables.py).

A class called test_tube or images_of_x among others is none of these. `--splits none` takes all as classes.
"""

import os
import re
from typing import NamedTuple

from datasets.folders.messages import shown
from datasets.folders.splits import NO_SPLITS

_TRAIN = {"train", "training", "trn", "tr", "trainval"}
_VAL = {
    "val", "va", "validation", "valid", "dev", "test", "testing", "tst", "ts", "te", "eval", "evaluation",
    "pred", "holdout",
}  # fmt: skip
_IMAGES = {
    "image", "images", "img", "imgs", "photo", "photos", "picture", "pictures", "pic", "pics", "jpeg",
    "jpegs", "jpg", "jpgs", "png", "pngs", "input", "inputs", "rgb",
}  # fmt: skip
_MASKS = {
    "mask", "masks", "label", "labels", "annotation", "annotations", "annot", "annots", "gt", "truth",
    "groundtruth", "segmentation", "segmentations", "seg", "segs", "trimap", "trimaps", "target", "targets",
    "output", "outputs",
}  # fmt: skip
_PARTS = {"part", "parts", "batch", "chunk", "fold", "split", "shard", "subset", "set", "vol", "volume"}
_FILLERS = {"ground", "class", "object", "data", "dataset"}
# trainset, testimages
_JOINED = re.compile(f"({'|'.join(_TRAIN | _VAL)})(sets?|data|images?|imgs?|pics|photos|samples)")


class _Name(NamedTuple):
    """What the name of a folder says. kind: "train", "val" or "". other: its words without that of `kind`,
    and the place of that one. has_...: whether it has a word of this kind."""

    title: str
    words: list[str]
    kind: str
    other: tuple
    has_image: bool
    has_mask: bool
    has_part: bool


def describe(titles: list[str]) -> str:
    """Return why folders are probably not classes, by their names: "A and B have the names of splits"; "" if
    they may be classes. titles: of all folders with images."""
    names = [_parse(title) for title in sorted(titles)]
    if len(names) < 2:
        return ""
    return _describe_splits(names) or _describe_masks(names) or _describe_parts(names)


def may_be_a_split_or_a_part(title: str) -> bool:
    """Return whether the name of a folder says that it is a split, images, masks, or a part of them. Alone
    this is a weak sign: a class may be called test_tube."""
    name = _parse(title)
    return bool(name.kind) or name.has_image or name.has_mask or name.has_part


def _describe_splits(names: list[_Name]) -> str:
    """Return the reason if two folders have the names of splits, else ""."""
    pairs: dict[tuple, dict[str, str]] = {}  # words without that for the split -> kind -> title
    for name in names:
        if name.kind:
            pairs.setdefault(name.other, {}).setdefault(name.kind, name.title)
    others = set()  # words besides that for the split
    for name in names:
        others.update(word for word in name.other[1:] if len(word) > 1)
    if all(name.kind for name in names) and others <= _IMAGES | _MASKS | _PARTS | _FILLERS:
        # training_data and test_images
        pairs[()] = {name.kind: name.title for name in reversed(names)}
    for titles in pairs.values():
        if len(titles) == 2:
            return f"{titles['train']} and {titles['val']} have the names of splits"
    return ""


def _describe_masks(names: list[_Name]) -> str:
    """Return the reason if the folders are images and their masks or labels, else ""."""
    masks = []
    pictures = []
    others = set()  # what the names say besides
    for name in names:
        if name.has_mask:
            masks.append(name.title)
        elif name.has_image:
            pictures.append(name.title)
        else:
            return ""
        others.add(tuple(word for word in name.words if word not in _IMAGES | _MASKS | _FILLERS))
    if not masks or not pictures or len(others) > 1:
        return ""
    return f"{shown(pictures)} and {shown(masks)} have the names of images and their masks or labels"


def _describe_parts(names: list[_Name]) -> str:
    """Return the reason if the folders are parts of one set of images, else ""."""
    first = names[0]
    if any(name.words != first.words for name in names):
        return ""
    has_plural = any(word in _IMAGES and word.endswith("s") for word in first.words)
    others = set(first.words) - _IMAGES - _PARTS - _FILLERS - _TRAIN - _VAL
    is_part = first.has_image and first.has_part
    if is_part or first.words == ["fold"] or (has_plural and not others):
        return f"{shown([name.title for name in names])} have the names of parts of one folder of images"
    return ""


def _parse(title: str) -> _Name:
    """Return what a name says. Its words are divided at characters that are not letters and at capitals:
    trainA, GroundTruth. Numbers do not count, nor do single letters."""
    words: list[str] = []
    for letters in re.findall(r"[^\W\d_]+", title):
        for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[^A-Z]+", letters):
            joined = _JOINED.fullmatch(word.lower())
            if joined:
                words += joined.groups()
            else:
                words.append(word.lower())
    kinds = []
    for place, word in enumerate(words):
        if word in _TRAIN:
            kinds.append((place, "train"))
        elif word in _VAL:
            kinds.append((place, "val"))
    kind = ""
    other: tuple = ()
    # test_train has both words: it says nothing
    if len(kinds) == 1:
        [(place, kind)] = kinds
        other = (place, *words[:place], *words[place + 1 :])
    words = [word for word in words if len(word) > 1]
    known = set(words)
    return _Name(title, words, kind, other, bool(known & _IMAGES), bool(known & _MASKS), bool(known & _PARTS))


def advise(reason: str, source: str, paths: list[str], table: str) -> str:
    """Return the line that refuses folders which are not classes. reason: of describe() or of a table.
    table: how to use a table that lists the images, or ""."""
    advice = table
    if not advice:
        deep = sorted({path.partition("/")[0] for path in paths if path.count("/") > 1})
        if deep:
            advice = f"if {deep[0]} holds the class folders, --data_url {os.path.join(source, deep[0])}"
        else:
            advice = (
                f"write their images and labels into train.txt and val.txt, lines such as `{paths[0]} LABEL`"
            )
    return f"{source}: {reason}: {advice}; if they are classes, --splits {NO_SPLITS}"

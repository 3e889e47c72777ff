"""Find text that looks like a secret, in files to upload and in the variables of a job.

Findings name file, line and kind, never the text. The console and the service's API show a job's environment
and parameters in clear text to every user who can view the job.
"""

import codecs
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from bootfile.ground.files import explained
from bootfile.ground.secrets import SECRET_NAME, is_secret
from launch.secret_formats import FORMATS, PLACEHOLDER, RANDOM, is_mixed, is_user_and_password

_URL = re.compile(r"[a-z0-9]://[^\s/:@\"'`<>]{0,256}:([^\s/@\"'`]{1,1024})@[\w\[$.{<-]", re.IGNORECASE)
_ASSIGNMENT = re.compile(  # name = value, "name": value, ["name"] = value, and ("name", "value")
    rf"""({SECRET_NAME.pattern})(?:["']?\]?\s*(?::\s*\w+\s*(?==[^=]))?[=:]|["'](?P<comma>,))\s*"""
    r"""(?:[rbu]*(["'])(?P<quoted>[^"']*)\3|(?P<bare>[^\s"'#,;(\[{][^\s"']*))""",
    re.IGNORECASE,
)
_TWO_WORDS = re.compile(rf"\s*[\w.-]*?({SECRET_NAME.pattern})\s+(?P<value>\S{{4,4096}})\s*", re.IGNORECASE)
_PASSWORD = re.compile(r"(?:password|passwd|passphrase|pwd)s?", re.IGNORECASE)
_OFTEN_PUBLIC = re.compile(r"(?:key|header|sig|signature|auth)s?", re.IGNORECASE)  # in a file
# What names the user to whom a key belongs: `"username": "me"`, `login = me`, `login me`.
_USER = re.compile(
    r"""(?<![a-z0-9])(?:user(?:[_-]?name)?|login|account(?:[_-]?name)?|e-?mail|client[_-]?id|access[_-]?key[_-]?id)"""
    r"""["']?\]?(?:\s*[=:]\s*[rbu]*["']?|[ \t]+)[\w*/.@+-]""",
    re.IGNORECASE,
)
_KEY_OF_USER = re.compile(r"[A-Za-z0-9+/]{12,4096}={0,2}|[\w+/=.~-]{32,4096}")
_OBJECT = 400  # characters before and after a key in which its user is named
_EDGE = re.compile(r"[{}]|\n\s*\n|\n\[")  # of an object, or of a section
_NAME = re.compile(
    r"[a-z0-9]+(?:_[a-z0-9]+)+|(?:[a-z]+|[A-Z0-9]+)(?:[A-Z0-9]{1,3}[a-z]+)+"
)  # snake_case, camelCase
_PUBLIC = re.compile(  # ends before a name: publicKeyToken, page_token, AWS::ApiKey
    r"(?:public[_-]?(?:key)?|page|next|continuation|::\w*)[_-]?$", re.IGNORECASE
)
_NUMBER = re.compile(r"[+-]?[\d.]+(?:e[+-]?\d+)?", re.IGNORECASE)
_CREDENTIAL_FILE = re.compile(
    r"\.env(\..+)?|.+\.env|[._]?netrc|\.?pgpass(\.conf)?|\.pypirc|\.git-credentials|\.htpasswd|\.dockercfg|kaggle\.json"
    r"|id_(rsa|dsa|ecdsa|ed25519)"
    r"|.+\.(p12|pfx|jks|keystore|kdbx|ppk)|credentials(\.(csv|json|ya?ml|ini|toml))?|kubeconfig|\.?obsutilconfig"
)
_PROGRAM = re.compile(  # in these a value is a literal; in other files, `password: x` is a setting
    r".+\.(pyi?|pyx|ipynb|[cm]?[jt]sx?|c|cc|cpp|cxx|cu|cuh|h|hpp|java|kt|go|rs|rb|php|pl|lua|r|jl|scala|swift|cs|m|mm"
    r"|sql|md|rst|tex|html?|css|scss|svg|csv|tsv|jsonl|log|diff|patch|map|pxd|f90|typed)"
)
_LISTS_OF_WORDS = 20_000  # characters; lines of two words in longer files are data: vocabularies, merges
_READ = 32 * 2**20  # bytes of a file that are scanned; longer text is probably data


class Finding(NamedTuple):
    """What looks like a secret: its line in the file, from 1 on, 0 for the whole file; and its kind."""

    line: int
    kind: str


def scan(path: str, source: str | bytes) -> list[Finding]:
    """Return the findings in the file `source`, or in these bytes, stored as `path`: one a line at most.

    `pack` calls it for each file before it writes any. A binary file has none. Raises BadInput.
    """
    name = os.path.basename(path).lower()
    if _CREDENTIAL_FILE.fullmatch(name):
        return [Finding(0, "a file that holds credentials, by its name")]
    if isinstance(source, str):
        with explained(f"{path} cannot be read"), open(source, "rb") as file:
            source = file.read(_READ)
    text = _decode(source)
    kinds: dict[int, str] = {}  # line -> the first kind
    for line, kind in _search(name, text):
        kinds.setdefault(line, kind)
    return [Finding(line, kinds[line]) for line in sorted(kinds)]


def describe(path: str, findings: list[Finding]) -> str:
    """Return the findings of a file as one line, "path:2 (a password), line 5 (a private key)".

    A kind has its first line, and the number of further ones.
    """
    lines_of: dict[str, list[int]] = {}  # kind -> its lines
    for finding in findings:
        lines_of.setdefault(finding.kind, []).append(finding.line)
    parts = []
    for kind, lines in lines_of.items():
        more = ""
        if len(lines) == 2:
            more = ", and in 1 more line"
        elif len(lines) > 2:
            more = f", and in {len(lines) - 1} more lines"
        place = f"line {lines[0]} "
        if not parts:  # as compilers write it; no line for a file that is refused by its name
            place = f"{path}:{lines[0]} " if lines[0] else f"{path} "
        parts.append(f"{place}({kind}{more})")
    return ", ".join(parts)


def _decode(content: bytes) -> str:
    """Return the text of a file; "" for a binary one. Editors of Windows write UTF-16."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16", errors="replace")
    if b"\0" in content[:8192]:
        return ""
    return content.decode("utf-8", errors="replace")


def _search(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, kind) of what looks like a secret, in no order. name: of the file, in lower case."""
    lowered = text.lower()
    for form in FORMATS:
        if form.words and not any(word in lowered for word in form.words):
            continue
        for place in form.find(text):
            yield text.count("\n", 0, place) + 1, form.kind
    is_program = _PROGRAM.fullmatch(name) is not None
    is_json = name.endswith(".json")
    has_pairs = not is_program and len(text) < _LISTS_OF_WORDS
    begin = 0  # of the line in the text
    for number, line in enumerate(text.split("\n"), 1):
        kind = _find_assignment(text, begin, line, is_program, is_json)
        if not kind and has_pairs:
            kind = _find_pair(text, begin, line)
        if kind:
            yield number, kind
        begin += len(line) + 1
    # A file of one word is what its name says: token.txt, wandb_api_key, db_password.
    stem = SECRET_NAME.search(name.partition(".")[0])
    value = text.strip()
    if stem and not is_program and re.fullmatch(r"\S{1,4096}", value):
        kind = _judge(stem[0], value, has_user=False)
        if kind:
            yield 1, kind


def _find_assignment(text: str, begin: int, line: str, is_program: bool, is_json: bool) -> str | None:
    """Return the kind of the first `name = value` in a line that looks like a secret; None without one.

    begin: where the line begins in the text. is_program: only literals count. is_json: bare values are
    numbers, as in a vocabulary.
    """
    if ":" not in line and "=" not in line and "'," not in line and '",' not in line:  # half of all lines
        return None
    if "://" in line and any(not PLACEHOLDER.fullmatch(match[1]) for match in _URL.finditer(line)):
        return "a URL with a password"
    if is_program and not ("'" in line or '"' in line):
        return None
    if '\\"' in line:  # JSON in a string, and the code of a notebook
        line = line.replace('\\"', ' "')  # of equal length: places in the line stay
    for match in _ASSIGNMENT.finditer(line):
        value = (match["quoted"] or "").strip()
        if match["quoted"] is None:
            value = (match["bare"] or "").rstrip(",;)}]")
            if is_program or is_json or match["comma"]:
                continue
        if is_program and " " in value:
            continue
        if match["comma"] and (not RANDOM.fullmatch(value) or _NAME.fullmatch(value)):
            continue  # ("password", "email") and ("token", "r2_credentials") are lists of names
        # publicKeyToken, page_token and the like are not secrets
        if _PUBLIC.search(line, max(0, match.start() - 60), match.start()):
            continue
        kind = _judge(match[1], value, has_user=_names_user(text, begin + match.start(), begin + match.end()))
        if kind:
            return kind
    return None


def _find_pair(text: str, begin: int, line: str) -> str | None:
    """Return the kind of a line of two words, `password hunter2`; None for any other line."""
    match = _TWO_WORDS.fullmatch(line)
    if not match or PLACEHOLDER.fullmatch(match["value"]) or _NUMBER.fullmatch(match["value"]):
        return None
    value = match["value"].strip("\"',;")
    if is_mixed(value) or RANDOM.fullmatch(value):
        return _judge(match[1], value, has_user=True) or "a key or token"
    if _PASSWORD.fullmatch(match[1]):
        has_digit = re.search(r"\d", value) is not None
        if has_digit or _names_user(text, begin, begin + len(line)):
            return "a password"
    return None


def _judge(name: str, value: str, has_user: bool) -> str | None:
    """Return the kind of a secret that a setting holds; None if it holds none.

    has_user: whether the name of a user is next to it.
    """
    if PLACEHOLDER.fullmatch(value):
        return None
    if _PASSWORD.fullmatch(name):
        if len(value) < 4 or value[0] in "/.":  # a path
            return None
        return "a password"
    if is_user_and_password(value):
        return "a user and a password in base64"
    if not _OFTEN_PUBLIC.fullmatch(name):
        if RANDOM.fullmatch(value) or (has_user and is_mixed(value)):
            return "a key or token"
    # the name alone says little: such a value counts only next to the name of a user
    elif has_user and is_mixed(value) and _KEY_OF_USER.fullmatch(value):
        return "a user and a key"
    return None


def _names_user(text: str, begin: int, end: int) -> bool:
    """Return whether the object or the section around text[begin:end] names a user."""
    before = _EDGE.split(text[max(0, begin - _OBJECT) : begin])[-1]
    after = _EDGE.split(text[end : end + _OBJECT], maxsplit=1)[0]
    return bool(_USER.search(before) or _USER.search(after))


def looks_secret(name: str, value: str) -> bool:
    """Return whether the name or the value of a setting looks like a secret."""
    is_named = is_secret(name, value) or re.search(r"://[^/@\s'\"]+@", value)
    return bool(is_named or scan("job.toml", f'{name} = "{value}"'.encode()))

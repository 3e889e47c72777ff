"""Find text that looks like a secret, in files to upload and in the variables of a job.

It takes the text of a file, and gives the lines with a secret of a well-known form: a row of _FORMS, a
setting such as `password = "..."`, or a file of a known name. Findings name file, line and kind, never the
text: the console and the service's API show a job's environment and parameters in clear text to every user
who can view the job. Outside are other secrets, such as those of a program's own file: it is a net below the
user's care, and no proof that a folder has none. A false alarm is allowed by its path (--allow_secret).
"""

import codecs
import os
import re
from typing import NamedTuple

from bootfile.ground.files import explained
from bootfile.ground.secrets import SECRET_NAME, is_secret

_KEY = r"(?P<value>(?=[\w+/=.~-]{0,99}\d)[\w+/=.~-]{16,4096})"
_OF_KEY = r"[\w.-]{0,40}(?i:token|secret|api[_-]?key|access[_-]?key|passw(?:or)?d)"
# A form of secrets: (kind, pattern). If the pattern has a group `value`, this must not be a placeholder.
_FORMS = [
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("a private key", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|\bLS0tLS1CRUdJTi"),
        ("an AWS access key", r"\b(?:AKIA|ASIA)(?!\w*EXAMPLE)[A-Z0-9]{16}\b"),
        ("a Huawei Cloud access key", r"\bHPUA[A-Z0-9]{16}\b"),
        ("an access key and its secret key", r"\b[A-Z0-9]{20}\b[\"']?[,;:\s]{1,9}[\"']?[A-Za-z0-9]{40}\b"),
        ("a token of a service", r"\b(?:hf|api_org)_[A-Za-z0-9]{30}"),
        ("a token of a service", r"\b(?:gh[opusr]_[A-Za-z0-9]{36}|github_pat_\w{22}|glpat-[\w-]{20})"),
        ("a token of a service", r"\bwandb_v1_[\w-]{40}|\bpypi-AgE[\w-]{40}|\bxox[abeposr]-[\w-]{10}"),
        ("a token of a service", r"\bsk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{32}|\bAIza[\w-]{35}\b"),
        ("a token of a service", r"\beyJ[\w-]{10,999}\.eyJ[\w-]{10,999}\.[\w-]{20}"),
        # `wandb login KEY`, and the file that it writes
        ("a key or token", r"\b(?:login|password)\b[^\n]{0,80}?[\s=(\"'][a-f0-9]{40}(?![\w/@.-])"),
        ("a key or token", rf"--{_OF_KEY}(?:[ =]|[\"'],\s?)[\"']?{_KEY}"),  # in a command
        # `name: X` and `value: Y`, as in a manifest of Kubernetes
        ("a key or token", rf"\bname\W{{1,4}}{_OF_KEY}\W{{1,40}}value\W{{1,4}}{_KEY}"),
        ("an HTTP header with a key", rf"(?i:\bbearer|\bauthorization\W{{1,9}}\w{{1,9}})\s{_KEY}"),
        (
            "a URL with a password",
            r"(?i:[a-z0-9])://[^\s/:@\"'`<>]{0,256}:(?P<value>[^\s/@\"'`]{1,1024})@[\w\[$.{<-]",
        ),
    )
]
_PLACEHOLDER = re.compile(
    r"[<${%*[(].*|os\.(?:environ|getenv).*|.*[{}<>].*|[x*.•_-]+|(?-i:[A-Z]+(?:_[A-Z0-9]+)+)"
    r"|(?:your|my|the|test|dummy|fake|example|change|insert|replace)[\w -]*"
    r"|pass(?:word|wd|phrase)?|pw|pwd|secret|token|none|null|nil|true|false|required|optional|testing"
    r"|.*(?:\*{3}|\.{3}).*|[a-z_][\w.]*\(.*|(?-i:.*EXAMPLE.*)",
    re.IGNORECASE,
)
_RANDOM = re.compile(r"(?=\D*\d)(?=[^a-z]*[a-z])[\w+/=.~-]{16,4096}", re.IGNORECASE)
# name = value, "name": value and ["name"] = value; not publicKeyToken, page_token and AWS::ApiKey
_SETTING = re.compile(
    rf"""(?P<public>(?:public[_-]?(?:key)?|page|next|continuation|::\w{{0,60}})[_-]?)?(?P<name>{SECRET_NAME.pattern})"""
    r"""["']?\]?[ \t]*(?::[ \t]*\w+[ \t]*(?==[^=]))?[=:][ \t]*"""
    r"""(?:[rbu]*(?P<quote>["'])(?P<quoted>[^"'\n]*)(?P=quote)|(?P<bare>[^\s"'#,;(\[{][^\s"']*))""",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"(?:password|passwd|passphrase|pwd)s?", re.IGNORECASE)
_OFTEN_PUBLIC = re.compile(r"(?:key|header|sig|signature|auth)s?", re.IGNORECASE)
_CREDENTIAL_FILE = re.compile(
    r"\.env(\..+)?|.+\.env|[._]?netrc|\.?pgpass(\.conf)?|\.pypirc|\.git-credentials|\.htpasswd|\.dockercfg|kaggle\.json"
    r"|id_(rsa|dsa|ecdsa|ed25519)"
    r"|.+\.(p12|pfx|jks|keystore|kdbx|ppk)|credentials(\.(csv|json|ya?ml|ini|toml))?|kubeconfig|\.?obsutilconfig"
)
_PROGRAM = re.compile(  # in these a value is a literal; in other files, `password: x` is a setting
    r".+\.(pyi?|pyx|ipynb|[cm]?[jt]sx?|c|cc|cpp|cxx|cu|cuh|h|hpp|java|kt|go|rs|rb|php|pl|lua|r|jl|scala|swift|cs|m|mm"
    r"|sql|md|rst|tex|html?|css|scss|svg|csv|tsv|json|jsonl|log|diff|patch|map|pxd|f90|typed)"
)
_READ = 32 * 2**20  # bytes of a file that are scanned; longer text is probably data


class Finding(NamedTuple):
    """What looks like a secret: its line in the file, from 1 on, 0 for the whole file; and its kind."""

    line: int
    kind: str


def scan(path: str, source: str | bytes) -> list[Finding]:
    """Return the findings in the file `source`, or in these bytes, stored as `path`: one a line at most.
    `pack` calls it for each file before it writes any. A binary file has none. Raises BadInput."""
    name = os.path.basename(path).lower()
    if _CREDENTIAL_FILE.fullmatch(name):
        return [Finding(0, "a file that holds credentials, by its name")]
    if isinstance(source, str):
        with explained(f"{path} cannot be read"), open(source, "rb") as file:
            source = file.read(_READ)
    if source.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # editors of Windows write it
        text = source.decode("utf-16", errors="replace")
    elif b"\0" in source[:8192]:
        return []
    else:
        text = source.decode("utf-8", errors="replace")
    text = text.replace('\\"', ' "')  # JSON in a string, and the code of a notebook
    kinds: dict[int, str] = {}  # line -> its first kind
    for kind, pattern in _FORMS:
        group = "value" if "value" in pattern.groupindex else 0
        for match in pattern.finditer(text):
            if not (group and _PLACEHOLDER.fullmatch(match[group])):
                kinds.setdefault(text.count("\n", 0, match.start(group)) + 1, kind)
    is_program = _PROGRAM.fullmatch(name) is not None
    for number, line in enumerate(text.split("\n"), 1):
        # most lines cannot have a setting
        may_hold = (":" in line or "=" in line) and not (is_program and "'" not in line and '"' not in line)
        kind = _find_setting(line, is_program) if may_hold else ""
        if kind:
            kinds.setdefault(number, kind)
    return [Finding(line, kinds[line]) for line in sorted(kinds)]


def _find_setting(line: str, is_program: bool) -> str:
    """Return the kind of the first secret in the settings of a line, "" without one."""
    for match in _SETTING.finditer(line):
        is_bare = match["quoted"] is None and not is_program
        value = match["bare"].rstrip(",;)}]") if is_bare else (match["quoted"] or "").strip()
        if match["public"] or (is_program and " " in value) or _PLACEHOLDER.fullmatch(value):
            continue
        if _PASSWORD.fullmatch(match["name"]):
            if len(value) >= 4 and value[0] not in "/.":  # not a path
                return "a password"
        elif _RANDOM.fullmatch(value) and not _OFTEN_PUBLIC.fullmatch(match["name"]):
            return "a key or token"
    return ""


def describe(path: str, findings: list[Finding]) -> str:
    """Return the findings of a file as one line, "path:2 (a password), line 5 (a private key)". A kind has
    its first line, and the number of further ones."""
    if not findings[0].line:  # a file that is refused by its name
        return f"{path} ({findings[0].kind})"
    lines_of: dict[str, list[int]] = {}  # kind -> its lines
    for finding in findings:
        lines_of.setdefault(finding.kind, []).append(finding.line)
    parts = []
    for kind, (first, *others) in lines_of.items():
        more = f", and in {len(others)} more" if others else ""
        parts.append(f"line {first} ({kind}{more})")
    return f"{path}:{', '.join(parts).removeprefix('line ')}"  # as compilers write it


def looks_secret(name: str, value: str) -> bool:
    """Return whether the name or the value of a setting looks like a secret."""
    is_named = is_secret(name, value) or re.search(r"://[^/@\s'\"]+@", value)
    return bool(is_named or scan("job.toml", f'{name} = "{value}"'.encode()))

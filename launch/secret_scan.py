"""Find text that looks like a secret, in files to upload and in the variables of a job.

Findings name file, line and kind, never the text. The console and the service's API show a job's environment
and parameters in clear text to every user who can view the job.
"""

import os
import re
from typing import NamedTuple

from common.exits import BadInput

_KEYS = [  # formats that only such keys have
    ("a private key", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d"),
    ("an AWS access key", r"\b(?:AKIA|ASIA)(?!\w*EXAMPLE)[A-Z0-9]{16}\b"),
    ("a Huawei Cloud access key", r"\bHPUA[A-Z0-9]{16}\b"),
    ("an access key and its secret key", r"\b[A-Z0-9]{20}\b[\"']?[,;:\s]+[\"']?[A-Za-z0-9]{40}\b"),
    ("a Hugging Face token", r"\bhf_[A-Za-z0-9]{30,}"),
    ("a GitHub token", r"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{22})"),
    ("a GitLab token", r"\bglpat-[\w-]{20}"),
    ("a Slack token", r"\bxox[abposr]-[A-Za-z0-9-]{10}"),
    ("an API key", r"\b(?:sk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{32}|AIza[\w-]{35}\b)"),
]
_KEY = re.compile("|".join(f"({pattern})" for _, pattern in _KEYS))
_URL = re.compile(r"[a-z0-9]://[^\s/:@\"'`<>]{0,256}:([^\s/@\"'`]{1,1024})@[\w\[$.{<-]", re.IGNORECASE)
_VALUE = (
    r"""["']?\s*(?::\s*\w+\s*)?(?:=|:)\s*(?:[rbu]*(["'])(?P<quoted>[^"']*)\1|(?P<bare>[^\s"'#,;(\[{]\S*))"""
)
_PASSWORD = re.compile(rf"(?:password|passwd|passphrase|pwd){_VALUE}", re.IGNORECASE)
_TOKEN = re.compile(
    rf"(?:(?:access|api|secret|auth|private)[_-]?key(?:[_-]id)?|secret|token|(?:^|[^a-z])[as]k){_VALUE}",
    re.IGNORECASE | re.MULTILINE,
)
_PLACEHOLDER = re.compile(
    r"[<${%*[(].*|os\.(?:environ|getenv).*|.*[{}<>].*|[x*.•_-]+"
    r"|(?:your|my|the|test|dummy|fake|example|change|insert|replace)[\w -]*"
    r"|pass(?:word|wd|phrase)?|pw|pwd|secret|token|none|null|nil|true|false|required|optional|testing",
    re.IGNORECASE,
)
_RANDOM = re.compile(r"(?=\D*\d)(?=[^a-z]*[a-z])[\w+/=.~-]+", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Z]+(?:_[A-Z0-9]+)+")
_CREDENTIAL_FILE = re.compile(
    r"\.env(\..+)?|.+\.env|[._]netrc|\.pypirc|\.git-credentials|\.htpasswd|id_(rsa|dsa|ecdsa|ed25519)"
    r"|.+\.(p12|pfx|jks|keystore|kdbx|ppk)|credentials(\.(csv|json|ya?ml|ini|toml))?|kubeconfig|\.?obsutilconfig"
)
_EXAMPLES = (".example", ".sample", ".template", ".dist")  # .env.example: scanned, not refused by its name
_CONFIGURATION = {
    ".ini", ".cfg", ".conf", ".config", ".toml", ".yaml", ".yml", ".json", ".properties", ".env", ".txt",
    ".xml", ".sh", *_EXAMPLES, "",
}  # fmt: skip
_SECRET_NAME = re.compile(
    r"(^|_|-)(SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|CREDENTIALS?|APIKEY|SK|AK)(_|-|$)"
    r"|(ACCESS|API|PRIVATE|SECRET|AUTH)_?-?KEY",
    re.IGNORECASE,
)
_USER_INFO = re.compile(r"(?<=://)[^/@\s'\"]+@")
_READ = 32 * 2**20  # bytes of a file that are scanned; longer text is probably data


class Finding(NamedTuple):
    """A suspected secret. line: from 1; None if the file's name is the reason."""

    path: str
    line: int | None
    kind: str

    def __str__(self) -> str:
        return f"{self.path} ({self.kind})" if self.line is None else f"{self.path}:{self.line} ({self.kind})"


def scan(path: str, source: str) -> list[Finding]:
    """Return the findings in the file `source`, to be stored as `path`. Both names are checked. Raises
    BadInput."""
    for name in (os.path.basename(path), os.path.basename(source)):
        if _CREDENTIAL_FILE.fullmatch(name.lower()) and not name.lower().endswith(_EXAMPLES):
            return [Finding(path, None, "a file that holds credentials, by its name")]
    try:
        with open(source, "rb") as file:
            return scan_text(path, file.read(_READ))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error


def scan_text(path: str, content: bytes) -> list[Finding]:
    """Return the findings in the content of a file called `path`, at most one per line. A binary file has
    none."""
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        text = content.decode("utf-16", errors="replace")
    elif b"\0" in content[:8192]:
        return []
    else:
        text = content.decode("utf-8", errors="replace")
    configuration = os.path.splitext(path)[1].lower() in _CONFIGURATION
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        kind = _kind(line, configuration)
        if kind:
            found.append(Finding(path, number, kind))
    return found


def _kind(line: str, configuration: bool) -> str | None:
    key = _KEY.search(line)
    if key and key.lastindex:
        return _KEYS[key.lastindex - 1][0]
    for match in _URL.finditer(line):
        if not _PLACEHOLDER.fullmatch(match[1]):
            return "a URL with a password"
    for match in _PASSWORD.finditer(line):
        value = _given(match, configuration)
        if len(value) >= 4 and not value.startswith(("/", ".")):
            return "a password"
    for match in _TOKEN.finditer(line):
        value = _given(match, configuration)
        if 16 <= len(value) <= 4096 and _RANDOM.fullmatch(value):
            return "a key or token"
    return None


def _given(match: re.Match, configuration: bool) -> str:
    """Return the value of an assignment; "" for none or a placeholder. In a program only literals count."""
    value = match["quoted"] or (match["bare"] or "" if configuration else "")
    placeholder = _PLACEHOLDER.fullmatch(value) or _VARIABLE.fullmatch(value)
    return "" if placeholder or (not configuration and " " in value) else value


def refuse(table: str, name: str, value: str) -> None:
    """Raise BadInput if the name or the value of a job's variable looks like a secret. The error does not
    contain the value."""
    if _looks_secret(name, value) or _USER_INFO.search(value):
        raise BadInput(
            f"[{table}] {name} looks like a secret, and everyone who sees the job would see it: give the job "
            "its rights through the platform (an agency on ModelArts, a role on SageMaker, a mounted secret "
            "on Kubernetes)"
        )


def shown(name: str, value: object, texts: bool = True) -> str:
    """Return a value in a form that an error may contain.

    A URL loses its user name and password, and long text is shortened. The result is "(not shown)" for a
    suspected secret, for text of several lines, and for a list or table that contains text. If `texts` is
    false, all text is hidden.
    """
    text = repr(value)
    if isinstance(value, str):
        hidden = not texts or len(value.splitlines()) > 1
    else:
        hidden = "'" in text or '"' in text
    if hidden or _looks_secret(name, str(value)):
        return "(not shown)"
    text = _USER_INFO.sub("***@", text)
    return text if len(text) <= 120 else f"{text[:120]}..."


def _looks_secret(name: str, value: str) -> bool:
    found = scan_text("job.toml", f'{name} = "{value}"'.encode())
    return bool(found or _SECRET_NAME.search(name))

"""Find text that looks like a secret, in files to upload and in the variables of a job.

Findings name file, line and kind, never the text. The console and the service's API show a job's environment
and parameters in clear text to every user who can view the job.
"""

import os
import re

from bootfile.ground.files import explained
from bootfile.ground.secrets import SECRET_NAME, is_secret

_FORMATS = {  # formats that only such keys have
    "a private key": r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d",
    "an AWS access key": r"\b(?:AKIA|ASIA)(?!\w*EXAMPLE)[A-Z0-9]{16}\b",
    "a Huawei Cloud access key": r"\bHPUA[A-Z0-9]{16}\b",
    "an access key and its secret key": r"\b[A-Z0-9]{20}\b[\"']?[,;:\s]+[\"']?[A-Za-z0-9]{40}\b",
    "a token of a service": r"\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{36}|\bgithub_pat_\w{22}"
    r"|\bglpat-[\w-]{20}|\bxox[abposr]-[A-Za-z0-9-]{10}|\bAIza[\w-]{35}\b"
    r"|\bsk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{32}",
}
_URL = re.compile(r"[a-z0-9]://[^\s/:@\"'`<>]{0,256}:([^\s/@\"'`]{1,1024})@[\w\[$.{<-]", re.IGNORECASE)
_ASSIGNMENT = re.compile(
    rf"""({SECRET_NAME.pattern})["']?\s*(?::\s*\w+\s*)?[=:]\s*"""
    r"""(?:[rbu]*(["'])(?P<quoted>[^"']*)\2|(?P<bare>[^\s"'#,;(\[{]\S*))""",
    re.IGNORECASE,
)
_PASSWORD = re.compile(r"(?:password|passwd|passphrase|pwd)s?", re.IGNORECASE)
_OFTEN_PUBLIC = re.compile(r"(?:key|header|sig|signature|auth)s?", re.IGNORECASE)  # in a file
_PLACEHOLDER = re.compile(
    r"[<${%*[(].*|os\.(?:environ|getenv).*|.*[{}<>].*|[x*.•_-]+|(?-i:[A-Z]+(?:_[A-Z0-9]+)+)"
    r"|(?:your|my|the|test|dummy|fake|example|change|insert|replace)[\w -]*"
    r"|pass(?:word|wd|phrase)?|pw|pwd|secret|token|none|null|nil|true|false|required|optional|testing",
    re.IGNORECASE,
)
_RANDOM = re.compile(r"(?=\D*\d)(?=[^a-z]*[a-z])[\w+/=.~-]{16,4096}", re.IGNORECASE)
_CREDENTIAL_FILE = re.compile(
    r"\.env(\..+)?|.+\.env|[._]netrc|\.pypirc|\.git-credentials|\.htpasswd|id_(rsa|dsa|ecdsa|ed25519)"
    r"|.+\.(p12|pfx|jks|keystore|kdbx|ppk)|credentials(\.(csv|json|ya?ml|ini|toml))?|kubeconfig|\.?obsutilconfig"
)
_CONFIGURATION = re.compile(r"(.*\.(ini|cfg|conf|config|toml|ya?ml|json|properties|env|txt|xml|sh)|\.?[^.]+)")
_READ = 32 * 2**20  # bytes of a file that are scanned; longer text is probably data


def scan(path: str, source: str | bytes) -> list[str]:
    """Return the findings "path:line (kind)" in the file `source`, or in these bytes, to be stored as `path`:
    at most one per line. A binary file has none. Raises BadInput."""
    if _CREDENTIAL_FILE.fullmatch(os.path.basename(path).lower()):
        return [f"{path} (a file that holds credentials, by its name)"]
    if isinstance(source, str):
        with explained(f"{path} cannot be read"), open(source, "rb") as file:
            source = file.read(_READ)
    if b"\0" in source[:8192]:
        return []
    text = source.decode("utf-8", errors="replace")
    formats = {kind: pattern for kind, pattern in _FORMATS.items() if re.search(pattern, text)}
    is_program = not _CONFIGURATION.fullmatch(os.path.basename(path).lower())
    kinds = (_find(line, formats, is_program) for line in text.split("\n"))
    return [f"{path}:{number} ({kind})" for number, kind in enumerate(kinds, 1) if kind]


def _find(line: str, formats: dict[str, str], is_program: bool) -> str | None:
    """Return the kind of the first secret in a line. formats: kind -> pattern, of those in the file."""
    for kind, pattern in formats.items():
        if re.search(pattern, line):
            return kind
    if ":" not in line and "=" not in line:  # half of all lines
        return None
    if "://" in line and any(not _PLACEHOLDER.fullmatch(match[1]) for match in _URL.finditer(line)):
        return "a URL with a password"
    if is_program and not ("'" in line or '"' in line):  # in a program only literals count
        return None
    for match in _ASSIGNMENT.finditer(line):
        value = match["quoted"] or ("" if is_program else match["bare"]) or ""
        if _PLACEHOLDER.fullmatch(value) or (is_program and " " in value):
            continue
        if _PASSWORD.fullmatch(match[1]):
            if len(value) >= 4 and value[0] not in "/.":
                return "a password"
        elif _RANDOM.fullmatch(value) and not _OFTEN_PUBLIC.fullmatch(match[1]):
            return "a key or token"
    return None


def looks_secret(name: str, value: str) -> bool:
    """Return whether the name or the value of a setting looks like a secret."""
    is_named = is_secret(name, value) or re.search(r"://[^/@\s'\"]+@", value)
    return bool(is_named or scan("job.toml", f'{name} = "{value}"'.encode()))

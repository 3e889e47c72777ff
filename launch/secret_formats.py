"""Forms that only secrets have: keys, tokens, HTTP headers, files of known programs by their content.

secret_scan searches each text for them, whatever the file is called.
"""

import base64
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

PLACEHOLDER = re.compile(
    r"[<${%*[(].*|os\.(?:environ|getenv).*|.*[{}<>].*|[x*.•_-]+|(?-i:[A-Z]+(?:_[A-Z0-9]+)+)"
    r"|(?:your|my|the|test|dummy|fake|example|change|insert|replace)[\w -]*"
    r"|pass(?:word|wd|phrase)?|pw|pwd|secret|token|none|null|nil|true|false|required|optional|testing"
    r"|.*(?:\*{3}|\.{3}).*|[a-z_][\w.]*\(.*|(?-i:.*EXAMPLE.*)",
    re.IGNORECASE,
)
# What documents write in a header or in a netrc file: access-token, mypassword, the example of RFC 7617.
_EXAMPLE = re.compile(
    r"[\w.-]{0,24}(?:token|passw(?:or)?d|secret|key|credentials?|here|pass)s?|QWxhZGRpbjpvcGVuIHNlc2FtZQ==",
    re.IGNORECASE,
)
RANDOM = re.compile(r"(?=\D*\d)(?=[^a-z]*[a-z])[\w+/=.~-]{16,4096}", re.IGNORECASE)
_WORD = re.compile(r"[a-z]{1,19}|[A-Z]{1,19}|[A-Z][a-z]{1,18}")
_QUOTED = r"""["'](?P<value>[^"'\n]{4,200})["']"""


def _is_any(value: str) -> bool:
    """Return whether a value is none that documents write: enough if its form is that of no other text."""
    return not PLACEHOLDER.fullmatch(value) and not _EXAMPLE.fullmatch(value)


def _is_no_word(value: str) -> bool:
    """Return whether a value is more than a word, as in "Bearer authentication", "password protected"."""
    return _is_any(value) and not _WORD.fullmatch(value)


def is_mixed(value: str) -> bool:
    """Return whether a value has 8 or more characters, digits and letters: a short key, or a password."""
    return (
        len(value) >= 8 and bool(re.search(r"\d", value) and re.search(r"[A-Za-z]", value)) and _is_any(value)
    )


def _is_random(value: str) -> bool:
    return bool(RANDOM.fullmatch(value)) and _is_any(value)


def is_user_and_password(value: str) -> bool:
    """Return whether a value is base64 of "user:password", as after `Basic` and in Docker's auths."""
    if not re.fullmatch(r"[A-Za-z0-9+/_-]{8,4096}={0,2}", value) or _EXAMPLE.fullmatch(value):
        return False
    try:
        decoded = base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_").decode("ascii")
    except ValueError:  # neither base64 nor text
        return False
    return decoded.isprintable() and re.fullmatch(r"[\w.@+$|-]+:[^:].{2,}", decoded) is not None


class Format(NamedTuple):
    """A form of secrets.

    kind: what the user reads.
    words: in lower case, the rarest that the pattern needs: a text without any of them is not searched, which
        saves most of the time.
    pattern: its group `value`, if it has one, is the secret itself.
    accepts: whether a value is a secret, and not a placeholder.
    """

    kind: str
    words: tuple[str, ...]
    pattern: re.Pattern[str]
    accepts: Callable[[str], bool] = _is_any

    def find(self, text: str) -> Iterator[int]:
        """Yield where in the text a secret of this form is. For a pattern with `value` it is that place."""
        for match in self.pattern.finditer(text):
            if "value" not in self.pattern.groupindex:
                yield match.start()
            elif match["value"] is not None and self.accepts(match["value"]):
                yield match.start("value")


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE | re.MULTILINE)


# Each is only for such keys, with upper and lower case as the service writes them.
_TOKENS = {
    "hf_": r"\bhf_[A-Za-z0-9]{30,}",
    "api_org_": r"\bapi_org_[A-Za-z0-9]{30,}",
    "ghp_": r"\bghp_[A-Za-z0-9]{36}",
    "gho_": r"\bgho_[A-Za-z0-9]{36}",
    "ghu_": r"\bghu_[A-Za-z0-9]{36}",
    "ghs_": r"\bghs_[A-Za-z0-9]{36}",
    "ghr_": r"\bghr_[A-Za-z0-9]{36}",
    "github_pat_": r"\bgithub_pat_\w{22}",
    "glpat-": r"\bglpat-[\w-]{20}",
    "xox": r"\bxox[abeposr]-[A-Za-z0-9-]{10}",
    "xapp-": r"\bxapp-\d-[A-Z0-9]+-\d+-[a-f0-9]{16}",
    "aiza": r"\bAIza[\w-]{35}\b",
    "ya29.": r"\bya29\.[\w-]{30}",
    "sk-": r"\bsk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{32}",
    "k_live_": r"\b[sr]k_live_[A-Za-z0-9]{20}",
    "npm_": r"\bnpm_[A-Za-z0-9]{36}\b",
    "pypi-": r"\bpypi-AgE[\w-]{40}",
    "dckr_pat_": r"\bdckr_pat_[\w-]{20}",
    "dop_v1_": r"\bdo[opr]_v1_[a-f0-9]{64}\b",
    "dapi": r"\bdapi[a-f0-9]{32}\b",
    "sg.": r"\bSG\.[\w-]{22}\.[\w-]{43}\b",
    "wandb_v1_": r"\bwandb_v1_[\w-]{40}",
    "ltai": r"\bLTAI[A-Za-z0-9]{20}\b",
    "akid": r"\bAKID[A-Za-z0-9]{32}\b",
    "age-secret-key-": r"\bAGE-SECRET-KEY-1[A-Z0-9]{50}",
    ":aa": r"\b\d{8,10}:AA[\w-]{33}\b",  # a bot of Telegram has it
    "/t/": r"/t/[a-z]{2}-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22,}/",  # in a channel of conda
    "eyj": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{20,}",
}
_WEBHOOKS = (
    r"hooks\.slack\.com/services/T\w{6,}/B\w{6,}/\w{16,}|discord(?:app)?\.com/api/webhooks/\d+/[\w-]{40,}"
)
# Names of settings that stand apart from their values.
_OF_PASSWORD = r"[\w.-]{0,40}(?:password|passwd|passphrase)"
_OF_KEY = r"[\w.-]{0,40}(?:token|secret|api[_-]?key|access[_-]?key|secret[_-]?key|private[_-]?key)"
# `name: X` and `value: Y`, as in a manifest of Kubernetes
_NAME_AND_VALUE = (
    r"""\bname["']?\s{{0,4}}[:=]\s{{0,4}}["']?{}["']?\s{{0,4}},?\s{{0,40}}["']?value["']?\s{{0,4}}[:=]\s{{0,4}}["']?"""
    r"""(?P<value>[^\s"',{{}}]{{4,4096}})"""
)
# `password: |`, and the value in the next line
_BLOCK = (
    r"^[\s-]{{0,40}}[\"']?{}[\"']?:[ \t]{{0,4}}[|>][+-]?[ \t]*\r?\n"
    r"[ \t]{{1,40}}(?P<value>\S{{4,4096}})[ \t]*\r?$"
)
# The words of a netrc file.
_LOGIN = r"(?:(?:login|user|account)\s+\S+\s+)"
_PASSWORD = r"(?:password|passwd)\s+(?P<value>[^\s\"'\\]{4,})"
_HOST = r"(?:[\w-]+(?:\.[\w-]+)+|localhost)"
FORMATS = (
    Format(
        "a private key",
        ("private key", "putty-user-key-file", "ls0tls1crudjti"),
        # then in base64, as in a kubeconfig
        re.compile(
            r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d"
            r"|LS0tLS1CRUdJTi(?:BQUklW|BSU0Eg|BFQyBQ|BPUEVOU1NI|BFTkNSWVBU|BEU0Eg)"
        ),
    ),
    Format("an AWS access key", ("akia", "asia"), re.compile(r"\b(?:AKIA|ASIA)(?!\w*EXAMPLE)[A-Z0-9]{16}\b")),
    Format("a Huawei Cloud access key", ("hpua",), re.compile(r"\bHPUA[A-Z0-9]{16}\b")),
    Format(
        "an access key and its secret key",
        (),
        re.compile(r"\b[A-Z0-9]{20}\b[\"']?[,;:\s]+[\"']?[A-Za-z0-9]{40}\b"),
    ),
    *(Format("a token of a service", (word,), re.compile(pattern)) for word, pattern in _TOKENS.items()),
    Format("an address of a webhook", ("hooks.slack.com", "/api/webhooks/"), re.compile(_WEBHOOKS)),
    Format(
        "an HTTP header with a key",
        ("authorization",),
        _compile(
            r"""\bauthorization["'\\\])]{0,4}\s{0,8}[:=,]\s{0,8}[frbu]{0,2}["'\\]{0,2}"""
            r"""(?:bearer|basic|token|apikey|key)\s+(?P<value>[^\s"'\\,;)}\]]{4,4096})"""
        ),
        _is_no_word,
    ),
    Format(
        "an HTTP header with a key",
        ("bearer",),
        _compile(r"\bbearer\s+(?P<value>[\w.~+/-]{20,4096}=*)"),
        _is_random,
    ),
    Format(
        "an HTTP header with a key",
        ("basic",),
        _compile(r"\bbasic\s+(?P<value>[A-Za-z0-9+/]{8,4096}={0,2})"),
        is_user_and_password,
    ),
    Format(
        "an HTTP header with a key",
        ("key", "token", "secret", "cookie"),
        _compile(r"""["'][\w-]{0,40}(?:key|token|secret|cookie):\s{0,4}(?P<value>[^\s"'\\]{16,4096})["']"""),
        _is_random,
    ),
    Format(
        "a password of a netrc file",
        ("passw",),
        _compile(rf"\b(?:machine\s+{_HOST}|default)\s+{_LOGIN}{{1,2}}{_PASSWORD}"),
    ),
    Format(
        "a password of a netrc file",
        ("passw",),
        _compile(rf"\bmachine\s+{_HOST}\s+{_PASSWORD}"),
    ),
    Format(
        "a password of a netrc file",  # of a host without a dot, which may be a sentence
        ("passw",),
        _compile(rf"\bmachine\s+\S+\s+{_LOGIN}{{1,2}}{_PASSWORD}"),
        _is_no_word,
    ),
    Format(
        "a password of a pgpass file",
        (":",),
        _compile(
            r"^(?:\*|[\w.-]{1,255}|/[\w./-]{1,255}):(?:\*|\d{2,5}):(?!\d+:)[^:\s]{1,63}:[^:\s]{1,63}:"
            r"(?P<value>(?:[^:\s\\]|\\.){4,512})\r?$"
        ),
    ),
    Format(
        "a hashed password",
        (":$", ":{s"),
        re.compile(
            r"^[^\s:#]{1,255}:(?:\$apr1\$|\$2[abxy]\$\d\d\$|\{S?SHA\}|\$[1567y]\$)[\w./$+=-]{13,}",
            re.MULTILINE,
        ),
    ),
    Format(
        "a key in a connection string",
        ("accountkey", "sharedaccesskey", "sharedsecret", "sig="),
        _compile(
            r"(?:\b(?:AccountKey|SharedAccessKey|SharedSecret(?:Value)?)=|[?&]sig=)"
            r"(?P<value>[A-Za-z0-9%+/-]{30,}={0,2})"
        ),
    ),
    Format(
        "a password",  # in a string: "host=db user=me password=x", "Server=db;Pwd=x;"
        ("password", "pwd"),
        _compile(
            r"""["'][^"'\n]{0,200}?\b(?:host|server|source|user|user ?id|uid|dbname|database)\s?="""
            r"""[^\s;,"'=]+[;\s]+"""
            r"""(?:[^"'\n]{0,200}?[;\s])?(?:password|pwd)\s?=\s?(?P<value>[^\s;"']{4,200})"""
        ),
    ),
    Format(
        "a password",
        ("auth", ".login("),
        _compile(
            rf"""(?:\bauth\s?=\s?\(|HTTP(?:Basic|Digest)Auth\(|\.login\()\s*["'][^"'\n]{{1,200}}["'],\s*{_QUOTED}"""
        ),
    ),
    Format(
        "a key or token",
        ("login",),
        _compile(r"""\blogin\b[^\n]{0,80}?[\s=("']["']?(?P<value>[a-f0-9]{40})(?![\w/@.-])"""),
    ),
    Format(
        "a password",
        ("curl", "wget", "sshpass", "docker", "podman", "mysql"),
        _compile(
            r"\b(?:curl\b[^\n]{0,300}?\s(?:-u|--user)[ =]?[\"']?[^\s:\"'$/]{1,100}:"
            r"|(?:sshpass|(?:docker|podman)\s+login)\b[^\n]{0,200}?\s-p\s{0,2}[\"']?|mysql\b[^\n]{0,200}?\s-p(?=\w))"
            r"(?P<value>[^\s\"']{4,200})"
        ),
    ),
    Format(
        "a key or token",
        ("-token", "-password", "-passwd", "-secret", "-key", "_token", "_password", "_secret", "_key"),
        _compile(
            r"(?<![\w-])--?[\w-]{0,40}(?:password|passwd|token|secret|api[_-]?key|access[_-]?key)[ ]+[\"']?"
            r"(?P<value>[\w+/=.~-]{8,4096})(?![\w.(\[])"
        ),
        is_mixed,
    ),
    Format(
        "a key or token",
        ("--",),
        _compile(rf"""["']--?{_OF_KEY}["'],\s{{0,40}}["'](?P<value>[\w+/=.~-]{{8,4096}})["']"""),
        is_mixed,
    ),
    Format("a password", ("passw", "passphrase"), _compile(_NAME_AND_VALUE.format(_OF_PASSWORD))),
    Format("a key or token", ("value",), _compile(_NAME_AND_VALUE.format(_OF_KEY)), _is_random),
    Format("a password", ("passw", "passphrase"), _compile(_BLOCK.format(_OF_PASSWORD)), is_mixed),
    Format("a key or token", ("|", ">"), _compile(_BLOCK.format(_OF_KEY)), _is_random),
    Format(
        "a password",
        ("</",),
        _compile(r"<[\w.:-]{0,40}(?:password|passwd|passphrase)>\s{0,4}(?P<value>[^<\s]{4,200})\s{0,4}</"),
    ),
    Format(
        "a key or token",
        ("</",),
        _compile(r"<[\w.:-]{0,40}(?:token|secret|key)>\s{0,4}(?P<value>[^<\s]{16,4096})\s{0,4}</"),
        _is_random,
    ),
    Format(
        "a Kubernetes secret",
        ("kind: secret",),
        _compile(r"^\s*(?:data|stringData):\s*\n\s+[\w.-]+:\s*[\"']?(?P<value>[^\s\"']{4,})"),
    ),
    Format(
        "an address with a token",
        ("://",),
        _compile(r"https?://(?P<value>[\w-]{20,4096})@[\w\[]"),
        _is_random,
    ),
)

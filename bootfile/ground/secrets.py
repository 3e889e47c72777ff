"""Hide secrets in what a job prints: values of secret options, and parts of addresses."""

import re

from bootfile.ground import errors

# Names of settings with a secret value: --api_key, HF_TOKEN, my-sk. Some words count only at its end.
SECRET_NAME = re.compile(
    r"(?:passwd|password|pass[_-]?phrase|passcode|secret|credential|authorization|bearer|cookie|webhook)s?(?![a-z])"
    r"|(?:api|access|account|private|secret|auth|encryption|signing|shared|ssh)[_-]?keys?(?![a-z])"
    r"|(?:token|signature|(?<![a-z])(?:ak|sk|sas|sig|pin(?:code)?|t?otp|pat|pwd|pw|pass|jwt|dsn|o?auth|header|key))s?"
    r"(?:[_-]?(?:id|value|env|\d+))*(?![\w-])",
    re.IGNORECASE,
)
_COUNTED = re.compile(r"(?:token|header|key|pass)s?$", re.IGNORECASE)  # with a number: --max_tokens 512
_SPECIAL = re.compile(  # --pad_token, --image_key, --allow_secret PATH
    r"(?:pad|mask|cls|class|[beu]os|unk|sep|special|image|label|target|text|data|sort|group|cache)"
    r"[_-]?(?:token|header|key)s?$|^-*(?:allow|use|no)[_-]",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"true|false|none|[+-]?[\d.]+(?:e[+-]?\d+)?", re.IGNORECASE)
_SETTING = re.compile(  # name=value, and 'name': 'value'
    r"([A-Za-z][\w.-]{0,80})(?:=|[\"']\s*:\s*(?=[\"']))(?![{\[(]\s*[\"'])(\"[^\"]*\"|'[^']*'|[^\s&]+)"
)
_HEADER = re.compile(
    r"((?:\b(?:authorization|cookie)|\bx-[\w-]{0,40}(?:token|key))\s*:\s*)[^\s'\"][^'\"]*"
    r"|(\bbearer\s+)(?=[a-z]*[^a-z\s.,;:)])[^\s'\"]{4,}",
    re.IGNORECASE,
)
_values: set[str] = set()  # values of the secret options of this process
# scheme://user:password@hosts/path?query, and user:password@host; only a password may hold spaces
_ADDRESS = re.compile(r"(?<![\w+.-])([\w+.-]*)://((?:(?:(?!\s[^\s@]*://).)*@)?\S*)", re.DOTALL)
_PLACE = re.compile(r"([^/?#;&]*)([^?#;&]*)(.*)", re.DOTALL)
_HOST = re.compile(r"(\[[\da-f:.]*\]|[^\s:\[\]]*)(\[?:(\d{1,5}|port)\]?)?", re.IGNORECASE)
_USER = re.compile(r"(?<!\S)(?!\.*/[^/])([^\s:@]*:)(?!//|\s)(?:(?!\s[^\s@]*://).){1,999}@", re.DOTALL)


def is_secret(name: str, value: object = None) -> bool:
    """Return whether a setting of this name may hold a secret. value: a number or a switch may be none."""
    if not SECRET_NAME.search(name) or _SPECIAL.search(name):
        return False
    is_plain = value is not None and _PLAIN.fullmatch(str(value))
    return not is_plain or not (_COUNTED.search(name) or str(value).lower() in ("true", "false", "none"))


def hide(value: str) -> None:
    """Show this value of a secret option nowhere: mask_values() replaces it in each line that is printed.
    Shorter than 3 it is not hidden."""
    if mask_values not in errors.masks:
        errors.masks.append(mask_values)
    if len(value) > 2:
        _values.update((value, repr(value)[1:-1]))


def mask_values(text: str) -> str:
    """Return the text with *** for the values of hide()."""
    # the longest first: a shorter value may be a part of it, and would leave the rest
    for value in sorted(_values, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "***", text)
    return text


def mask(text: str) -> str:
    """Return the text with *** for the values of hide(), and for the parts of addresses that may be secret:
    user and password, query, path of a cache or of a webhook, hosts that are not host[:port]; also
    for the values of headers and of settings with a name such as token."""
    text = _ADDRESS.sub(_mask_address, _USER.sub(r"\1***@", mask_values(text)))
    text = _HEADER.sub(r"\1\2***", text)
    at = 0
    while True:
        match = _SETTING.search(text, at)
        if match is None:
            return text
        at = match.start(2)  # the value may hold another setting
        if is_secret(match[1], match[2].strip("'\"")):
            text = f"{text[:at]}***{text[match.end() :]}"
            at += 3


def _mask_address(match: re.Match[str]) -> str:
    """Return an address that _ADDRESS has found without its secrets."""
    scheme = match[1]
    user, _, place = match[2].rpartition("@")
    hosts, path, query = _PLACE.fullmatch(place).groups()  # type: ignore[union-attr]  # it matches any text
    are_hosts = all(_HOST.fullmatch(host.rstrip(".,:;)'\"`")) for host in hosts.split(","))
    if not are_hosts or re.search("[?#]", user):  # the @ may belong to a query
        return f"{scheme}://***"
    is_cache = scheme.startswith("redis") and not re.fullmatch(r"(/\d{0,5})?", path)  # a database's number
    is_hook = scheme.startswith("http") and re.search(r"hook|/services/|/bot\d", hosts + path, re.IGNORECASE)
    if is_cache or is_hook:
        path = "/***"
    unsure = "***@" if "/" in user else ""  # the @ may belong to a path
    return f"{scheme}://{unsure}{hosts}{path}{'?***' if query else ''}"
